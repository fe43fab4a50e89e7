"""The forward pass of Llama, Qwen3 and Qwen3.5 (dense) over whole sequences, for training.

The same parameters as in serving, as float32 masters: products run in the compute dtype, norms,
softmax and the gated-delta recurrence in float32, and the residual stream is kept in float32.
Everything is causal, so that padding on the right of a sequence changes nothing.
"""

from typing import NamedTuple

import jax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jax_impl.layers import angles
from jax_impl.ops import layers as ops
from jax_impl.ops.mix import Angles
from jax_impl.training import gated_delta, layers
from jax_impl.training.layers import Rows, normed
from jax_impl.training.modules import AttentionStack, Layers, Weights
from shared.models.config import ModelConfig

Hidden = Float[jax.Array, "B T hidden"]
Tokens = Int[jax.Array, "B T"]


class Passed(NamedTuple):
    """What a pass gives, float32.

    Attributes:
      hidden: After the final norm.
      streams: The residual stream that enters each layer, and the one that leaves the last.
    """

    hidden: Hidden
    streams: tuple[Hidden, ...]


def check_trained(config: ModelConfig) -> None:
    """Refuses a model of which this pass would leave something out.

    Raises:
      ValueError: It has that; one sentence that names it.
    """
    attention, dense = config.attention, config.dense
    factors = (config.embedding_factor, config.residual_factor)
    missing = {
        "norms behind mixers and MLPs": config.norms_behind,
        "experts": config.experts is not None,
        "biases": attention.input_bias or attention.out_bias or (dense is not None and dense.bias),
        "sliding windows": any(each.window for each in config.attentions),
        "layers that turn in different ways": len({x.rotary for x in config.attentions}) > 1,
        "factors": attention.scale is not None or {*factors, config.logits_factor} != {1.0},
    }
    for name, is_there in missing.items():
        if is_there:
            raise ValueError(
                f"the model has {name}, with which neither it nor a head for it can be trained; "
                "take a Llama, Qwen3 or Qwen3.5 model without them"
            )


def forward(
    config: ModelConfig, weights: Weights, tokens: Tokens, compute_dtype: DTypeLike, remat: bool
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
    streams, of_kind = [x], {"attention": 0, "gated_delta": 0}
    for layer, kind in enumerate(config.layer_kinds):

        def run(x: Rows, layer: int = layer, kind: str = kind, place: int = of_kind[kind]) -> Rows:
            return _layer(config, weights.layers, layer, kind, place, x, turn, compute_dtype, B)

        x = jax.checkpoint(run)(x) if remat else run(x)
        of_kind[kind] += 1
        streams.append(x)
    hidden = ops.rms_norm(x, weights.final_norm[...], config.rms_eps)
    return Passed(hidden.reshape(B, T, -1), tuple(x.reshape(B, T, -1) for x in streams))


def logits(
    weights: Weights, hidden: Float[jax.Array, "*rows hidden"], compute_dtype: DTypeLike
) -> Float[jax.Array, "*rows vocab"]:
    """Scores of the next token, float32."""
    return layers.linear_float32(hidden.astype(compute_dtype), weights.head[...])


def embedded(table: Float[jax.Array, "vocab hidden"], tokens: Int[jax.Array, " R"]) -> Rows:
    """The tokens' rows of an embedding, in the float32 of the residual stream."""
    return ops.embedded(table, tokens).astype("float32")


def _layer(
    config: ModelConfig,
    stack: Layers,
    layer: int,
    kind: str,
    place: int,
    x: Rows,
    turn: Angles,
    compute_dtype: DTypeLike,
    B: int,
) -> Rows:
    y = normed(x, stack.input_norm[layer], config.rms_eps, compute_dtype)
    if kind == "attention":
        mixed = _attention(config, stack.attention, place, y, turn, B)
    else:
        mixed = gated_delta.layer(config, stack.gated_delta, place, y, B)
    x = x + mixed
    y = normed(x, stack.post_attention_norm[layer], config.rms_eps, compute_dtype)
    return x + layers.mlp(stack, layer, y)


def _attention(
    config: ModelConfig, weights: AttentionStack, place: int, x: Rows, turn: Angles, B: int
) -> Rows:
    q, k, v, gate = layers.project(config, weights, place, x, turn)
    out = layers.causal(*(part.reshape(B, -1, *part.shape[1:]) for part in (q, k, v)))
    return layers.merge(weights, place, out.reshape(q.shape), gate)
