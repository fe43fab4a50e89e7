"""Forward pass of Llama, Qwen3, Qwen3-MoE and Qwen3.5 over whole sequences, for training.

The parameters are float32 master weights with the names of serving. GEMMs run in the compute
dtype; norms, softmax, the GDN recurrence and the residual stream are float32. Attention and GDN
are causal, so padding on the right of a sequence changes no earlier row.
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
from shared.models.activation import SILU_AND_MUL
from shared.models.config import ModelConfig
from shared.models.mixers import AttentionConfig, Mamba2Config
from shared.models.mlp import MoEConfig, NoMLP

Hidden = Float[jax.Array, "B T hidden"]
Tokens = Int[jax.Array, "B T"]


class Passed(NamedTuple):
    """Outputs of a forward pass, float32.

    Attributes:
      hidden: Hidden states after the final norm.
      streams: Residual stream before each layer, and after the last one.
      routed: Router outputs of each MoE layer, in order, with flat rows.
    """

    hidden: Hidden
    streams: tuple[Hidden, ...]
    routed: tuple[Routed, ...] = ()


class LayerIndex(NamedTuple):
    """Index of a layer among all layers, among those of its mixer, and among those of its MLP."""

    layer: int
    mixer: int
    mlp: int


def check_trained(config: ModelConfig) -> None:
    """Checks that this pass implements the model.

    Raises:
      ValueError: The model has an unsupported feature; the message names it.
    """
    dense, sizes = config.dense, config.experts
    kept = [each for each in config.attentions if isinstance(each, AttentionConfig)]
    biases = [each.input_bias or each.out_bias for each in kept]
    factors = (config.embedding_factor, config.residual_factor, config.logits_factor)
    missing = {
        "Mamba2 layers": isinstance(config.recurrent, Mamba2Config),
        "latent attention": len(kept) < len(config.attentions),
        "norms after mixers and MLPs": config.ends_with_norms,
        "layers of one sublayer": config.has_single_sublayers,
        "shared experts": sizes is not None and sizes.shared_intermediate > 0,
        "experts with sigmoid scores": sizes is not None and sizes.scores == "sigmoid",
        "activations other than SwiGLU": any(
            not isinstance(each.config, NoMLP) and each.config.activation != SILU_AND_MUL
            for each in config.mlp_groups
        ),
        "biases": any(biases) or (dense is not None and dense.bias),
        "sliding windows": any(each.window for each in config.attentions),
        "layers of different sizes": len(config.groups)
        > len({x.config.kind for x in config.groups})
        or len(config.mlp_groups) > len({x.config.kind for x in config.mlp_groups}),
        "query scaling by position": any(each.query_scaling_beta for each in kept),
        "layers with different rotary settings": len({x.rotary for x in config.attentions}) > 1,
        "scaling factors": any(each.scale for each in kept) or {*factors} != {1.0},
    }
    for name, is_there in missing.items():
        if is_there:
            raise ValueError(
                f"the model has {name}, which training does not support, neither of the model nor "
                "of a head for it; use a Llama, Qwen3, Qwen3-MoE or Qwen3.5 model without them"
            )


def check_drafted_for(config: ModelConfig) -> None:
    """Checks that a head can be trained for a target.

    Raises:
      ValueError: The target has an unsupported feature; the message names it.
    """
    check_trained(config)
    if config.experts is not None:
        raise ValueError(
            "the target has experts, and training a head for it is not supported; use a dense "
            "target"
        )


def forward(
    config: ModelConfig, weights: ModelModule, tokens: Tokens, compute_dtype: DTypeLike, remat: bool
) -> Passed:
    """Runs all layers over a batch of sequences.

    Args:
      tokens: T is a multiple of `gated_delta.CHUNK` for a model with GDN layers.
      compute_dtype: Dtype of the GEMMs, float32 or bfloat16.
      remat: Store only the input of each layer and recompute the rest for the gradient: a third
        more time for a tenth of the memory.
    """
    B, T = tokens.shape
    rotary = angles(config.attention, layers.flat_positions(B, T))
    x = embedded(weights.embed[...], tokens.reshape(-1))
    streams, routed = [x], []
    for index in _layer_indices(config):

        def run(x: Rows, index: LayerIndex = index) -> tuple[Rows, Routed | None]:
            return _layer(config, weights.layers, index, x, rotary, compute_dtype, B)

        x, router_output = jax.checkpoint(run)(x) if remat else run(x)
        streams.append(x)
        if router_output is not None:
            routed.append(router_output)
    hidden = ops.plain_rms_norm(x, weights.final_norm[...], config.rms_eps)
    shaped = tuple(x.reshape(B, T, -1) for x in streams)
    return Passed(hidden.reshape(B, T, -1), shaped, tuple(routed))


def logits(
    weights: ModelModule, hidden: Float[jax.Array, "*rows hidden"], compute_dtype: DTypeLike
) -> Float[jax.Array, "*rows vocab"]:
    """Computes the logits of the next token, float32."""
    return layers.linear_float32(hidden.astype(compute_dtype), weights.head[...])


def embedded(table: Float[jax.Array, "vocab hidden"], tokens: Int[jax.Array, " R"]) -> Rows:
    """Returns the embeddings of tokens in float32, the dtype of the residual stream."""
    return ops.embed_tokens(table, tokens, None).astype("float32")


def _layer_indices(config: ModelConfig) -> list[LayerIndex]:
    mixers = [each.mixer.kind for each in config.layers]
    mlps = [each.mlp.kind for each in config.layers]
    return [
        LayerIndex(i, mixers[:i].count(mixers[i]), mlps[:i].count(mlps[i]))
        for i in range(config.num_layers)
    ]


def _layer(
    config: ModelConfig,
    stack: Layers,
    index: LayerIndex,
    x: Rows,
    rotary: Angles,
    compute_dtype: DTypeLike,
    B: int,
) -> tuple[Rows, Routed | None]:
    y = normed(x, stack.input_norm[index.layer], config.rms_eps, compute_dtype)
    if config.layers[index.layer].mixer.kind == "attention":
        mixed = _attention(config, stack.attention, index.mixer, y, rotary, B)
    else:
        mixed = gated_delta.layer(config, stack.gated_delta, index.mixer, y, B)
    x = x + mixed
    y = normed(x, stack.post_attention_norm[index.layer], config.rms_eps, compute_dtype)
    sizes = config.layers[index.layer].mlp
    if isinstance(sizes, MoEConfig):
        added, routed = experts.mixed(sizes, stack.experts, index.mlp, y)
        return x + added, routed
    return x + layers.mlp(stack, index.mlp, y), None


def _attention(
    config: ModelConfig, weights: AttentionStack, layer: int, x: Rows, rotary: Angles, B: int
) -> Rows:
    q, k, v, gate = layers.project(config, weights, layer, x, rotary)
    out = layers.causal(*(part.reshape(B, -1, *part.shape[1:]) for part in (q, k, v)))
    return layers.merge(weights, layer, out.reshape(q.shape), gate)
