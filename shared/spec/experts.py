"""Mixture of experts (MoE): a router selects top-k gated MLPs for each row and weights their
outputs.

The order of a row's sum is part of the numerics. Experts are added by ascending index, each output
multiplied by its weight first, in float32; the shared expert is last. The result therefore depends
neither on the order of ties nor on other rows.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Float32, Int

from shared.models.activation import Activation
from shared.models.mlp import MoEConfig
from shared.spec import layers, linear
from shared.spec.linear import Matrix, NormedStream


@dataclass(frozen=True)
class ParallelMLP:
    """Dense MLP in parallel to experts, and the norms of both branches.

    Attributes:
      gate_up, down: Projections of the MLP.
      router_norm, expert_norm: Scales of the norms before the router and before the experts; that
        of the router includes hidden ** -0.5.
      mlp_end_norm, expert_end_norm: Scales of the norms after the MLP and after the experts.
    """

    gate_up: Matrix
    down: Matrix
    router_norm: Float[np.ndarray, " hidden"]
    expert_norm: Float[np.ndarray, " hidden"]
    mlp_end_norm: Float[np.ndarray, " hidden"]
    expert_end_norm: Float[np.ndarray, " hidden"]


@dataclass(frozen=True)
class Experts:
    """Weights of an MoE block.

    Attributes:
      router: One row per expert, and one more for the gate of the shared expert.
      gate_up: Gate rows, if any, and then up rows of each expert; a shared expert of the same width
        is last. Router and experts may have biases.
      down: Down projection of each expert, in the same order.
      score_bias: Bias added to scores for the selection only; None if the model has none.
      shared_gate_up, shared_down: Weights of a shared expert of another width; else None.
      latent_in, latent_out: Projections into the latent of the routed experts and back; else None.
      expert_scale: Multiplier of the weight of each expert; None if the model has none.
      parallel: Dense MLP in parallel to the experts; None without.
    """

    router: Matrix
    gate_up: Matrix
    down: Matrix
    score_bias: Float[np.ndarray, " experts"] | None
    shared_gate_up: Matrix | None = None
    shared_down: Matrix | None = None
    latent_in: Matrix | None = None
    latent_out: Matrix | None = None
    expert_scale: Float[np.ndarray, " experts"] | None = None
    parallel: ParallelMLP | None = None


@dataclass(frozen=True)
class SelectedExperts:
    """Selected experts of each row.

    Attributes:
      ids: Indices, ascending and distinct, whatever the logits.
      weights: Multipliers of the experts' outputs.
    """

    ids: Int[np.ndarray, "R chosen"]
    weights: Float32[np.ndarray, "R chosen"]


def choose(
    logits: Float32[np.ndarray, "R experts"],
    config: MoEConfig,
    bias: Float32[np.ndarray, " experts"] | None,
) -> SelectedExperts:
    """Router: selects the experts with the largest logits or scores of each row; ties go to the
    lower index.

    Softmax preserves the order of the logits, and over the selected experts alone it is the
    renormalised softmax. NaN ranks below all numbers. A row of NaN has NaN weights, and no other
    row is affected.

    Args:
      logits: Router logits.
      config: MoE config.
      bias: Bias of the scores; None for none.

    Source: DeepSeek-V3, arXiv:2412.19437 (biases, groups).
    """
    scores = layers.sigmoid(logits) if config.scores == "sigmoid" else logits
    ranked = scores if bias is None else scores + bias
    ranked = np.where(np.isnan(ranked), np.float32(-np.inf), ranked)
    ranked = np.where(_in_best_groups(ranked, config), ranked, np.float32(-np.inf))
    ids = np.sort(_best(ranked, config.top_k), axis=1)
    of_chosen = np.take_along_axis(scores, ids, axis=1)
    if config.scores == "softmax":
        among = of_chosen if config.is_renormalised else logits
        largest = among.max(axis=1, keepdims=True)
        total = _summed(np.exp(among - largest))
        return SelectedExperts(
            ids, np.exp(of_chosen - largest) / total * np.float32(config.routed_factor)
        )
    weights = of_chosen
    if config.is_renormalised:
        weights = weights / (_summed(weights) + np.float32(1e-20))
    return SelectedExperts(ids, weights * np.float32(config.routed_factor))


def _in_best_groups(ranked: Float32[np.ndarray, "R experts"], config: MoEConfig) -> np.ndarray:
    """Returns a mask of the experts in the best groups, which are ranked by the sum of their two
    best scores.
    """
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
    """Returns the sum of each row, accumulated from the first column on."""
    return np.add.accumulate(x, axis=1)[:, -1:]


def experts(
    x: Float[np.ndarray, "R hidden"],
    config: MoEConfig,
    weights: Experts,
    scored: Float[np.ndarray, "R hidden"] | None = None,
) -> Float32[np.ndarray, "R hidden"]:
    """Computes the output of the MoE block for each row, in float32.

    Args:
      x: Normed rows.
      config, weights: Config and weights of the MoE block.
      scored: Rows that the router reads; None for `x`.
    """
    logits = linear.product_float32(x if scored is None else scored, weights.router)
    chosen = choose(logits[:, : config.num_experts], config, weights.score_bias)
    if weights.expert_scale is not None:
        chosen = replace(chosen, weights=chosen.weights * weights.expert_scale[chosen.ids])
    inputs = x
    if weights.latent_in is not None:
        inputs = linear.product_float32(x, weights.latent_in).astype(x.dtype)
    out = np.zeros(inputs.shape, np.float32)
    for expert in np.unique(chosen.ids):  # ascending, as a row's experts are added
        rows, places = np.nonzero(chosen.ids == expert)
        gate_up, down = weights.gate_up.of_rows(rows), weights.down.of_rows(rows)
        own = replace(weights, gate_up=gate_up, down=down)
        of_expert = _of_expert(inputs[rows], config, own, int(expert))
        out[rows] += chosen.weights[rows, places, None] * of_expert
    if weights.latent_out is not None:
        out = linear.product_float32(out.astype(x.dtype), weights.latent_out)
    if config.shared_intermediate:
        shared = _shared(x, config, weights)
        if config.shared_is_gated:
            shared = layers.sigmoid(logits[:, config.num_experts :]) * shared
        out += shared
    return out


def _of_expert(
    x: Float[np.ndarray, "some hidden"], config: MoEConfig, weights: Experts, expert: int
) -> Float32[np.ndarray, "some hidden"]:
    return _mlp(x, weights.gate_up.at(expert), weights.down.at(expert), config.activation)


def _shared(
    x: Float[np.ndarray, "R hidden"], config: MoEConfig, weights: Experts
) -> Float32[np.ndarray, "R hidden"]:
    if weights.shared_gate_up is None or weights.shared_down is None:
        return _of_expert(x, config, weights, config.num_experts)
    return _mlp(x, weights.shared_gate_up, weights.shared_down, config.activation)


def _mlp(
    x: Float[np.ndarray, "some hidden"], gate_up: Matrix, down: Matrix, activation: Activation
) -> Float32[np.ndarray, "some hidden"]:
    """Computes an MLP; inner values are rounded to the dtype of the rows, outputs are not."""
    inner = layers.activated(linear.product_float32(x, gate_up), activation).astype(x.dtype)
    return linear.product_float32(inner, down)


def counted(stream: NormedStream) -> NormedStream:
    """Returns the stream for layers with experts; GPU backends add counters to it here."""
    return stream


def added_experts(
    stream: NormedStream,
    eps: float,
    config: MoEConfig,
    weights: Experts,
    norm: Float[np.ndarray, " hidden"] | None = None,
) -> NormedStream:
    """Computes RMS norm, MoE block and residual addition; the sum is rounded once.

    Args:
      stream: Residual stream.
      eps: Epsilon of the norm before the experts.
      config, weights: Config and weights of the MoE block.
      norm: Scale of the next norm of the stream.
    """
    rows = stream.rows
    added = experts(layers.rms_norm(rows, stream.norm, eps), config, weights)
    if config.output_factor != 1:
        added = added * np.float32(config.output_factor)
    return stream.with_next_norm((rows + added).astype(rows.dtype), norm)
