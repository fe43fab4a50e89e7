"""What an attention layer does between its two products; as `shared.spec.attention_layer`.

On a GPU `attention_layer` and `mix_keys` are kernels, see `jax_impl.ops`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl.ops import Kernels, Place, kernel_or_plain, operand
from jax_impl.ops.attention.attention import KV, Rows, attend, write
from jax_impl.ops.collectives import all_gather
from jax_impl.ops.gemm import layers
from kernels.kernel_limits import MOST_NODES
from kernels.tiles import BLOCKS, MOST_LANES
from shared.boundary.tp_group import Ranks
from shared.boundary.workspace import MOST_PARTS
from shared.spec.attention_layer import BOUNDS, Heads
from shared.spec.reduction_order import ATTENTION, SQUARES


class HeadNorms(NamedTuple):
    """RMS norms of each query and key head; fields as in the specification.

    Scales are a layer's, or those of all attention layers, of which an operation takes its own.
    """

    q: Float[jax.Array, "*L queries"]
    k: Float[jax.Array, "*L keys"]
    eps: float

    def alone(self, layer: Place) -> "HeadNorms":
        """Those of one layer."""
        return HeadNorms(_of_layer(self.q, layer), _of_layer(self.k, layer), self.eps)


class Angles(NamedTuple):
    """Cosine and sine of the rotation at each row's position."""

    cos: Float[jax.Array, "R half"]
    sin: Float[jax.Array, "R half"]


def _no_bounds(
    rows: Rows, num_kv_heads: int
) -> tuple[Int[jax.Array, "B bounds"], Int[jax.Array, "B counters"]]:
    """Of rows that are too many for the kernel of `attention_layer`, or where there is none."""
    B = len(rows.page_table)
    counters = jnp.zeros((B, num_kv_heads * BLOCKS), jnp.int32)
    return jnp.zeros((B, BOUNDS), jnp.int32), counters


def plain_reach(
    rows: Rows, num_kv_heads: int
) -> tuple[Int[jax.Array, "B bounds"], Int[jax.Array, "B counters"]]:
    """What the kernel of `attention_layer` asks of rows, once for all layers; plain operations ask
    nothing.
    """
    return _no_bounds(rows, num_kv_heads)


def kernel_reach(
    kernels: Kernels, rows: Rows, num_kv_heads: int
) -> tuple[Int[jax.Array, "B bounds"], Int[jax.Array, "B counters"]]:
    """As `plain_reach`, where rows may be few enough for that kernel."""
    if rows.most_rows > MOST_LANES:
        return _no_bounds(rows, num_kv_heads)
    given = (rows.row_starts, rows.places, rows.first, rows.until, rows.is_real)
    return kernels.row_bounds.reach(*given, max_rows=rows.most_rows, k_heads=num_kv_heads)


reach = kernel_or_plain(kernel_reach, plain_reach)


class PagedKV(NamedTuple):
    """The pools of a stack of attention layers, for the layers of one pass over some rows.

    Attributes:
      pools: Keys and values of each layer.
      bounds: Of what the rows of a request see and write; a kernel's alone.
      arrivals: Zeros, in which a kernel counts its programs, and which it leaves as zeros.
    """

    pools: KV
    bounds: Int[jax.Array, "B bounds"]
    arrivals: Int[jax.Array, "B counters"]

    @classmethod
    def of(cls, pools: KV, rows: Rows) -> "PagedKV":
        """For a pass over the rows."""
        return cls(pools, *reach(rows, pools.shape[4]))


def plain_mix(
    qkv: Float[jax.Array, "R outputs"],
    heads: Heads,
    norms: HeadNorms | None,
    angles: Angles,
    rows: Rows,
    kv: PagedKV,
    layer: Place,
) -> tuple[Float[jax.Array, "R outputs_of_heads"], PagedKV]:
    """All that an attention layer does between its two products; `layer` names its pools in `kv`.

    The stack of pools is read as one long pool, so that no layer's is copied out.
    """
    q, k, v, gate = _heads_of(qkv, heads)
    if norms is not None:
        q = layers.rms_norm(q, _of_layer(norms.q, layer), norms.eps)
        k = layers.rms_norm(k, _of_layer(norms.k, layer), norms.eps)
    q = layers.apply_rotary(q, angles.cos, angles.sin)
    pools = _write_pair(kv.pools, layer, rows, layers.apply_rotary(k, angles.cos, angles.sin), v)
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
        most_rows=rows.most_rows,
        scale=heads.scale,
        k_offset=0,
        v_offset=num_pages,
    )
    if gate is not None:
        out = out * layers.sigmoid(gate)
    return out.reshape(len(qkv), -1), kv._replace(pools=pools)


def kernel_mix(
    kernels: Kernels,
    qkv: Float[jax.Array, "R outputs"],
    heads: Heads,
    norms: HeadNorms | None,
    angles: Angles,
    rows: Rows,
    kv: PagedKV,
    layer: Place,
) -> tuple[Float[jax.Array, "R outputs_of_heads"], PagedKV]:
    """As `plain_mix`, by one kernel where rows are few, else by two."""
    item_bytes, order = qkv.dtype.itemsize, ATTENTION.sizes_for(qkv.dtype.itemsize)
    group = (qkv.shape[1] // heads.head_size // heads.num_kv_heads - 2) // (1 + heads.gated)
    pairs, sees = rows.most_rows * group, (rows.first, rows.until, rows.window)
    sizes = {"item_bytes": item_bytes, "rows": pairs, "head_size": heads.head_size}
    if pairs > MOST_LANES or rows.window.shape[1] > MOST_NODES:
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
            max_rows=rows.most_rows,
            scale=heads.scale,
            tiles=tiles,
            **order,
        )
        return out, kv._replace(pools=pools)
    requests, q, pools = len(rows.page_table), None, kv.pools
    tiles = kernels.tiles.attention_layer.of(**sizes, requests=requests)
    if tiles.placed or tiles.described:
        q, pools = _place(kernels, qkv, heads, norms, angles, rows, pools, layer)
    out, pools, arrivals = kernels.attention_layer.mix(
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
        window=rows.window,
        is_real=rows.is_real,
        q=q,
        gated=heads.gated,
        eps=0.0 if norms is None else norms.eps,
        digits=SQUARES.digits,
        max_rows=rows.most_rows,
        most_parts=MOST_PARTS,
        scale=heads.scale,
        tiles=tiles,
        **order,
    )
    return out, PagedKV(pools, kv.bounds, arrivals)


mix = kernel_or_plain(kernel_mix, plain_mix)


def normed_rows(
    qkv: Float[jax.Array, "R outputs"], heads: Heads, norms: HeadNorms, group: Ranks
) -> Float[jax.Array, "R outputs"]:
    """A projection whose queries, and whose keys, are normed over all heads of a row.

    Args:
      group: The ranks that have the heads between them; the norms are of all heads.
    """
    keys = heads.num_kv_heads * heads.head_size
    q, k, v = jnp.split(qkv, [qkv.shape[1] - 2 * keys, qkv.shape[1] - keys], axis=1)
    num_copies = keys * group.count // len(norms.k)
    q = layers.rms_norm(all_gather.gathered(group, q), norms.q, norms.eps)
    k = layers.rms_norm(all_gather.gathered_keys(group, k, num_copies), norms.k, norms.eps)
    own = all_gather.own(group, q), all_gather.own_keys(group, k, num_copies)
    return jnp.concatenate([*own, v], axis=1)


def grown_rows(
    qkv: Float[jax.Array, "R outputs"], heads: Heads, growth: Float[jax.Array, " R"]
) -> Float[jax.Array, "R outputs"]:
    """A projection whose queries are multiplied by what each row's have grown by."""
    keys = 2 * heads.num_kv_heads * heads.head_size
    q, kv = jnp.split(qkv, [qkv.shape[1] - keys], axis=1)
    return jnp.concatenate([(q * growth[:, None]).astype(qkv.dtype), kv], axis=1)


def plain_mix_keys(
    projected: Float[jax.Array, "R outputs"],
    heads: Heads,
    norms: HeadNorms,
    angles: Angles,
    rows: Rows,
    kv: KV,
    layer: Place,
) -> KV:
    """The part of `attention_layer` that writes, of rows that nothing queries: key heads, then
    value heads.
    """
    k, v = jnp.split(projected, 2, axis=1)
    k, v = (part.reshape(len(projected), -1, heads.head_size) for part in (k, v))
    k = layers.rms_norm(k, _of_layer(norms.k, layer), norms.eps)
    return _write_pair(kv, layer, rows, layers.apply_rotary(k, angles.cos, angles.sin), v)


def kernel_mix_keys(
    kernels: Kernels,
    projected: Float[jax.Array, "R outputs"],
    heads: Heads,
    norms: HeadNorms,
    angles: Angles,
    rows: Rows,
    kv: KV,
    layer: Place,
) -> KV:
    return _place(kernels, projected, heads, norms, angles, rows, kv, layer)[1]


mix_keys = kernel_or_plain(kernel_mix_keys, plain_mix_keys)


def _place(
    kernels: Kernels,
    projected: Float[jax.Array, "R outputs"],
    heads: Heads,
    norms: HeadNorms | None,
    angles: Angles,
    rows: Rows,
    kv: KV,
    layer: Place,
) -> tuple[Float[jax.Array, "R Hq D"], KV]:
    """Writes the rows' keys and values by a kernel, which gives the queries to attend with."""
    return kernels.qk_norm_rope_kv_write.place(
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
        eps=0.0 if norms is None else norms.eps,
        digits=SQUARES.digits,
    )


def _of_layer(scales: Float[jax.Array, "*L D"], layer: Place) -> Float[jax.Array, " D"]:
    return scales[layer] if scales.ndim == 2 else scales


def _write_pair(
    kv: KV,
    layer: Place,
    rows: Rows,
    k: Float[jax.Array, "R Hk D"],
    v: Float[jax.Array, "R Hk D"],
) -> KV:
    """Writes keys and values into the stack as one long pool, at once: no pool is copied."""
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
    """Takes the projection apart: queries, keys, values, and the gate where there is one."""
    R, D, keys = len(qkv), heads.head_size, heads.num_kv_heads * heads.head_size
    queries = qkv.shape[1] - 2 * keys
    q, k, v = jnp.split(qkv, [queries, queries + keys], axis=1)
    k, v = k.reshape(R, -1, D), v.reshape(R, -1, D)
    if not heads.gated:
        return q.reshape(R, -1, D), k, v, None
    pairs = q.reshape(R, -1, 2, D)  # per head its query rows, then its gate rows
    return pairs[:, :, 0], k, v, pairs[:, :, 1]
