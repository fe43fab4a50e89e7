"""The forward pass of Llama, Qwen3, its mixtures and Qwen3.5 over whole sequences, for training.

The same parameters as in serving, as float32 masters: products run in the compute dtype, norms,
softmax and the gated-delta recurrence in float32, and the residual stream is kept in float32.
Everything is causal, so that padding on the right of a sequence changes nothing.
"""

from typing import NamedTuple

import jax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jax_impl.layers import angles
from jax_impl.ops.attention.attention_layer import Angles
from jax_impl.ops.gemm import layers as ops
from jax_impl.training import experts, gated_delta, layers
from jax_impl.training.experts import Routed
from jax_impl.training.layers import Rows, normed
from jax_impl.training.nnx_modules import AttentionStack, Layers, ModelModule
from shared.models.config import ModelConfig
from shared.models.layers import MoEConfig

Hidden = Float[jax.Array, "B T hidden"]
Tokens = Int[jax.Array, "B T"]


class Passed(NamedTuple):
    """What a pass gives, float32.

    Attributes:
      hidden: After the final norm.
      streams: The residual stream that enters each layer, and the one that leaves the last.
      routed: Of each layer with experts, in order, the rows flat.
    """

    hidden: Hidden
    streams: tuple[Hidden, ...]
    routed: tuple[Routed, ...] = ()


class LayerIndex(NamedTuple):
    """Which of the layers one is: of all, of those with its mixer, and of those with its feed."""

    layer: int
    mixer: int
    feed: int


def check_trained(config: ModelConfig) -> None:
    """Refuses a model of which this pass would leave something out.

    Raises:
      ValueError: It has that; one sentence that names it.
    """
    attention, dense, sizes = config.attention, config.dense, config.experts
    factors = (config.embedding_factor, config.residual_factor)
    missing = {
        "norms behind mixers and MLPs": config.post_norm,
        "shared experts": sizes is not None and sizes.shared_intermediate > 0,
        "experts that a sigmoid scores": sizes is not None and sizes.scores == "sigmoid",
        "biases": attention.input_bias or attention.out_bias or (dense is not None and dense.bias),
        "sliding windows": any(each.window for each in config.attentions),
        "queries that grow with their position": attention.query_scaling_beta > 0,
        "layers that turn in different ways": len({x.rotary for x in config.attentions}) > 1,
        "factors": attention.scale is not None or {*factors, config.logits_factor} != {1.0},
    }
    for name, is_there in missing.items():
        if is_there:
            raise ValueError(
                f"the model has {name}, with which neither it nor a head for it can be trained; "
                "take a Llama, Qwen3, Qwen3-MoE or Qwen3.5 model without them"
            )


def check_drafted_for(config: ModelConfig) -> None:
    """Refuses a target for which no head can be trained.

    Raises:
      ValueError: It is one; one sentence.
    """
    check_trained(config)
    if config.experts is not None:
        raise ValueError(
            "the model has experts, and no head for it can be trained; take a target without them"
        )


def forward(
    config: ModelConfig, weights: ModelModule, tokens: Tokens, compute_dtype: DTypeLike, remat: bool
) -> Passed:
    """Runs all layers over a batch of sequences.

    Args:
      tokens: T is a multiple of `gated_delta.CHUNK` for a model with gated-delta layers.
      compute_dtype: Of the products, float32 or bfloat16.
      remat: Keep only what enters each layer, and compute the rest anew for the gradient: a third
        more time for a tenth of the memory.
    """
    B, T = tokens.shape
    turn = angles(config.attention, layers.flat_positions(B, T))
    x = embedded(weights.embed[...], tokens.reshape(-1))
    streams, routed = [x], []
    for place in _places(config):

        def run(x: Rows, place: LayerIndex = place) -> tuple[Rows, Routed | None]:
            return _layer(config, weights.layers, place, x, turn, compute_dtype, B)

        x, of_layer = jax.checkpoint(run)(x) if remat else run(x)
        streams.append(x)
        if of_layer is not None:
            routed.append(of_layer)
    hidden = ops.plain_rms_norm(x, weights.final_norm[...], config.rms_eps)
    shaped = tuple(x.reshape(B, T, -1) for x in streams)
    return Passed(hidden.reshape(B, T, -1), shaped, tuple(routed))


def logits(
    weights: ModelModule, hidden: Float[jax.Array, "*rows hidden"], compute_dtype: DTypeLike
) -> Float[jax.Array, "*rows vocab"]:
    """Scores of the next token, float32."""
    return layers.linear_float32(hidden.astype(compute_dtype), weights.head[...])


def embedded(table: Float[jax.Array, "vocab hidden"], tokens: Int[jax.Array, " R"]) -> Rows:
    """The tokens' rows of an embedding, in the float32 of the residual stream."""
    return ops.embed_tokens(table, tokens, None).astype("float32")


def _places(config: ModelConfig) -> list[LayerIndex]:
    mixers, feeds = config.layer_kinds, config.feed_kinds
    return [
        LayerIndex(i, mixers[:i].count(mixers[i]), feeds[:i].count(feeds[i]))
        for i in range(config.num_layers)
    ]


def _layer(
    config: ModelConfig,
    stack: Layers,
    place: LayerIndex,
    x: Rows,
    turn: Angles,
    compute_dtype: DTypeLike,
    B: int,
) -> tuple[Rows, Routed | None]:
    y = normed(x, stack.input_norm[place.layer], config.rms_eps, compute_dtype)
    if config.layer_kinds[place.layer] == "attention":
        mixed = _attention(config, stack.attention, place.mixer, y, turn, B)
    else:
        mixed = gated_delta.layer(config, stack.gated_delta, place.mixer, y, B)
    x = x + mixed
    y = normed(x, stack.post_attention_norm[place.layer], config.rms_eps, compute_dtype)
    sizes = config.layers[place.layer].mlp
    if isinstance(sizes, MoEConfig):
        added, routed = experts.mixed(sizes, stack.experts, place.feed, y)
        return x + added, routed
    return x + layers.mlp(stack, place.feed, y), None


def _attention(
    config: ModelConfig, weights: AttentionStack, place: int, x: Rows, turn: Angles, B: int
) -> Rows:
    q, k, v, gate = layers.project(config, weights, place, x, turn)
    out = layers.causal(*(part.reshape(B, -1, *part.shape[1:]) for part in (q, k, v)))
    return layers.merge(weights, place, out.reshape(q.shape), gate)
