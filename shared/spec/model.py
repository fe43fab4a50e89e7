"""Forward pass of decoder-only models (Llama, Qwen3, Qwen3.5, ...) on paged KV and GDN states.

`prefill` and `verify` are the same pass over ragged rows. They differ in the visibility of rows and
in GDN layers: chunked with advancing states, or over a tree with unchanged states. `streams[i]` is
the residual stream before layer i; `streams[L]` is after the last layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from shared.models.config import ModelConfig
from shared.models.groups import LayerPlace
from shared.models.mixers import (
    AttentionConfig,
    LatentAttentionConfig,
    NoMixer,
    SelfAttentionConfig,
)
from shared.models.mlp import FeedForwardConfig, MoEConfig, NoMLP
from shared.spec import attention, draft_tree, layers, linear, per_layer
from shared.spec.added_norm import added_norm
from shared.spec.attention import AttentionRows, WindowPageTables, with_sliding_window
from shared.spec.attention_layer import (
    Angles,
    HeadNorms,
    Heads,
    full_width_qk_norm,
    norm_values,
    scale_queries,
)
from shared.spec.attention_layer import attention_layer as mix_heads
from shared.spec.cache_pools import KV, Pools
from shared.spec.experts import added_experts
from shared.spec.latent_attention import LatentWeights, latent_attention
from shared.spec.layer_weights import (
    Weights,
    end_norm_of,
    experts_of,
    layer_scalar,
    matrix,
    per_layer_input,
    per_layer_table,
    scale,
)
from shared.spec.layers import ImageEmbeds
from shared.spec.linear import Matrix, NormedStream
from shared.spec.lora import BatchAdapters, with_adapters
from shared.spec.mrope import mrope_section_map
from shared.spec.parallel_experts import added_parallel_experts
from shared.spec.recurrent_mixer import RecurrentMixer, RecurrentPrefill, RecurrentVerify
from shared.spec.recurrent_state import RecurrentState, ReplayInputs

Hidden = Float[np.ndarray, "R hidden"]


@dataclass(frozen=True)
class Forward:
    """Result of a pass: the hidden state after the final norm, all residual streams, and the KV
    pools.
    """

    hidden: Hidden
    streams: Float[np.ndarray, "L1 R hidden"]
    kv: Pools

    def at(self, rows: Int[np.ndarray, " some"]) -> "Forward":
        """Returns the result for some rows."""
        return Forward(self.hidden[rows], self.streams[:, rows], self.kv)


def prefill(
    config: ModelConfig,
    weights: Weights,
    kv: Pools,
    state: RecurrentState,
    tokens: Int[np.ndarray, " T"],
    row_starts: Int[np.ndarray, " B1"],
    first_positions: Int[np.ndarray, " B"],
    page_table: Int[np.ndarray, "B table"],
    shown: ImageEmbeds | None,
    mrope_positions: Int[np.ndarray, "T 3"] | None,
    window_page_tables: WindowPageTables,
    lora: BatchAdapters | None = None,
) -> tuple[Forward, RecurrentState]:
    """Runs prompt chunks of several requests and advances their states.

    Args:
      config, weights, kv: The model and its page pools.
      state: States of the batch's rows before their chunks.
      tokens, row_starts: Concatenated chunks and padding; first token of each chunk, and the end.
      first_positions: Position of each chunk's first token, equal to its cached tokens.
      page_table: Pages of each request, including those of the chunk.
      shown: Image embeddings; None for text.
      mrope_positions: M-RoPE positions; None to use the sequence positions.
      window_page_tables: See `AttentionRows`.
      lora: Adapters of the requests; None without.
    """
    no_bound = np.zeros_like(first_positions)
    rows = attention.causal_rows(row_starts, first_positions, no_bound, page_table, len(tokens))
    mixer = RecurrentPrefill(config, weights, state, row_starts)
    weights = with_adapters(weights, lora, rows.request)
    rows = replace(rows, mrope_positions=mrope_positions, window_page_tables=window_page_tables)
    passed = forward(config, weights, kv, rows, tokens, shown, mixer)
    return passed, RecurrentState(mixer.recurrent, mixer.window)


def verify(
    config: ModelConfig,
    weights: Weights,
    kv: Pools,
    state: RecurrentState,
    tokens: Int[np.ndarray, "B N"],
    parents: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    lengths: Int[np.ndarray, " B"],
    page_table: Int[np.ndarray, "B table"],
    rows: int,
    delta: Int[np.ndarray, " B"] | None,
    window_page_tables: WindowPageTables,
    lora: BatchAdapters | None = None,
) -> tuple[Forward, ReplayInputs]:
    """Verifies one draft tree per request without changing states or KV below the lengths.

    Args:
      config, weights, kv: The model and its page pools.
      state: States of the batch's rows at their lengths.
      tokens, parents, num_nodes: The trees; node 0 is the newest token.
      lengths, page_table: Committed positions and pages of each request.
      rows: R, flat rows; those past the last node are padding.
      delta: M-RoPE position delta of each request; None for 0.
      window_page_tables: See `AttentionRows`.
      lora: Adapters of the requests; None without.

    Returns:
      The pass over the flat rows, and the replay inputs for the accepted path.
    """
    flat, node = attention.tree_rows(parents, num_nodes, lengths, page_table, rows)
    flat = replace(flat, window_page_tables=window_page_tables)
    if delta is not None:
        flat = attention.with_mrope(flat, delta)
    row_starts = np.concatenate([[0], np.cumsum(num_nodes)])
    row_of = draft_tree.flat_rows(row_starts, num_nodes, tokens.shape[1])
    mixer = RecurrentVerify(config, weights, state, parents, row_of, flat.request, node)
    weights = with_adapters(weights, lora, flat.request)
    passed = forward(config, weights, kv, flat, tokens[flat.request, node], None, mixer)
    return passed, mixer.all_kept()


def forward(
    config: ModelConfig,
    weights: Weights,
    kv: Pools,
    rows: AttentionRows,
    tokens: Int[np.ndarray, " R"],
    shown: ImageEmbeds | None,
    mixer: RecurrentMixer,
) -> Forward:
    """Runs all layers over ragged rows, with a given visibility.

    Args:
      config, weights, kv: The model and its page pools.
      rows, tokens: Positions and visibility of the rows, and their tokens.
      shown: Image embeddings; None for text.
      mixer: Runs the GDN layers; never called for a model without them.
    """
    embedded = layers.embed_tokens(weights["embed"], tokens, shown, config.embedding_factor)
    parts = None
    if config.per_layer_size:
        table = per_layer_table(config, weights)
        parts = per_layer.per_layer_parts(tokens, embedded, table, config.rms_eps)
    return run_layers(config, weights, config.places, kv, rows, embedded, parts, mixer)


def run_layers(
    config: ModelConfig,
    weights: Weights,
    places: Sequence[LayerPlace],
    kv: Pools,
    rows: AttentionRows,
    embedded: Hidden,
    parts: Float[np.ndarray, "R L size"] | None,
    mixer: RecurrentMixer,
) -> Forward:
    """Runs all layers from the inputs of the first on; see `forward`.

    `places` has the place of each layer in its groups and in the pools; `parts` are the per-layer
    embeddings.
    """
    norms = [_norm_before(config, weights, "input_norm", i) for i in range(config.num_layers)]
    norms.append(None)  # no product reads the output of the last layer
    stream = linear.stream(embedded, norms[0])
    streams, pools = [stream.rows], list(kv)
    for layer, (each, place) in enumerate(zip(config.layers, places, strict=True)):
        if not isinstance(each.mixer, NoMixer):
            stack = f"{place.mixer}.", place.mixer_index
            projection, out = (
                matrix(weights, f"{stack[0]}{x}", stack[1]) for x in ("inputs", "out")
            )
            inputs = linear.rmsnorm_linear(stream, config.input_norm_eps, projection)
            if place.parallel is not None:
                name, index = f"{place.parallel}.", place.parallel_index
                own, own_out = (matrix(weights, f"{name}{x}", index) for x in ("inputs", "out"))
                beside = mixer(index, linear.rmsnorm_linear(stream, config.input_norm_eps, own))
                stream = linear.linear_add(beside, own_out, stream, config.residual_factor, None)
            if isinstance(each.mixer, SelfAttentionConfig):
                pool, at = pools[place.pool], place.pool_index
                mixed, pools[place.pool] = attention_mixer(
                    config, each.mixer, weights, stack, inputs, rows, pool, at
                )
            else:
                mixed = mixer(stack[1], inputs)
            between = norms[layer + 1]
            if not each.is_single:
                between = norm_between(config, weights, "", layer)
            end_norm = end_norm_of(config, weights, "mixer_end_norm", layer)
            stream = _added(config, end_norm, mixed, out, stream, None, between)
        stack = f"{place.mlp}.", place.mlp_index
        stream = mlp_layer(config, each.mlp, weights, "", layer, stack, stream, norms[layer + 1])
        if parts is not None:
            stream = layer_end(config, weights, layer, parts[:, layer], stream, norms[layer + 1])
        streams.append(stream.rows)
    hidden = norm(config, stream.rows, weights["final_norm"])
    return Forward(hidden, np.stack(streams), tuple(pools))


def logits(config: ModelConfig, weights: Weights, hidden: Hidden) -> Float[np.ndarray, "R vocab"]:
    """Computes the LM head; a tied model uses its embedding."""
    head = Matrix.plain(weights.get("lm_head", weights["embed"]))
    found = linear.product_float32(hidden, head, config.logits_factor)
    return found if config.logits_softcap is None else layers.softcap(found, config.logits_softcap)


def norm(
    config: ModelConfig, x: Float[np.ndarray, "..."], weight: Float[np.ndarray, " size"]
) -> Float[np.ndarray, "..."]:
    """Applies the model's RMS norm."""
    return layers.rms_norm(x, scale(config, weight), config.rms_eps)


def angles(config: SelfAttentionConfig, rows: AttentionRows) -> Angles:
    """Computes the rotary cos and sin of each row, with M-RoPE positions if the rows have them."""
    turning = rows.positions
    if rows.mrope_positions is not None and config.rotary.sections:
        turning = rows.mrope_positions[:, mrope_section_map(config.rotary)]
    return Angles(*layers.rotary_angles(turning, config.rotary))


def head_norms(config: ModelConfig, weights: Weights, prefix: str, layer: int) -> HeadNorms | None:
    """Returns the QK norms of one layer of a stack; None if the model has none."""
    norms = (weights.get(f"{prefix}{x}_norm") for x in "qk")
    q, k = (None if x is None else scale(config, x[layer]) for x in norms)
    return None if q is None else HeadNorms(q, k, config.rms_eps)


def attention_mixer(
    config: ModelConfig,
    attention: SelfAttentionConfig,
    weights: Weights,
    stack: tuple[str, int],
    inputs: Float[np.ndarray, "R outputs"],
    rows: AttentionRows,
    kv: KV,
    layer: int,
) -> tuple[Float[np.ndarray, "R values"], KV]:
    """Computes the attention of one layer between its two projections.

    Args:
      config, attention: Config of the model, and of the layer's attention.
      weights, stack: Weights, the prefix of the layer's parameters, and its index in their stacks.
      inputs: The layer's projection.
      rows: Positions and visibility of the rows.
      kv, layer: Pools, and the layer's index in them.
    """
    if isinstance(attention, LatentAttentionConfig):
        return latent_mixer(config, attention, weights, stack, inputs, rows, kv, layer)
    norms, (prefix, index) = head_norms(config, weights, *stack), stack
    if attention.value_norm and attention.has_kv:
        heads = Heads.of(attention)
        inputs = norm_values(inputs, heads, config.rms_eps, attention.keys_as_values)
    sinks = weights[f"{prefix}sinks"][index] if attention.has_sinks else None
    return token_mixer(attention, norms, inputs, rows, kv, layer, sinks)


def token_mixer(
    attention: AttentionConfig,
    norms: HeadNorms | None,
    qkv: Float[np.ndarray, "R outputs"],
    rows: AttentionRows,
    kv: KV,
    layer: int,
    sinks: Float[np.ndarray, " heads"] | None = None,
) -> tuple[Float[np.ndarray, "R heads_size"], KV]:
    """Applies `shared.spec.attention_layer.attention_layer` to one layer; see `attention_mixer`."""
    heads = Heads.of(attention)
    if norms is not None and attention.norms_all_heads:
        qkv, norms = full_width_qk_norm(qkv, heads, norms), None
    if attention.query_scaling_beta:
        factors = layers.query_scaling(
            rows.positions, attention.query_scaling_beta, attention.rotary.original_context
        )
        qkv = scale_queries(qkv, heads, factors)
    visible = with_sliding_window(rows, attention.window)
    cos_sin = angles(attention, rows)
    keys, values = kv[layer]
    out, *arrays = mix_heads(qkv, heads, norms, cos_sin, visible, keys, values, sinks)
    return out * np.float32(attention.out_factor), _replaced(kv, layer, arrays)


def latent_mixer(
    config: ModelConfig,
    attention: LatentAttentionConfig,
    weights: Weights,
    stack: tuple[str, int],
    inputs: Float[np.ndarray, "R outputs"],
    rows: AttentionRows,
    kv: KV,
    layer: int,
) -> tuple[Float[np.ndarray, "R values"], KV]:
    """Applies `shared.spec.latent_attention.latent_attention` to one layer; see
    `attention_mixer`.
    """
    (prefix, index), has_rank = stack, attention.query_rank is not None
    own = LatentWeights(
        latent_norm=scale(config, weights[f"{prefix}latent_norm"][index]),
        query_norm=scale(config, weights[f"{prefix}query_norm"][index]) if has_rank else None,
        queries=matrix(weights, f"{prefix}queries", index) if has_rank else None,
        kv_b=matrix(weights, f"{prefix}kv_b", index),
    )
    out, pages = latent_attention(
        inputs, attention, own, angles(attention, rows), rows, kv[layer, 0]
    )
    return out, _replaced(kv, layer, [pages])


def attention_layer(
    config: ModelConfig,
    attention: SelfAttentionConfig,
    weights: Weights,
    prefix: str,
    layer: int,
    x: Float[np.ndarray, "R inputs"],
    stream: NormedStream,
    rows: AttentionRows,
    kv: KV,
) -> tuple[NormedStream, KV]:
    """Computes one attention layer of a draft head, whose projection reads `x` instead of the
    stream.
    """
    name = f"{prefix}{attention.kind}."
    inputs = linear.product(x, matrix(weights, f"{name}inputs", layer))
    stack = name, layer
    out, kv = attention_mixer(config, attention, weights, stack, inputs, rows, kv, layer)
    between = norm_between(config, weights, prefix, layer)
    added = linear.linear_add(out, matrix(weights, f"{name}out", layer), stream, norm=between)
    return added, kv


def mlp_layer(
    config: ModelConfig,
    mlp: FeedForwardConfig,
    weights: Weights,
    prefix: str,
    layer: int,
    stack: tuple[str, int],
    stream: NormedStream,
    norm: Float[np.ndarray, " hidden"] | None = None,
) -> NormedStream:
    """Computes the MLP or MoE block of one layer, with the residual addition.

    Args:
      config, mlp: Config of the model, and of the MLP or MoE block.
      weights, prefix: Weights, and prefix of the layer norms in them.
      layer: Index among all layers of the prefix.
      stack: Prefix of the parameters of the MLP's group, and index in their stacks.
      stream, norm: Residual stream before the MLP's norm, and scale of the norm after the addition.
    """
    name, index = stack
    if isinstance(mlp, NoMLP):
        return stream
    eps, end_norm = config.rms_eps, end_norm_of(config, weights, f"{prefix}feed_end_norm", layer)
    scalar = None if config.per_layer_size else layer_scalar(config, weights, prefix, layer)
    if isinstance(mlp, MoEConfig):
        experts = experts_of(config, weights, name, index)
        if experts.parallel is None or end_norm is None:
            return added_experts(stream, eps, mlp, experts, norm)
        return added_parallel_experts(
            stream, eps, mlp, experts, experts.parallel, end_norm, scalar, norm
        )
    gate_up, down = (matrix(weights, f"{name}{x}", index) for x in ("gate_up", "down"))
    x = linear.act_and_mul_linear(stream, config.input_norm_eps, gate_up, mlp.activation)
    return _added(config, end_norm, x, down, stream, scalar, norm)


def layer_end(
    config: ModelConfig,
    weights: Weights,
    layer: int,
    part: Float[np.ndarray, "R size"],
    stream: NormedStream,
    norm: Float[np.ndarray, " hidden"] | None,
) -> NormedStream:
    """Ends a layer with per-layer embeddings: adds them and multiplies by the layer scalar, if any.

    Args:
      config, weights, layer: The model, and the index of the layer.
      part: The layer's part of the per-layer embeddings.
      stream, norm: Residual stream after the MLP, and scale of its next norm.
    """
    given = per_layer_input(config, weights, layer)
    scalar = layer_scalar(config, weights, "", layer)
    return per_layer.added_part(stream, part, given, config.rms_eps, scalar, norm)


def norm_between(
    config: ModelConfig, weights: Weights, prefix: str, layer: int
) -> Float[np.ndarray, " hidden"] | None:
    """Returns the scale of the norm between a layer's mixer and its MLP."""
    return _norm_before(config, weights, f"{prefix}post_attention_norm", layer)


def _norm_before(
    config: ModelConfig, weights: Weights, name: str, layer: int
) -> Float[np.ndarray, " hidden"] | None:
    return None if config.post_norm else scale(config, weights[name][layer])


def _added(
    config: ModelConfig,
    end_norm: Float[np.ndarray, " hidden"] | None,
    x: Float[np.ndarray, "R inputs"],
    weight: Matrix,
    stream: NormedStream,
    scalar: Float[np.ndarray, " 1"] | None,
    norm: Float[np.ndarray, " hidden"] | None,
) -> NormedStream:
    """Adds a product to the stream, after a post-norm if the model has one."""
    if end_norm is None:
        assert scalar is None  # models with layer scalars have such norms
        return linear.linear_add(x, weight, stream, config.residual_factor, norm)
    out = linear.residual_product(x, weight)
    return added_norm(out, end_norm, config.rms_eps, stream, scalar, norm)


def _replaced(kv: KV, layer: int, arrays: Sequence[Float[np.ndarray, "P page H D"]]) -> KV:
    kv = kv.copy()
    kv[layer] = arrays
    return kv
