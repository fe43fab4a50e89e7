"""Attention layer between the QKV and output projections; same as `shared.spec.attention_layer`.

Pools are written in place.

On a GPU `attention_layer`, `norm_values` and `write_kv` are kernels; see `torch_impl.ops`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kernels.kernel_limits import MOST_NODES, MOST_VALUE_ROWS
from kernels.tiles import MOST_LANES
from kernels.tree_blocks import attention_layer_tiles
from shared.boundary.tp_group import TPGroup
from shared.boundary.workspace import MOST_PARTS
from shared.spec.attention_layer import Heads
from shared.spec.reduction_order import ATTENTION, SQUARES
from torch_impl.ops import Kernels, is_bfloat16, kernel_or_reference
from torch_impl.ops.attention.attention import AttentionRows, attend, write
from torch_impl.ops.collectives import all_gather
from torch_impl.ops.gemm import layers


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of each query and key head; same fields as in the specification."""

    q: Float[Tensor, " queries"]
    k: Float[Tensor, " keys"] | None
    eps: float


@dataclass(frozen=True)
class Angles:
    """RoPE cos and sin of each row."""

    cos: Float[Tensor, "R half"]
    sin: Float[Tensor, "R half"]


def _no_bounds(
    rows: AttentionRows, num_kv_heads: int
) -> tuple[Int[Tensor, "B bounds"], Int[Tensor, "B counters"], Int[Tensor, "R N"]]:
    """Returns empty bounds, for more rows than the fused kernel supports or without a kernel."""
    nothing = rows.page_table.new_empty((len(rows.page_table), 0), dtype=torch.int32)
    return nothing, nothing, nothing.new_empty(_window(rows).shape)


def _window(rows: AttentionRows) -> Bool[Tensor, "R N"]:
    """Returns the tree windows that the fused kernel supports; empty for wider ones."""
    return rows.window if rows.window.shape[1] <= MOST_NODES else rows.window[:, :0]


def plain_row_bounds(
    rows: AttentionRows, num_kv_heads: int
) -> tuple[Int[Tensor, "B bounds"], Int[Tensor, "B counters"], Int[Tensor, "R N"]]:
    """Computes bounds and paths of rows for the fused attention kernel, once for all layers.

    Reference operations need none.
    """
    return _no_bounds(rows, num_kv_heads)


def kernel_row_bounds(
    kernels: Kernels, rows: AttentionRows, num_kv_heads: int
) -> tuple[Int[Tensor, "B bounds"], Int[Tensor, "B counters"], Int[Tensor, "R N"]]:
    """Same as `plain_row_bounds`, for steps with few enough rows for the kernel."""
    if rows.max_rows > MOST_LANES:
        return _no_bounds(rows, num_kv_heads)
    given = (rows.row_starts, rows.places, rows.first, rows.until, _window(rows), rows.is_real)
    return kernels.row_bounds.compute_row_bounds(
        *given, max_rows=rows.max_rows, k_heads=num_kv_heads
    )


row_bounds = kernel_or_reference(kernel_row_bounds, plain_row_bounds)


@dataclass(frozen=True)
class PagedKV:
    """KV pools of a stack of attention layers, in one pass over some rows.

    Attributes:
      pools: Keys and values of each layer.
      bounds: Bounds of the KV positions that each request reads and writes; for a kernel only.
      arrivals: Zeros, in which a kernel counts its programs; it resets them to zero.
      paths: Tree paths of the rows; for a kernel only.
    """

    pools: Float[Tensor, "L arrays pages page Hk D"]
    bounds: Int[Tensor, "B bounds"]
    arrivals: Int[Tensor, "B counters"]
    paths: Int[Tensor, "R N"]

    @classmethod
    def of(cls, pools: Float[Tensor, "L arrays pages page Hk D"], rows: AttentionRows) -> "PagedKV":
        """Builds the KV pools for a pass over the rows."""
        return cls(pools, *row_bounds(rows, pools.shape[4]))

    @classmethod
    def without_bounds(
        cls, pools: Float[Tensor, "L arrays pages page Hk D"], rows: AttentionRows
    ) -> "PagedKV":
        """Builds the KV pools for kernels that read no row bounds."""
        return cls(pools, *_no_bounds(rows, pools.shape[4]))


def plain_attention_layer(
    qkv: Float[Tensor, "R outputs"],
    heads: Heads,
    norms: HeadNorms | None,
    angles: Angles,
    rows: AttentionRows,
    kv: PagedKV,
    layer: int,
    sinks: Float[Tensor, " Hq"] | None = None,
) -> Float[Tensor, "R outputs_of_heads"]:
    """Computes an attention layer between its two projections; writes its own KV in place."""
    q, k, v, gate = _heads_of(qkv, heads)
    if norms is not None:
        q = layers.rms_norm(q, norms.q, norms.eps)
        if norms.k is not None:
            k = layers.rms_norm(k, norms.k, norms.eps)
    q = layers.apply_rotary(q, angles.cos, angles.sin)
    if heads.has_kv:
        k = layers.apply_rotary(k, angles.cos, angles.sin)
    pools = kv.pools[layer]
    if heads.has_kv:
        _write_pair(pools, rows, k, v)
    out = attend(
        q,
        pools[0],
        pools[1],
        rows.page_table,
        rows.request,
        rows.row_starts,
        rows.first,
        rows.until,
        rows.window,
        rows.max_rows,
        scale=heads.scale,
        softcap=heads.softcap,
        sinks=sinks,
    )
    if gate is not None:
        out = out * layers.sigmoid(gate)
    return out.flatten(1)


def kernel_attention_layer(
    kernels: Kernels,
    qkv: Float[Tensor, "R outputs"],
    heads: Heads,
    norms: HeadNorms | None,
    angles: Angles,
    rows: AttentionRows,
    kv: PagedKV,
    layer: int,
    sinks: Float[Tensor, " Hq"] | None = None,
) -> Float[Tensor, "R outputs_of_heads"]:
    """Same as `plain_attention_layer`, with one kernel for few rows and two kernels for more."""
    item_bytes, order = qkv.dtype.itemsize, ATTENTION.sizes_for(qkv.dtype.itemsize)
    pairs, sees = rows.max_rows * heads.group(qkv.shape[1]), (rows.first, rows.until, rows.window)
    nodes, requests = rows.window.shape[1], len(rows.page_table)
    sizes = {"item_bytes": item_bytes, "rows": pairs, "head_size": heads.head_size}
    tiles = attention_layer_tiles(
        kernels.tiles.attention_layer, **sizes, nodes=nodes, requests=requests
    )
    if tiles is None or nodes > MOST_NODES:
        q = _place(kernels, qkv, heads, norms, angles, rows, kv.pools, layer)
        gate = qkv if heads.gated else None
        tiles = kernels.tiles.attention.of(**sizes)
        pool, table = (kv.pools, layer), (rows.page_table, rows.row_starts)
        return kernels.attention.attend(
            q,
            gate,
            *pool,
            *table,
            *sees,
            sinks,
            max_rows=rows.max_rows,
            scale=heads.scale,
            softcap=heads.softcap,
            tiles=tiles,
            **order,
        )
    q = None
    if tiles.placed or tiles.described:
        q = _place(kernels, qkv, heads, norms, angles, rows, kv.pools, layer)
    return kernels.attention_layer.attention_layer(
        qkv,
        *((None, None) if norms is None else (norms.q, norms.k)),
        angles.cos,
        angles.sin,
        kv.pools,
        layer,
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
        sinks=sinks,
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


attention_layer = kernel_or_reference(kernel_attention_layer, plain_attention_layer)


def full_width_qk_norm(
    qkv: Float[Tensor, "R outputs"], heads: Heads, norms: HeadNorms, group: TPGroup
) -> Float[Tensor, "R outputs"]:
    """Applies RMS norms over all query heads and all key heads of a row.

    Args:
      group: Tensor-parallel group of the heads; the norms cover the heads of all ranks.
    """
    keys = heads.key_columns
    q, k, v = qkv.split([qkv.shape[1] - 2 * keys, keys, keys], dim=1)
    q = layers.rms_norm(all_gather.all_gather(group, q), norms.q, norms.eps)
    if norms.k is None:
        return all_gather.local_columns(group, q)
    num_copies = keys * group.count // len(norms.k)
    k = layers.rms_norm(all_gather.all_gather_kv_heads(group, k, num_copies), norms.k, norms.eps)
    own = all_gather.local_columns(group, q), all_gather.own_keys(group, k, num_copies)
    return torch.cat([*own, v], dim=1)


def plain_norm_values(
    qkv: Float[Tensor, "R outputs"], heads: Heads, eps: float, are_keys: bool
) -> Float[Tensor, "R with_values"]:
    """Applies the RMS norm of values to each value head; with `are_keys` the values are the
    projected keys, and the projection has no values.
    """
    stored = qkv.shape[1] - heads.key_columns
    values = layers.rms_norm(qkv[:, stored:].unflatten(1, (-1, heads.head_size)), None, eps)
    others = qkv if are_keys else qkv[:, :stored]
    return torch.cat([others, values.flatten(1)], dim=1)


def kernel_norm_values(
    kernels: Kernels, qkv: Float[Tensor, "R outputs"], heads: Heads, eps: float, are_keys: bool
) -> Float[Tensor, "R with_values"]:
    stored = qkv.shape[1] - heads.key_columns
    how = {"stored": stored, "head_size": heads.head_size, "are_keys": are_keys}
    return kernels.layers.norm_values(qkv, eps, **how, order=SQUARES)


def is_bfloat16_of_few_rows(qkv: Tensor) -> bool:
    """Returns True if one kernel is faster than the norm of the values and a copy."""
    return is_bfloat16(qkv) and len(qkv) <= MOST_VALUE_ROWS


norm_values = kernel_or_reference(kernel_norm_values, plain_norm_values, is_bfloat16_of_few_rows)


def scale_queries(
    qkv: Float[Tensor, "R outputs"], heads: Heads, query_scale: Float[Tensor, " R"]
) -> Float[Tensor, "R outputs"]:
    keys = 2 * heads.key_columns
    q, kv = qkv.split([qkv.shape[1] - keys, keys], dim=1)
    return torch.cat([(q * query_scale[:, None]).to(qkv.dtype), kv], dim=1)


def plain_write_kv(
    projected: Float[Tensor, "R outputs"],
    heads: Heads,
    norms: HeadNorms,
    angles: Angles,
    rows: AttentionRows,
    kv: Float[Tensor, "L arrays pages page Hk D"],
    layer: int,
) -> None:
    """Writes the KV of rows that run no attention, in place in the pools of one layer of `kv`."""
    k, v = projected.unflatten(1, (2, -1, heads.head_size)).unbind(1)
    assert norms.k is not None  # the projection has keys
    k = layers.rms_norm(k, norms.k, norms.eps)
    _write_pair(kv[layer], rows, layers.apply_rotary(k, angles.cos, angles.sin), v)


def kernel_write_kv(
    kernels: Kernels,
    projected: Float[Tensor, "R outputs"],
    heads: Heads,
    norms: HeadNorms,
    angles: Angles,
    rows: AttentionRows,
    kv: Float[Tensor, "L arrays pages page Hk D"],
    layer: int,
) -> None:
    _place(kernels, projected, heads, norms, angles, rows, kv, layer)


write_kv = kernel_or_reference(kernel_write_kv, plain_write_kv)


def _place(
    kernels: Kernels,
    projected: Float[Tensor, "R outputs"],
    heads: Heads,
    norms: HeadNorms | None,
    angles: Angles,
    rows: AttentionRows,
    kv: Float[Tensor, "L arrays pages page Hk D"],
    layer: int,
) -> Float[Tensor, "R Hq D"]:
    """Writes the rows' own keys and values with a kernel; returns the queries for attention."""
    return kernels.qk_norm_rope_kv_write.qk_norm_rope_kv_write(
        projected,
        *((None, None) if norms is None else (norms.q, norms.k)),
        angles.cos,
        angles.sin,
        kv,
        layer,
        rows.page_table,
        rows.request,
        rows.places,
        rows.is_real,
        gated=heads.gated,
        has_kv=heads.has_kv,
        eps=0.0 if norms is None else norms.eps,
        digits=SQUARES.digits,
    )


def _write_pair(
    pools: Float[Tensor, "2 pages page Hk D"],
    rows: AttentionRows,
    k: Float[Tensor, "R Hk D"],
    v: Float[Tensor, "R Hk D"],
) -> None:
    for pool, values in zip(pools, (k, v), strict=True):
        write(pool, rows.page_table, rows.request, rows.places, rows.is_real, values)


def _heads_of(
    qkv: Float[Tensor, "R outputs"], heads: Heads
) -> tuple[
    Float[Tensor, "R Hq D"],
    Float[Tensor, "R Hk D"],
    Float[Tensor, "R Hk D"],
    Float[Tensor, "R Hq D"] | None,
]:
    """Splits the projection into queries, keys, values and the gate (None without one)."""
    D, keys = heads.head_size, heads.key_columns
    q, k, v = qkv.split([qkv.shape[1] - 2 * keys, keys, keys], dim=1)
    k, v = k.unflatten(1, (-1, D)), v.unflatten(1, (-1, D))
    if not heads.gated:
        return q.unflatten(1, (-1, D)), k, v, None
    pairs = q.unflatten(1, (-1, 2, D))  # per head its query rows, then its gate rows
    return pairs[:, :, 0], k, v, pairs[:, :, 1]
