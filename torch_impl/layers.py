"""Model layers on flat rows: attention on paged KV, MLP, MoE and recurrent layers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.boundary.tp_group import TPGroup
from shared.models.config import ModelConfig
from shared.models.mixers import (
    LatentAttentionConfig,
    RecurrentConfig,
    SelfAttentionConfig,
)
from shared.models.rotary import RotaryConfig
from shared.spec import layers as layers_spec
from shared.spec.mrope import mrope_section_map
from torch_impl.model_weights import Attention, LatentAttention, Layer, Recurrent
from torch_impl.ops.attention import attention_layer, latent_attention
from torch_impl.ops.attention.attention import KV, AttentionRows, with_sliding_window
from torch_impl.ops.attention.attention_layer import Angles, HeadNorms, Heads, PagedKV
from torch_impl.ops.collectives import all_gather
from torch_impl.ops.gemm import layers, linear, per_layer
from torch_impl.ops.gemm.added_norm import added_norm
from torch_impl.ops.gemm.linear import Matrix, NormedStream
from torch_impl.ops.moe.experts import Experts, added_experts
from torch_impl.ops.moe.parallel_experts import added_parallel_experts
from torch_impl.ops.recurrent import recurrent_layer
from torch_impl.ops.recurrent.recurrent_layer import TreeNodes
from torch_impl.ops.recurrent.recurrent_mixer import RecurrentWeights, gated_output, scaled_inputs
from torch_impl.ops.recurrent.recurrent_state import RecurrentState, ReplayInputs

Hidden = Float[Tensor, "R hidden"]

RecurrentMixer = Callable[[int, Recurrent, Float[Tensor, "R outputs"]], Float[Tensor, "R values"]]
"""Runs a recurrent layer of a pass: maps its index among those layers, its weights and its
projected inputs to the head outputs after the gated norm."""

Feed = Callable[[ModelConfig, Layer, NormedStream, Float[Tensor, " hidden"] | None], NormedStream]
"""Adds the MLP or MoE block of a layer to the residual stream; the norm is fused into it."""


def rotary_frequencies(config: SelfAttentionConfig, device: torch.device) -> Float[Tensor, " half"]:
    """Computes the RoPE frequencies of attention layers for `angles`."""
    return torch.from_numpy(layers_spec.rotary_frequencies(config.rotary)).to(device)


def angles(
    config: SelfAttentionConfig, frequencies: Float[Tensor, " half"], rows: AttentionRows
) -> Angles:
    """Computes the RoPE cos and sin of each row, once for all layers of a kind in a pass."""
    positions = rope_positions(config, rows)
    return Angles(*layers.rotary_angles(positions, frequencies, config.rotary.attention_factor))


def rope_positions(config: SelfAttentionConfig, rows: AttentionRows) -> Int[Tensor, "R ..."]:
    """Returns the RoPE positions of the rows; for M-RoPE one position per rotary pair."""
    if rows.mrope_positions is None or not config.rotary.sections:
        return rows.positions
    return rows.mrope_positions[:, _pair_axes(config.rotary, rows.mrope_positions.device)]


@cache
def _pair_axes(rotary: RotaryConfig, device: torch.device) -> Int[Tensor, " half"]:
    """Returns the M-RoPE axis of each rotary pair, uploaded once.

    Graph capture allows no copy from the host.
    """
    return torch.from_numpy(mrope_section_map(rotary)).to(device)


@dataclass(frozen=True)
class AttentionContext:
    """Inputs shared by the attention layers of one kind in a pass.

    Attributes:
      rope: RoPE cos and sin of each row.
      query_scale: Long-context query scale of each row; None for models without it.
      rows: Positions of the rows, and the KV visible to them in such a layer.
      kv: KV of all attention layers.
      group: Tensor-parallel group of the heads.
    """

    rope: Angles
    query_scale: Float[Tensor, " R"] | None
    rows: AttentionRows
    kv: PagedKV
    group: TPGroup

    @classmethod
    def of(
        cls,
        config: SelfAttentionConfig,
        frequencies: Float[Tensor, " half"],
        rows: AttentionRows,
        kv: KV,
        group: TPGroup,
    ) -> "AttentionContext":
        """Builds the inputs for a pass over rows."""
        seen = with_sliding_window(rows, config.window)
        rope = angles(config, frequencies, rows)
        is_latent = isinstance(config, LatentAttentionConfig)
        paged = (PagedKV.without_bounds if is_latent else PagedKV.of)(kv, seen)
        return cls(rope, _query_scale(config, rows), seen, paged, group)


def _query_scale(config: SelfAttentionConfig, rows: AttentionRows) -> Float[Tensor, " R"] | None:
    if isinstance(config, LatentAttentionConfig) or not config.query_scaling_beta:
        return None
    context = config.rotary.original_context
    return layers.query_scaling(rows.positions, config.query_scaling_beta, context)


def head_norms(config: ModelConfig, weights: Attention) -> HeadNorms | None:
    """Returns the Q and K norms of a layer, or None for a model without them."""
    if weights.q_norm is None:
        return None
    return HeadNorms(weights.q_norm, weights.k_norm, config.rms_eps)


def attention(
    config: ModelConfig,
    mixer: SelfAttentionConfig,
    context: AttentionContext,
    place: int,
    weights: Attention | LatentAttention | Recurrent,
    qkv: Float[Tensor, "R outputs"],
) -> Float[Tensor, "R values"]:
    """Runs attention on a layer's input projection; the KV that it reads is at index `place`."""
    if isinstance(mixer, LatentAttentionConfig):
        assert isinstance(weights, LatentAttention)
        given = (weights.heads, context.rope, context.rows, context.kv.pools, place)
        return latent_attention.latent_attention(qkv, mixer, *given)
    assert isinstance(weights, Attention)
    heads, norms = Heads.of(mixer), head_norms(config, weights)
    if mixer.value_norm and mixer.has_kv:
        qkv = attention_layer.norm_values(qkv, heads, config.rms_eps, mixer.keys_as_values)
    if context.query_scale is not None:
        qkv = attention_layer.scale_queries(qkv, heads, context.query_scale)
    if norms is not None and mixer.norms_all_heads:
        qkv, norms = attention_layer.full_width_qk_norm(qkv, heads, norms, context.group), None
    out = attention_layer.attention_layer(
        qkv, heads, norms, context.rope, context.rows, context.kv, place, weights.sinks
    )
    return out if mixer.out_factor == 1 else (out.float() * mixer.out_factor).to(out.dtype)


def with_parallel(
    config: ModelConfig, weights: Recurrent, mixed: Float[Tensor, "R values"], stream: NormedStream
) -> NormedStream:
    """Adds the output projection of a parallel mixer to the residual stream."""
    mixed = all_gather.all_gather(stream.group, mixed)
    return _added(config, None, mixed, weights.out, stream, None, None)


def output_and_mlp(
    config: ModelConfig,
    layer: Layer,
    feed: Feed,
    mixed: Float[Tensor, "R values"],
    stream: NormedStream,
    norm: Float[Tensor, " hidden"] | None = None,
) -> NormedStream:
    """Adds the output projection of a mixer and then the MLP or MoE block to the residual stream.

    Args:
      norm: Norm fused into the returned stream; that of the next layer's input.
    """
    end, out = layer.mixer_end_norm, layer.mixer.out
    between = norm if feed is no_mlp else layer.post_norm
    mixed = all_gather.all_gather(stream.group, mixed)
    return feed(config, layer, _added(config, end, mixed, out, stream, None, between), norm)


def layer_end(
    config: ModelConfig,
    layer: Layer,
    part: Float[Tensor, "R size"] | None,
    stream: NormedStream,
    norm: Float[Tensor, " hidden"] | None,
) -> NormedStream:
    """Adds the layer's part of the per-layer embeddings and multiplies by the layer scalar, if the
    model has the former; `norm` is the next norm of the stream.
    """
    if layer.per_layer is None:
        return stream
    assert part is not None  # the model has the parts of all layers
    eps, scalar = config.rms_eps, layer.scalar
    return per_layer.added_part(stream, part, layer.per_layer, eps, scalar, norm)


def mlp(
    config: ModelConfig, layer: Layer, stream: NormedStream, norm: Float[Tensor, " hidden"] | None
) -> NormedStream:
    """Adds the gated MLP of a layer to the residual stream."""
    assert config.dense is not None  # a model with such layers has their config
    eps, activation = config.input_norm_eps, config.dense.activation
    x = linear.act_and_mul_linear(stream, eps, layer.feed.gate_up, activation)
    scalar, norm = _feed_end(layer, norm)
    return _added(config, layer.feed_end_norm, x, layer.feed.down, stream, scalar, norm)


def experts(
    config: ModelConfig, layer: Layer, stream: NormedStream, norm: Float[Tensor, " hidden"] | None
) -> NormedStream:
    """Adds the MoE block of a layer to the residual stream."""
    assert isinstance(layer.feed, Experts)
    assert config.experts is not None  # a model with such layers has their sizes
    eps, parallel, end_norm = config.rms_eps, layer.feed.parallel, layer.feed_end_norm
    if parallel is None or end_norm is None:
        return added_experts(stream, eps, config.experts, layer.feed, norm)
    scalar, norm = _feed_end(layer, norm)
    return added_parallel_experts(
        stream, eps, config.experts, layer.feed, parallel, end_norm, scalar, norm
    )


def no_mlp(
    config: ModelConfig, layer: Layer, stream: NormedStream, norm: Float[Tensor, " hidden"] | None
) -> NormedStream:
    """Returns the residual stream of a layer without an MLP."""
    del config, layer, norm
    return stream


FEEDS = {"mlp": mlp, "experts": experts, "no_mlp": no_mlp}
"""Functions of MLP and MoE blocks, by the kind in the layer's config."""


def _feed_end(
    layer: Layer, norm: Float[Tensor, " hidden"] | None
) -> tuple[Float[Tensor, " 1"] | None, Float[Tensor, " hidden"] | None]:
    """Returns the layer scalar and the next norm if an MLP or MoE block ends the layer."""
    return (layer.scalar, norm) if layer.per_layer is None else (None, None)


def _added(
    config: ModelConfig,
    end_norm: Float[Tensor, " hidden"] | None,
    x: Float[Tensor, "R inputs"],
    weight: Matrix,
    stream: NormedStream,
    scalar: Float[Tensor, " 1"] | None,
    norm: Float[Tensor, " hidden"] | None,
) -> NormedStream:
    """Adds a GEMM to the residual stream, after `end_norm` if the model has one."""
    if end_norm is None:
        assert scalar is None  # models with layer scalars have such norms
        return linear.linear_add(x, weight, stream, config.residual_factor, norm)
    x = linear.residual_product(x, weight, stream.arrivals)
    x = all_gather.all_gather(stream.group, x)
    return added_norm(x, end_norm, config.rms_eps, stream, scalar, norm)


def write_keys(
    config: ModelConfig,
    layer: Layer,
    x: Float[Tensor, "R inputs"],
    rope: Angles,
    rows: AttentionRows,
    kv: KV,
    place: int,
) -> None:
    """Writes the keys and values of one layer's rows without running attention.

    The model must have a K norm.
    """
    assert isinstance(layer.mixer, Attention)
    keys, norms = config.attention.key_size, head_norms(config, layer.mixer)
    assert norms is not None  # the model has them
    inputs = layer.mixer.inputs
    projected = linear.product(x, inputs, inputs.num_outputs - 2 * keys)
    attention_layer.write_kv(projected, Heads.of(config.attention), norms, rope, rows, kv, place)


def recurrent_weights(config: ModelConfig, weights: Recurrent) -> RecurrentWeights:
    """Returns the weights of a recurrent layer other than its two matrices."""
    return RecurrentWeights(
        conv=weights.conv,
        conv_bias=weights.conv_bias,
        a_log=weights.a_log,
        dt_bias=weights.dt_bias,
        skip=weights.skip,
        norm=weights.norm,
        eps=config.rms_eps,
    )


def _sizes(config: ModelConfig) -> RecurrentConfig:
    assert config.recurrent is not None  # a model with such layers has their sizes
    return config.recurrent


class PrefillMixer:
    """Recurrent layers of a prefill: chunked over each request's rows, with advancing states."""

    def __init__(
        self,
        config: ModelConfig,
        group: TPGroup,
        states: RecurrentState,
        snapshots: RecurrentState,
        slots: Int[Tensor, " B"],
        row_starts: Int[Tensor, " B1"],
        request: Int[Tensor, " R"],
        save_after: Int[Tensor, " B"],
        save: Int[Tensor, " B"],
    ) -> None:
        """Initialises the mixer; see `recurrent_layer.prefill`."""
        self._config, self._group, self._pools = config, group, (states, snapshots)
        self._where = (slots, row_starts, request, save_after, save)

    def __call__(
        self, place: int, weights: Recurrent, inputs: Float[Tensor, "R outputs"]
    ) -> Float[Tensor, "R values"]:
        delta, sizes = recurrent_weights(self._config, weights), _sizes(self._config)
        inputs = scaled_inputs(inputs, sizes)
        out = recurrent_layer.prefill(inputs, delta, sizes, *self._pools, place, *self._where)
        return gated_output(out, inputs, delta, sizes, self._group)


class VerifyMixer:
    """Recurrent layers of a verify: nodes continue from their parents; inputs are kept for replay.

    In plain decoding a request has one node, and its recurrent state is advanced in place.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: TPGroup,
        states: RecurrentState,
        slots: Int[Tensor, " B"],
        nodes: TreeNodes,
        advances: bool,
    ) -> None:
        """Initialises the mixer; `advances` is True in a step of plain decoding."""
        self._config, self._group, self._states = config, group, states
        self._slots, self._nodes = slots, nodes
        B, N = nodes.row_of.shape
        self._scratch = recurrent_layer.verify_scratch(states, _sizes(config), B, N, advances)

    def __call__(
        self, place: int, weights: Recurrent, inputs: Float[Tensor, "R outputs"]
    ) -> Float[Tensor, "R values"]:
        delta, sizes = recurrent_weights(self._config, weights), _sizes(self._config)
        inputs = scaled_inputs(inputs, sizes)
        given = (inputs, delta, sizes, self._states, place, self._slots, self._nodes)
        if isinstance(self._scratch.kept, ReplayInputs):
            out = recurrent_layer.verify(*given, self._scratch)
        else:
            out = recurrent_layer.decode(*given, self._scratch)
        return gated_output(out, inputs, delta, sizes, self._group)

    @property
    def advanced(self) -> RecurrentState:
        """Returns the states after a step of plain decoding."""
        assert not isinstance(self._scratch.kept, ReplayInputs)  # plain decoding
        return recurrent_layer.followed(self._states, self._scratch.kept)

    def commit(
        self,
        snapshots: RecurrentState,
        path: Int[Tensor, "B W"],
        counts: Int[Tensor, " B"],
        save_after: Int[Tensor, " B"],
        save: Int[Tensor, " B"],
    ) -> None:
        """Advances the states along the accepted paths; see `recurrent_layer.commit`."""
        states, kept, slots = self._states, self._scratch.kept, self._slots
        recurrent_layer.commit(states, snapshots, kept, slots, path, counts, save_after, save)
