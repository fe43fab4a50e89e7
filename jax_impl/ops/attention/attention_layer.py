"""Attention layer between the QKV and output projections; same as `shared.spec.attention_layer`.

On a GPU `attention_layer`, `norm_values` and `write_kv` are kernels; see `jax_impl.ops`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jax_impl.ops import (
    Kernels,
    Norm,
    Place,
    alone,
    is_bfloat16,
    kernel_or_reference,
    operand,
    stacked,
)
from jax_impl.ops.attention.attention import KV, AttentionRows, attend, write
from jax_impl.ops.collectives import all_gather
from jax_impl.ops.gemm import layers
from kernels.kernel_limits import MOST_NODES, MOST_VALUE_ROWS
from kernels.tiles import BLOCKS, MOST_LANES
from kernels.tree_blocks import attention_layer_tiles
from shared.boundary.tp_group import TPGroup
from shared.boundary.workspace import MOST_PARTS
from shared.spec.attention_layer import BOUNDS, Heads
from shared.spec.reduction_order import ATTENTION, SQUARES


class HeadNorms(NamedTuple):
    """RMS norms of each query and key head; same fields as in the specification.

    Scales are those of one layer, or stacked over all attention layers.
    """

    q: Float[jax.Array, "*L queries"]
    k: Float[jax.Array, "*L keys"] | None
    eps: float

    def alone(self, layer: Place) -> "HeadNorms":
        """Returns the norms of one layer."""
        k = None if self.k is None else _of_layer(self.k, layer)
        return HeadNorms(_of_layer(self.q, layer), k, self.eps)


class Angles(NamedTuple):
    """RoPE cos and sin of each row."""

    cos: Float[jax.Array, "R half"]
    sin: Float[jax.Array, "R half"]


def _no_bounds(
    rows: AttentionRows, num_kv_heads: int
) -> tuple[Int[jax.Array, "B bounds"], Int[jax.Array, "B counters"], Int[jax.Array, "R N"]]:
    """Returns empty bounds, for more rows than the fused kernel supports or without a kernel."""
    B = len(rows.page_table)
    counters = jnp.zeros((B, num_kv_heads * BLOCKS), jnp.int32)
    paths = jnp.zeros(_window(rows).shape, jnp.int32)
    return jnp.zeros((B, BOUNDS), jnp.int32), counters, paths


def _window(rows: AttentionRows) -> Bool[jax.Array, "R N"]:
    """Returns the tree windows that the fused kernel supports; empty for wider ones."""
    return rows.window if rows.window.shape[1] <= MOST_NODES else rows.window[:, :0]


def plain_row_bounds(
    rows: AttentionRows, num_kv_heads: int
) -> tuple[Int[jax.Array, "B bounds"], Int[jax.Array, "B counters"], Int[jax.Array, "R N"]]:
    """Computes bounds and paths of rows for the fused attention kernel, once for all layers.

    Reference operations need none.
    """
    return _no_bounds(rows, num_kv_heads)


def kernel_row_bounds(
    kernels: Kernels, rows: AttentionRows, num_kv_heads: int
) -> tuple[Int[jax.Array, "B bounds"], Int[jax.Array, "B counters"], Int[jax.Array, "R N"]]:
    """Same as `plain_row_bounds`, for steps with few enough rows for the kernel."""
    if rows.max_rows > MOST_LANES:
        return _no_bounds(rows, num_kv_heads)
    given = (rows.row_starts, rows.places, rows.first, rows.until, _window(rows), rows.is_real)
    return kernels.row_bounds.compute_row_bounds(
        *given, max_rows=rows.max_rows, k_heads=num_kv_heads
    )


row_bounds = kernel_or_reference(kernel_row_bounds, plain_row_bounds)


class PagedKV(NamedTuple):
    """KV pools of a stack of attention layers, in one pass over some rows.

    Attributes:
      pools: Keys and values of each layer.
      bounds: Bounds of the KV positions that each request reads and writes; for a kernel only.
      arrivals: Zeros, in which a kernel counts its programs; it resets them to zero.
      paths: Tree paths of the rows; for a kernel only.
    """

    pools: KV
    bounds: Int[jax.Array, "B bounds"]
    arrivals: Int[jax.Array, "B counters"]
    paths: Int[jax.Array, "R N"]

    @classmethod
    def of(cls, pools: KV, rows: AttentionRows) -> "PagedKV":
        """Builds the KV pools for a pass over the rows."""
        return cls(pools, *row_bounds(rows, pools.shape[4]))

    @classmethod
    def without_bounds(cls, pools: KV, rows: AttentionRows) -> "PagedKV":
        """Builds the KV pools for kernels that read no row bounds."""
        return cls(pools, *_no_bounds(rows, pools.shape[4]))


def plain_attention_layer(
    qkv: Float[jax.Array, "R outputs"],
    heads: Heads,
    norms: HeadNorms | None,
    angles: Angles,
    rows: AttentionRows,
    kv: PagedKV,
    layer: Place,
    sinks: Norm | None = None,
) -> tuple[Float[jax.Array, "R outputs_of_heads"], PagedKV]:
    """Computes an attention layer between its two projections; `layer` indexes the pools in `kv`.

    The stack of pools is read as one long pool, which avoids a copy of the layer's pool.
    """
    q, k, v, gate = _heads_of(qkv, heads)
    if norms is not None:
        q = layers.rms_norm(q, _of_layer(norms.q, layer), norms.eps)
        if norms.k is not None:
            k = layers.rms_norm(k, _of_layer(norms.k, layer), norms.eps)
    q, pools = layers.apply_rotary(q, angles.cos, angles.sin), kv.pools
    if heads.has_kv:
        k = layers.apply_rotary(k, angles.cos, angles.sin)
        pools = _write_pair(pools, layer, rows, k, v)
    pool, num_pages = pools.reshape(-1, *pools.shape[3:]), pools.shape[2]
    out = attend(
        q=q,
        k_pages=pool,
        v_pages=pool,
        page_table=rows.page_table + 2 * layer * num_pages,
        request=rows.request,
        row_starts=rows.row_starts,
        first=rows.first,
        until=rows.until,
        window=rows.window,
        max_rows=rows.max_rows,
        scale=heads.scale,
        softcap=heads.softcap,
        sinks=alone(sinks),
        k_offset=0,
        v_offset=num_pages,
    )
    if gate is not None:
        out = out * layers.sigmoid(gate)
    return out.reshape(len(qkv), -1), kv._replace(pools=pools)


def kernel_attention_layer(
    kernels: Kernels,
    qkv: Float[jax.Array, "R outputs"],
    heads: Heads,
    norms: HeadNorms | None,
    angles: Angles,
    rows: AttentionRows,
    kv: PagedKV,
    layer: Place,
    sinks: Norm | None = None,
) -> tuple[Float[jax.Array, "R outputs_of_heads"], PagedKV]:
    """Same as `plain_attention_layer`, with one kernel for few rows and two kernels for more."""
    item_bytes, order = qkv.dtype.itemsize, ATTENTION.sizes_for(qkv.dtype.itemsize)
    pairs, sees = rows.max_rows * heads.group(qkv.shape[1]), (rows.first, rows.until, rows.window)
    nodes, requests = rows.window.shape[1], len(rows.page_table)
    sizes = {"item_bytes": item_bytes, "rows": pairs, "head_size": heads.head_size}
    tiles = attention_layer_tiles(
        kernels.tiles.attention_layer, **sizes, nodes=nodes, requests=requests
    )
    sink_stack, sink_layer = _stacked(sinks)
    if tiles is None or nodes > MOST_NODES:
        q, pools = _place(kernels, qkv, heads, norms, angles, rows, kv.pools, layer)
        gate = qkv if heads.gated else None
        tiles = kernels.tiles.attention.of(**sizes)
        pool, table = (pools, operand(layer)), (rows.page_table, rows.row_starts)
        out = kernels.attention.attend(
            q,
            gate,
            *pool,
            *table,
            *sees,
            sinks=sink_stack,
            sink_layer=sink_layer,
            max_rows=rows.max_rows,
            scale=heads.scale,
            softcap=heads.softcap,
            tiles=tiles,
            **order,
        )
        return out, kv._replace(pools=pools)
    q, pools = None, kv.pools
    if tiles.placed or tiles.described:
        q, pools = _place(kernels, qkv, heads, norms, angles, rows, pools, layer)
    out, pools, arrivals = kernels.attention_layer.attention_layer(
        qkv,
        *((None, None) if norms is None else (norms.q, norms.k)),
        angles.cos,
        angles.sin,
        pools,
        operand(layer),
        bounds=kv.bounds,
        arrivals=kv.arrivals,
        page_table=rows.page_table,
        row_starts=rows.row_starts,
        places=rows.places,
        first=rows.first,
        until=rows.until,
        paths=kv.paths,
        is_real=rows.is_real,
        q=q,
        sinks=sink_stack,
        sink_layer=sink_layer,
        gated=heads.gated,
        has_kv=heads.has_kv,
        eps=0.0 if norms is None else norms.eps,
        digits=SQUARES.digits,
        max_rows=rows.max_rows,
        max_parts=MOST_PARTS,
        scale=heads.scale,
        softcap=heads.softcap,
        tiles=tiles,
        **order,
    )
    return out, kv._replace(pools=pools, arrivals=arrivals)


attention_layer = kernel_or_reference(kernel_attention_layer, plain_attention_layer)


def full_width_qk_norm(
    qkv: Float[jax.Array, "R outputs"], heads: Heads, norms: HeadNorms, group: TPGroup
) -> Float[jax.Array, "R outputs"]:
    """Applies RMS norms over all query heads and all key heads of a row.

    Args:
      group: Tensor-parallel group of the heads; the norms cover the heads of all ranks.
    """
    keys = heads.key_columns
    q, k, v = jnp.split(qkv, [qkv.shape[1] - 2 * keys, qkv.shape[1] - keys], axis=1)
    q = layers.rms_norm(all_gather.all_gather(group, q), norms.q, norms.eps)
    if norms.k is None:
        return all_gather.local_columns(group, q)
    num_copies = keys * group.count // len(norms.k)
    k = layers.rms_norm(all_gather.all_gather_kv_heads(group, k, num_copies), norms.k, norms.eps)
    own = all_gather.local_columns(group, q), all_gather.own_keys(group, k, num_copies)
    return jnp.concatenate([*own, v], axis=1)


def plain_norm_values(
    qkv: Float[jax.Array, "R outputs"], heads: Heads, eps: float, are_keys: bool
) -> Float[jax.Array, "R with_values"]:
    """Applies the RMS norm of values to each value head; with `are_keys` the values are the
    projected keys, and the projection has no values.
    """
    stored = qkv.shape[1] - heads.key_columns
    values = layers.rms_norm(qkv[:, stored:].reshape(len(qkv), -1, heads.head_size), None, eps)
    others = qkv if are_keys else qkv[:, :stored]
    return jnp.concatenate([others, values.reshape(len(qkv), -1)], axis=1)


def kernel_norm_values(
    kernels: Kernels, qkv: Float[jax.Array, "R outputs"], heads: Heads, eps: float, are_keys: bool
) -> Float[jax.Array, "R with_values"]:
    stored = qkv.shape[1] - heads.key_columns
    how = {"stored": stored, "head_size": heads.head_size, "are_keys": are_keys}
    return kernels.layers.norm_values(qkv, eps, **how, order=SQUARES)


def is_bfloat16_of_few_rows(qkv: jax.Array) -> bool:
    """Returns True if one kernel is faster than the norm of the values and a copy."""
    return is_bfloat16(qkv) and len(qkv) <= MOST_VALUE_ROWS


norm_values = kernel_or_reference(kernel_norm_values, plain_norm_values, is_bfloat16_of_few_rows)


def scale_queries(
    qkv: Float[jax.Array, "R outputs"], heads: Heads, query_scale: Float[jax.Array, " R"]
) -> Float[jax.Array, "R outputs"]:
    """Multiplies the queries of each row by its long-context query scale."""
    q, kv = jnp.split(qkv, [qkv.shape[1] - 2 * heads.key_columns], axis=1)
    return jnp.concatenate([(q * query_scale[:, None]).astype(qkv.dtype), kv], axis=1)


def plain_write_kv(
    projected: Float[jax.Array, "R outputs"],
    heads: Heads,
    norms: HeadNorms,
    angles: Angles,
    rows: AttentionRows,
    kv: KV,
    layer: Place,
) -> KV:
    """Writes the KV of rows that run no attention; `projected` has key heads, then value heads."""
    k, v = jnp.split(projected, 2, axis=1)
    k, v = (part.reshape(len(projected), -1, heads.head_size) for part in (k, v))
    assert norms.k is not None  # the projection has keys
    k = layers.rms_norm(k, _of_layer(norms.k, layer), norms.eps)
    return _write_pair(kv, layer, rows, layers.apply_rotary(k, angles.cos, angles.sin), v)


def kernel_write_kv(
    kernels: Kernels,
    projected: Float[jax.Array, "R outputs"],
    heads: Heads,
    norms: HeadNorms,
    angles: Angles,
    rows: AttentionRows,
    kv: KV,
    layer: Place,
) -> KV:
    return _place(kernels, projected, heads, norms, angles, rows, kv, layer)[1]


write_kv = kernel_or_reference(kernel_write_kv, plain_write_kv)


def _place(
    kernels: Kernels,
    projected: Float[jax.Array, "R outputs"],
    heads: Heads,
    norms: HeadNorms | None,
    angles: Angles,
    rows: AttentionRows,
    kv: KV,
    layer: Place,
) -> tuple[Float[jax.Array, "R Hq D"], KV]:
    """Writes the rows' own keys and values with a kernel; returns the queries for attention."""
    return kernels.qk_norm_rope_kv_write.qk_norm_rope_kv_write(
        projected,
        *((None, None) if norms is None else (norms.q, norms.k)),
        angles.cos,
        angles.sin,
        kv,
        operand(layer),
        rows.page_table,
        rows.request,
        rows.places,
        rows.is_real,
        gated=heads.gated,
        has_kv=heads.has_kv,
        eps=0.0 if norms is None else norms.eps,
        digits=SQUARES.digits,
    )


def _stacked(sinks: Norm | None) -> tuple[Float[jax.Array, "L Hq"] | None, Int[jax.Array, " 1"]]:
    """Returns the sinks in the form of kernels: a stack and the index in it."""
    stack, layer = stacked(sinks)
    return stack, operand(layer)


def _of_layer(scales: Float[jax.Array, "*L D"], layer: Place) -> Float[jax.Array, " D"]:
    return scales[layer] if scales.ndim == 2 else scales


def _write_pair(
    kv: KV,
    layer: Place,
    rows: AttentionRows,
    k: Float[jax.Array, "R Hk D"],
    v: Float[jax.Array, "R Hk D"],
) -> KV:
    """Writes keys and values into the stack as one long pool, which copies no pool."""
    num_pages, requests = kv.shape[2], len(rows.page_table)
    pool = kv.reshape(-1, *kv.shape[3:])
    keys = rows.page_table + 2 * layer * num_pages
    tables = jnp.concatenate([keys, keys + num_pages])
    request = jnp.concatenate([rows.request, rows.request + requests])
    places, is_real = jnp.tile(rows.places, 2), jnp.tile(rows.is_real, 2)
    pool = write(pool, tables, request, places, is_real, jnp.concatenate([k, v]))
    return pool.reshape(kv.shape)


def _heads_of(
    qkv: Float[jax.Array, "R outputs"], heads: Heads
) -> tuple[
    Float[jax.Array, "R Hq D"],
    Float[jax.Array, "R Hk D"],
    Float[jax.Array, "R Hk D"],
    Float[jax.Array, "R Hq D"] | None,
]:
    """Splits the projection into queries, keys, values and the gate (None without one)."""
    R, D, keys = len(qkv), heads.head_size, heads.key_columns
    queries = qkv.shape[1] - 2 * keys
    q, k, v = jnp.split(qkv, [queries, queries + keys], axis=1)
    k, v = k.reshape(R, -1, D), v.reshape(R, -1, D)
    if not heads.gated:
        return q.reshape(R, -1, D), k, v, None
    pairs = q.reshape(R, -1, 2, D)  # per head its query rows, then its gate rows
    return pairs[:, :, 0], k, v, pairs[:, :, 1]
