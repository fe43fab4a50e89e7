"""Model layers on flat rows: attention on paged KV, MLP, MoE and recurrent layers."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl.model_weights import Attention, LatentAttention, Layer, Recurrent
from jax_impl.ops import Norm, Place
from jax_impl.ops.attention import attention_layer, latent_attention
from jax_impl.ops.attention.attention import KV, AttentionRows, with_sliding_window
from jax_impl.ops.attention.attention_layer import Angles, HeadNorms, Heads, PagedKV
from jax_impl.ops.collectives import all_gather
from jax_impl.ops.gemm import layers, linear, per_layer
from jax_impl.ops.gemm.added_norm import added_norm
from jax_impl.ops.gemm.linear import Matrix, NormedStream
from jax_impl.ops.moe.experts import Experts, added_experts
from jax_impl.ops.moe.parallel_experts import added_parallel_experts
from jax_impl.ops.recurrent import recurrent_layer
from jax_impl.ops.recurrent.recurrent_layer import TreeNodes
from jax_impl.ops.recurrent.recurrent_mixer import RecurrentWeights, gated_output, scaled_inputs
from jax_impl.ops.recurrent.recurrent_state import RecurrentState, ReplayInputs
from shared.boundary.tp_group import TPGroup
from shared.models.config import ModelConfig
from shared.models.mixers import (
    LatentAttentionConfig,
    RecurrentConfig,
    SelfAttentionConfig,
)
from shared.spec.layers import rotary_frequencies
from shared.spec.mrope import mrope_section_map

Hidden = Float[jax.Array, "R hidden"]
LayerCarry = tuple[RecurrentState, Any]
"""Carry of the recurrent layers of a pass: the states, and the snapshots of a prefill or the
scratch of a verify."""

Feed = Callable[[ModelConfig, Layer, NormedStream, Norm | None], NormedStream]
"""Adds the MLP or MoE block of a layer to the residual stream; the norm is fused into it."""


class RecurrentMixer(Protocol):
    """Runs the recurrent layers of a pass.

    Attributes:
      carry: State passed to the next layer; a pass replaces it after each layer.
    """

    carry: LayerCarry

    def __call__(
        self,
        place: Place,
        weights: Recurrent,
        inputs: Float[jax.Array, "R outputs"],
        carry: LayerCarry,
    ) -> tuple[Float[jax.Array, "R values"], LayerCarry]:
        """Maps a layer's projected inputs to the head outputs after the gated norm."""
        ...


def angles(config: SelfAttentionConfig, positions: Int[jax.Array, "R ..."]) -> Angles:
    """Computes the RoPE cos and sin of each row, once for all layers of a kind in a pass."""
    frequencies = jnp.asarray(rotary_frequencies(config.rotary))
    return Angles(*layers.rotary_angles(positions, frequencies, config.rotary.attention_factor))


def rope_positions(config: SelfAttentionConfig, rows: AttentionRows) -> Int[jax.Array, "R ..."]:
    """Returns the RoPE positions of the rows; for M-RoPE one position per rotary pair."""
    if rows.mrope_positions is None or not config.rotary.sections:
        return rows.positions
    return rows.mrope_positions[:, mrope_section_map(config.rotary)]


class AttentionContext(NamedTuple):
    """Inputs shared by the attention layers of one kind in a pass.

    Attributes:
      rope: RoPE cos and sin of each row.
      query_scale: Long-context query scale of each row; None for models without it.
      rows: Positions of the rows, and the KV visible to them in such a layer.
      kv: Pools of all attention layers before the first layer.
      group: Tensor-parallel group of the heads.
    """

    rope: Angles
    query_scale: Float[jax.Array, " R"] | None
    rows: AttentionRows
    kv: PagedKV
    group: TPGroup

    @classmethod
    def of(
        cls, config: SelfAttentionConfig, rows: AttentionRows, kv: KV, group: TPGroup
    ) -> "AttentionContext":
        """Builds the inputs for a pass over rows."""
        seen = with_sliding_window(rows, config.window)
        rope = angles(config, rope_positions(config, rows))
        is_latent = isinstance(config, LatentAttentionConfig)
        paged = (PagedKV.without_bounds if is_latent else PagedKV.of)(kv, seen)
        return cls(rope, _query_scale(config, rows), seen, paged, group)


def _query_scale(config: SelfAttentionConfig, rows: AttentionRows) -> Float[jax.Array, " R"] | None:
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
    place: Place,
    weights: Attention | LatentAttention | Recurrent,
    qkv: Float[jax.Array, "R outputs"],
    kv: PagedKV,
) -> tuple[Float[jax.Array, "R values"], PagedKV]:
    """Runs attention on a layer's input projection; the KV that it reads is at index `place`.

    Args:
      kv: Pools returned by the previous attention layer; visible KV may differ by layer.
    """
    if isinstance(mixer, LatentAttentionConfig):
        assert isinstance(weights, LatentAttention)
        given = (weights.heads, context.rope, context.rows, kv.pools, place)
        out, pools = latent_attention.latent_attention(qkv, mixer, *given)
        return out, kv._replace(pools=pools)
    assert isinstance(weights, Attention)
    heads, norms = Heads.of(mixer), head_norms(config, weights)
    if mixer.value_norm and mixer.has_kv:
        qkv = attention_layer.norm_values(qkv, heads, config.rms_eps, mixer.keys_as_values)
    if context.query_scale is not None:
        qkv = attention_layer.scale_queries(qkv, heads, context.query_scale)
    if norms is not None and mixer.norms_all_heads:
        qkv, norms = (
            attention_layer.full_width_qk_norm(qkv, heads, norms.alone(place), context.group),
            None,
        )
    kv = kv._replace(bounds=context.kv.bounds, paths=context.kv.paths)
    out, kv = attention_layer.attention_layer(
        qkv, heads, norms, context.rope, context.rows, kv, place, weights.sinks
    )
    if mixer.out_factor != 1:
        out = (out.astype(jnp.float32) * mixer.out_factor).astype(out.dtype)
    return out, kv


def with_parallel(
    config: ModelConfig,
    weights: Recurrent,
    mixed: Float[jax.Array, "R values"],
    stream: NormedStream,
) -> NormedStream:
    """Adds the output projection of a parallel mixer to the residual stream."""
    mixed = all_gather.all_gather(stream.group, mixed)
    return _added(config, None, mixed, weights.out, stream, None, None)


def output_and_mlp(
    config: ModelConfig,
    layer: Layer,
    feed: Feed,
    mixed: Float[jax.Array, "R values"],
    stream: NormedStream,
    norm: Norm | None = None,
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
    part: Float[jax.Array, "R size"] | None,
    stream: NormedStream,
    norm: Norm | None,
) -> NormedStream:
    """Adds the layer's part of the per-layer embeddings and multiplies by the layer scalar, if the
    model has the former; `norm` is the next norm of the stream.
    """
    if layer.per_layer is None:
        return stream
    assert part is not None  # the model has the parts of all layers
    eps, scalar = config.rms_eps, layer.scalar
    return per_layer.added_part(stream, part, layer.per_layer, eps, scalar, norm)


def mlp(config: ModelConfig, layer: Layer, stream: NormedStream, norm: Norm | None) -> NormedStream:
    """Adds the gated MLP of a layer to the residual stream."""
    assert config.dense is not None  # a model with such layers has their config
    eps, activation = config.input_norm_eps, config.dense.activation
    x = linear.act_and_mul_linear(stream, eps, layer.feed.gate_up, activation)
    scalar, norm = _feed_end(layer, norm)
    return _added(config, layer.feed_end_norm, x, layer.feed.down, stream, scalar, norm)


def experts(
    config: ModelConfig, layer: Layer, stream: NormedStream, norm: Norm | None
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
    config: ModelConfig, layer: Layer, stream: NormedStream, norm: Norm | None
) -> NormedStream:
    """Returns the residual stream of a layer without an MLP."""
    del config, layer, norm
    return stream


FEEDS = {"mlp": mlp, "experts": experts, "no_mlp": no_mlp}
"""Functions of MLP and MoE blocks, by the kind in the layer's config."""


def _feed_end(layer: Layer, norm: Norm | None) -> tuple[Norm | None, Norm | None]:
    """Returns the layer scalar and the next norm if an MLP or MoE block ends the layer."""
    return (layer.scalar, norm) if layer.per_layer is None else (None, None)


def _added(
    config: ModelConfig,
    end_norm: Norm | None,
    x: Float[jax.Array, "R inputs"],
    weight: Matrix,
    stream: NormedStream,
    scalar: Norm | None,
    norm: Norm | None,
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
    x: Float[jax.Array, "R inputs"],
    rope: Angles,
    rows: AttentionRows,
    kv: KV,
    place: Place,
) -> KV:
    """Writes the keys and values of one layer's rows without running attention.

    The model must have a K norm.
    """
    assert isinstance(layer.mixer, Attention)
    keys, norms = config.attention.key_size, head_norms(config, layer.mixer)
    inputs = layer.mixer.inputs
    assert norms is not None  # the model has them
    projected = linear.product(x, inputs, inputs.num_outputs - 2 * keys)
    return attention_layer.write_kv(
        projected, Heads.of(config.attention), norms, rope, rows, kv, place
    )


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
        slots: Int[jax.Array, " B"],
        row_starts: Int[jax.Array, " B1"],
        request: Int[jax.Array, " R"],
        save_after: Int[jax.Array, " B"],
        save: Int[jax.Array, " B"],
    ) -> None:
        """Initialises the mixer; see `recurrent_layer.prefill`; `carry`: states and snapshots."""
        self._config, self._group, self.carry = config, group, (states, snapshots)
        self._where = (slots, row_starts, request, save_after, save)

    def __call__(
        self,
        place: Place,
        weights: Recurrent,
        inputs: Float[jax.Array, "R outputs"],
        carry: LayerCarry,
    ) -> tuple[Float[jax.Array, "R values"], LayerCarry]:
        states, snapshots = carry
        delta, sizes = recurrent_weights(self._config, weights), _sizes(self._config)
        inputs = scaled_inputs(inputs, sizes)
        given = (inputs, delta, sizes, states, snapshots, place)
        out, states, snapshots = recurrent_layer.prefill(*given, *self._where)
        out = gated_output(out, inputs, delta.with_norm_of(place), sizes, self._group)
        return out, (states, snapshots)


class VerifyMixer:
    """Recurrent layers of a verify: nodes continue from their parents; inputs are kept for replay.

    In plain decoding a request has one node, and its recurrent state is advanced in place.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: TPGroup,
        states: RecurrentState,
        slots: Int[jax.Array, " B"],
        nodes: TreeNodes,
        advances: bool,
    ) -> None:
        """Initialises the mixer; `advances` is True in a step of plain decoding."""
        self._config, self._group, self._slots, self._nodes = config, group, slots, nodes
        B, N = nodes.row_of.shape
        scratch = recurrent_layer.verify_scratch(states, _sizes(config), B, N, advances)
        self.carry = (states, scratch)

    def __call__(
        self,
        place: Place,
        weights: Recurrent,
        inputs: Float[jax.Array, "R outputs"],
        carry: LayerCarry,
    ) -> tuple[Float[jax.Array, "R values"], LayerCarry]:
        states, scratch = carry
        delta, sizes = recurrent_weights(self._config, weights), _sizes(self._config)
        inputs = scaled_inputs(inputs, sizes)
        given = (inputs, delta, sizes, states, place, self._slots, self._nodes)
        if isinstance(scratch.kept, ReplayInputs):
            out, states, scratch = recurrent_layer.verify(*given, scratch)
        else:
            out, states, scratch = recurrent_layer.decode(*given, scratch)
        out = gated_output(out, inputs, delta.with_norm_of(place), sizes, self._group)
        return out, (states, scratch)

    @property
    def advanced(self) -> RecurrentState:
        """Returns the states after a step of plain decoding."""
        states, scratch = self.carry
        assert not isinstance(scratch.kept, ReplayInputs)  # plain decoding
        return recurrent_layer.followed(states, scratch.kept)

    def commit(
        self,
        snapshots: RecurrentState,
        path: Int[jax.Array, "B W"],
        counts: Int[jax.Array, " B"],
        save_after: Int[jax.Array, " B"],
        save: Int[jax.Array, " B"],
    ) -> tuple[RecurrentState, RecurrentState]:
        """Advances the states along the accepted paths; see `recurrent_layer.commit`."""
        (states, scratch), slots = self.carry, self._slots
        return recurrent_layer.commit(
            states, snapshots, scratch.kept, slots, path, counts, save_after, save
        )
