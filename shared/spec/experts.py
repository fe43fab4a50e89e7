"""A mixture of experts: a router chooses some gated MLPs for each row, and weighs what they give.

The order of a row's sum is part of the numerics: its experts by ascending number, each output first
multiplied by its weight and then added, in float32, and last the shared expert. So neither how ties
were sorted nor what other rows chose shows in a result.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Int

from shared.models.layers import ExpertsConfig
from shared.spec import layers, linear
from shared.spec.linear import Matrix, Stream


@dataclass(frozen=True)
class Experts:
    """The weights of a layer's experts.

    Attributes:
      router: A row of weights for each expert, and one more for the gate of the shared one.
      gate_up: Of each expert, the gate's rows and then those of up; a shared expert that is as wide
        as the others is the last.
      down: Of each expert, in the same order.
      score_bias: What is added to scores for the choice alone, where the model has it.
      shared_gate_up, shared_down: Of a shared expert of another width.
    """

    router: Matrix
    gate_up: Matrix
    down: Matrix
    score_bias: Float[np.ndarray, " experts"] | None
    shared_gate_up: Matrix | None
    shared_down: Matrix | None


@dataclass(frozen=True)
class Chosen:
    """The experts of each row.

    Attributes:
      ids: Their numbers, ascending and different, whatever the row's logits hold.
      weights: What their outputs are multiplied by.
    """

    ids: Int[np.ndarray, "R chosen"]
    weights: Float32[np.ndarray, "R chosen"]


def choose(
    logits: Float32[np.ndarray, "R experts"],
    config: ExpertsConfig,
    bias: Float32[np.ndarray, " experts"] | None,
) -> Chosen:
    """Chooses the experts of each row: those of the largest logits, or scores; of equals the first.

    A softmax ranks as its logits do, and over the chosen alone it is the renormalised one. A NaN
    ranks below all numbers; a row of them has it in its weights, and no other row has.

    Args:
      bias: Of the scores; None where there is none.

    Source: DeepSeek-V3, arXiv:2412.19437 (biases, groups).
    """
    scores = layers.sigmoid(logits) if config.scores == "sigmoid" else logits
    ranked = scores if bias is None else scores + bias
    ranked = np.where(np.isnan(ranked), np.float32(-np.inf), ranked)
    ranked = np.where(_in_best_groups(ranked, config), ranked, np.float32(-np.inf))
    ids = np.sort(_best(ranked, config.num_chosen), axis=1)
    of_chosen = np.take_along_axis(scores, ids, axis=1)
    if config.scores == "softmax":
        among = of_chosen if config.is_renormalised else logits
        largest = among.max(axis=1, keepdims=True)
        total = _summed(np.exp(among - largest))
        return Chosen(ids, np.exp(of_chosen - largest) / total * np.float32(config.routed_factor))
    weights = of_chosen
    if config.is_renormalised:
        weights = weights / (_summed(weights) + np.float32(1e-20))
    return Chosen(ids, weights * np.float32(config.routed_factor))


def _in_best_groups(ranked: Float32[np.ndarray, "R experts"], config: ExpertsConfig) -> np.ndarray:
    """Which experts are in the best groups, by the sums of the two best of each."""
    R, groups = len(ranked), config.num_groups
    if groups == 1:
        return np.ones(ranked.shape, bool)
    sorted_up = np.sort(ranked.reshape(R, groups, config.group_size), axis=-1)
    best = _best(sorted_up[..., -2:].sum(axis=-1), config.num_chosen_groups)
    is_in = np.zeros((R, groups), bool)
    np.put_along_axis(is_in, best, True, axis=1)
    return np.repeat(is_in, config.group_size, axis=1)


def _best(ranked: Float32[np.ndarray, "R some"], count: int) -> Int[np.ndarray, "R count"]:
    return np.argsort(-ranked, axis=1, kind="stable")[:, :count]


def _summed(x: Float32[np.ndarray, "R some"]) -> Float32[np.ndarray, "R 1"]:
    """The sum of each row, from the first column on."""
    return np.add.accumulate(x, axis=1)[:, -1:]


def experts(
    x: Float[np.ndarray, "R hidden"], config: ExpertsConfig, weights: Experts
) -> Float32[np.ndarray, "R hidden"]:
    """What the experts of each row add to the stream, in float32.

    Args:
      x: The normed rows.
    """
    logits = linear.product_float32(x, weights.router)
    chosen = choose(logits[:, : config.num_experts], config, weights.score_bias)
    out = np.zeros(x.shape, np.float32)
    for row, (ids, shares) in enumerate(zip(chosen.ids, chosen.weights, strict=True)):
        for expert, share in zip(ids, shares, strict=True):
            out[row] += share * _of_expert(x[row : row + 1], weights, int(expert))[0]
    if config.shared_intermediate:
        shared = _shared(x, config, weights)
        if config.shared_is_gated:
            shared = layers.sigmoid(logits[:, config.num_experts :]) * shared
        out += shared
    return out


def _of_expert(
    x: Float[np.ndarray, "some hidden"], weights: Experts, expert: int
) -> Float32[np.ndarray, "some hidden"]:
    return _mlp(x, weights.gate_up.of_expert(expert), weights.down.of_expert(expert))


def _shared(
    x: Float[np.ndarray, "R hidden"], config: ExpertsConfig, weights: Experts
) -> Float32[np.ndarray, "R hidden"]:
    if weights.shared_gate_up is None or weights.shared_down is None:
        return _of_expert(x, weights, config.num_experts)
    return _mlp(x, weights.shared_gate_up, weights.shared_down)


def _mlp(
    x: Float[np.ndarray, "some hidden"], gate_up: Matrix, down: Matrix
) -> Float32[np.ndarray, "some hidden"]:
    """A gated MLP; its inner values are rounded to the type of the rows, its outputs are not."""
    gate, up = np.split(linear.product_float32(x, gate_up), 2, axis=-1)
    return linear.product_float32((layers.silu(gate) * up).astype(x.dtype), down)


def counted(stream: Stream) -> Stream:
    """A stream on its way through layers with experts; kernels count their programs in it."""
    return stream


def added_experts(
    stream: Stream,
    eps: float,
    config: ExpertsConfig,
    weights: Experts,
    norm: Float[np.ndarray, " hidden"] | None = None,
) -> Stream:
    """Adds what the experts give of the normed rows to the stream; the sum is rounded once.

    Args:
      eps: Of the norm before the experts.
      norm: Of the stream that this gives.
    """
    rows = stream.rows
    added = experts(layers.rms_norm(rows, stream.norm, eps), config, weights)
    return stream.followed((rows + added).astype(rows.dtype), norm)
