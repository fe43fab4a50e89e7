"""Attention over paged KV; same results as `shared.spec.attention`.

Rows are flat. The reference implementation pads the queries of each request to `max_rows` and
reads all positions of the page table.

On a GPU `flatten_tree` and `compact_accepted_kv` are kernels; see `jax_impl.ops`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from jax_impl.ops import Kernels, is_bfloat16, kernel_or_reference
from jax_impl.ops.gemm import layers
from jax_impl.ops.trees import draft_tree
from shared.spec.attention import QUERIES
from shared.spec.reduction_order import ATTENTION

KV = Float[jax.Array, "L arrays P page Hk D"]
Pools = tuple[KV, ...]
"""KV pools of a model or drafter, in the order of `ModelConfig.kv_pools`."""
WindowPageTables = Mapping[int, Int[jax.Array, "B table"]]
"""Page tables of layers with a pool of their own, by sliding window."""


class AttentionRows(NamedTuple):
    """Positions of the rows of a forward pass, and the KV visible to them.

    Attributes:
      request: Request of each row.
      positions: Positions for RoPE.
      places: KV position that the row is written to.
      first, until, window: KV visible to the row, see `attention_mask`.
      is_real: False for padding.
      page_table: Pages of each request.
      row_starts: First row of each request, and the end of the last; later rows are padding and
        belong to request 0.
      max_rows: Maximum number of rows of a request.
      mrope_positions: M-RoPE positions (time, row, column); None if all three are equal to the
        position.
      window_page_tables: Pages of each request in the pools of sliding-window layers; such layers
        use `page_table` if it has none for their window.
    """

    request: Int[jax.Array, " R"]
    positions: Int[jax.Array, " R"]
    places: Int[jax.Array, " R"]
    first: Int[jax.Array, " R"]
    until: Int[jax.Array, " R"]
    window: Bool[jax.Array, "R N"]
    is_real: Bool[jax.Array, " R"]
    page_table: Int[jax.Array, "B table"]
    row_starts: Int[jax.Array, " B1"]
    max_rows: int
    mrope_positions: Int[jax.Array, "R 3"] | None = None
    window_page_tables: WindowPageTables = {}


def causal_rows(
    row_starts: Int[jax.Array, " B1"],
    first_positions: Int[jax.Array, " B"],
    draft_from: Int[jax.Array, " B"],
    page_table: Int[jax.Array, "B table"],
    tokens: int,
) -> AttentionRows:
    """Returns rows at consecutive positions of each request, with causal visibility."""
    num_rows = row_starts[1:] - row_starts[:-1]
    _, request, column, is_real = draft_tree.flatten(num_rows, tokens)
    positions = jnp.where(is_real, first_positions[request] + column, 0)
    return AttentionRows(
        request=request,
        positions=positions,
        places=positions,
        first=draft_from[request],
        until=jnp.where(is_real, positions + 1, 0),
        window=jnp.zeros((tokens, 0), bool),
        is_real=is_real,
        page_table=page_table,
        row_starts=row_starts,
        max_rows=tokens,
    )


class FlatNodes(NamedTuple):
    """Flat rows of the nodes of draft trees: fields of `AttentionRows`, and the node of each
    row.
    """

    row_starts: Int[jax.Array, " B1"]
    request: Int[jax.Array, " R"]
    node: Int[jax.Array, " R"]
    is_real: Bool[jax.Array, " R"]
    positions: Int[jax.Array, " R"]
    places: Int[jax.Array, " R"]
    until: Int[jax.Array, " R"]
    window: Bool[jax.Array, "R seen"]


def plain_flat_nodes(
    parents: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    lengths: Int[jax.Array, " B"],
    rows: int,
    is_chain: bool,
) -> FlatNodes:
    row_starts, request, node, is_real = draft_tree.flatten(num_nodes, rows)
    length = lengths[request]
    places = length + node
    if is_chain:
        positions, until, window = places, places + 1, jnp.zeros((rows, 0), bool)
    else:
        positions = length + draft_tree.depths(parents)[request, node]
        until = length
        window = draft_tree.ancestors(parents)[request, node] & is_real[:, None]
    return FlatNodes(
        row_starts=row_starts,
        request=request,
        node=node,
        is_real=is_real,
        positions=positions,
        places=places,
        until=jnp.where(is_real, until, 0),
        window=window,
    )


def kernel_flat_nodes(
    kernels: Kernels,
    parents: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    lengths: Int[jax.Array, " B"],
    rows: int,
    is_chain: bool,
) -> FlatNodes:
    return FlatNodes(*kernels.flatten_tree.flat_nodes(parents, num_nodes, lengths, rows, is_chain))


flat_nodes = kernel_or_reference(kernel_flat_nodes, plain_flat_nodes)


def tree_rows(
    parents: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    lengths: Int[jax.Array, " B"],
    page_table: Int[jax.Array, "B table"],
    rows: int,
    is_chain: bool,
) -> tuple[AttentionRows, Int[jax.Array, " R"]]:
    """Returns the flat verify rows of a batch of trees, and the node of each row.

    Args:
      is_chain: True if all trees are chains, whose nodes need no tree mask.
    """
    flat = flat_nodes(parents, num_nodes, lengths, rows, is_chain)
    flat_rows = AttentionRows(
        request=flat.request,
        positions=flat.positions,
        places=flat.places,
        first=jnp.zeros(rows, jnp.int32),
        until=flat.until,
        window=flat.window,
        is_real=flat.is_real,
        page_table=page_table,
        row_starts=flat.row_starts,
        max_rows=parents.shape[1],
    )
    return flat_rows, flat.node


def with_mrope(rows: AttentionRows, delta: Int[jax.Array, " B"]) -> AttentionRows:
    """Adds M-RoPE positions to text rows that may follow images.

    Args:
      delta: M-RoPE position delta of each request.
    """
    position = rows.positions + delta[rows.request]
    return rows._replace(mrope_positions=jnp.stack([position] * 3, axis=1))


def sliding_bounds(
    first: Int[jax.Array, " R"],
    until: Int[jax.Array, " R"],
    window: Bool[jax.Array, "R N"],
    size: int,
) -> tuple[Int[jax.Array, " R"], Bool[jax.Array, "R N"]]:
    """Returns `first` and `window` of rows restricted to the last `size` visible positions."""
    slid = jnp.maximum(first, until + window.sum(axis=1, dtype=jnp.int32) - size)
    if window.shape[1] > size:  # a tree may be deeper than the window
        window &= lax.cumsum(window.astype(jnp.int32), axis=1, reverse=True) <= size
    return slid, window


def with_sliding_window(rows: AttentionRows, size: int | None) -> AttentionRows:
    """Returns the rows with the visibility and the pages of a sliding-window layer; None for full
    attention.
    """
    if size is None:
        return rows
    first, window = sliding_bounds(rows.first, rows.until, rows.window, size)
    table = rows.window_page_tables.get(size, rows.page_table)
    return rows._replace(first=first, window=window, page_table=table)


def write(
    pages: Float[jax.Array, "P page H D"],
    page_table: Int[jax.Array, "B table"],
    request: Int[jax.Array, " R"],
    places: Int[jax.Array, " R"],
    is_real: Bool[jax.Array, " R"],
    rows: Float[jax.Array, "R H D"],
) -> Float[jax.Array, "P page H D"]:
    """Writes each row of keys (or values) at its KV position; padding writes page 0."""
    page_size = pages.shape[1]
    column = jnp.where(is_real, places // page_size, 0)
    page = jnp.where(is_real, page_table[request, column], 0)
    return pages.at[page, places % page_size].set(rows.astype(pages.dtype))


def read(
    pages: Float[jax.Array, "P page H D"], page_table: Int[jax.Array, "B table"]
) -> Float[jax.Array, "B positions H D"]:
    """Returns the KV of all positions in each request's page table."""
    B, columns = page_table.shape
    return pages[page_table].reshape(B, columns * pages.shape[1], *pages.shape[2:])


def attention_mask(
    first: Int[jax.Array, "*R"],
    until: Int[jax.Array, "*R"],
    window: Bool[jax.Array, "*R N"],
    position: Int[jax.Array, " positions"],
) -> Bool[jax.Array, "*R positions"]:
    """Returns the visibility of KV positions for each row: `[first, until)` and its tree window."""
    seen = (position >= first[..., None]) & (position < until[..., None])
    if window.shape[-1]:
        place = position - until[..., None]
        inside = (place >= 0) & (place < window.shape[-1])
        named = jnp.take_along_axis(window, jnp.where(inside, place, 0), axis=-1)
        seen |= inside & named
    return seen


BLOCK = 256  # positions that plain attention reads at once


def attend(
    q: Float[jax.Array, "R Hq D"],
    k_pages: Float[jax.Array, "P page Hk D"],
    v_pages: Float[jax.Array, "P page Hk D"],
    page_table: Int[jax.Array, "B table"],
    request: Int[jax.Array, " R"],
    row_starts: Int[jax.Array, " B1"],
    first: Int[jax.Array, " R"],
    until: Int[jax.Array, " R"],
    window: Bool[jax.Array, "R N"],
    max_rows: int,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[jax.Array, " Hq"] | None = None,
    k_offset: int = 0,
    v_offset: int = 0,
) -> Float[jax.Array, "R Hq D"]:
    """Computes softmax attention of each row; query head h reads KV head h // (Hq / Hk).

    A page table of more than `BLOCK` positions is read in blocks up to the last visible position,
    so one program serves rows of any length. Padding rows are undefined. The offsets are the first
    pages of the keys and of the values in a larger pool.
    """
    factor = q.shape[2] ** -0.5 if scale is None else scale
    grid, back = _grid(request, row_starts, max_rows)
    bounds, page_size = (first[grid], until[grid], window[grid]), k_pages.shape[1]
    columns = min(page_table.shape[1], max(1, BLOCK // page_size))
    num_blocks = -(-page_table.shape[1] // columns)
    table = jnp.pad(page_table, ((0, 0), (0, num_blocks * columns - page_table.shape[1])))

    def add(block: Int[jax.Array, ""] | int, so_far: _Partial) -> _Partial:
        pages = lax.dynamic_slice_in_dim(table, block * columns, columns, axis=1)
        position = (block * columns * page_size) + jnp.arange(columns * page_size)
        keys, values = read(k_pages, pages + k_offset), read(v_pages, pages + v_offset)
        seen = attention_mask(*bounds, position)
        return _with_block(so_far, q[grid], keys, values, seen, factor, softcap)

    nothing = _Partial.nothing(q[grid], k_pages.shape[2], sinks)
    if num_blocks == 1:
        summed = add(0, nothing)
    else:
        reach = (until + window.shape[1]).max()
        seen_blocks = jnp.minimum(-(-reach // (columns * page_size)), num_blocks)
        summed = lax.fori_loop(0, seen_blocks, add, nothing)
    return summed.attended().reshape(-1, *q.shape[1:])[back].astype(q.dtype)


def _grid(
    request: Int[jax.Array, " R"], row_starts: Int[jax.Array, " B1"], max_rows: int
) -> tuple[Int[jax.Array, "B M"], Int[jax.Array, " R"]]:
    """Returns the flat row at each index of a [request, row] grid, and the index of each row."""
    R = len(request)
    grid = jnp.minimum(row_starts[:-1, None] + jnp.arange(max_rows, dtype=jnp.int32), R - 1)
    place = jnp.arange(R, dtype=jnp.int32) - row_starts[request]
    return grid, request * max_rows + jnp.minimum(place, max_rows - 1)  # any, for padding


class _Partial(NamedTuple):
    """Online softmax accumulator: maximum, sum and weighted values over the positions so far.

    Attributes:
      sees_spoiled: Rows with a visible value that is not finite. 0 x NaN is NaN, so such values
        are zeroed before the GEMM, and only these rows are set to NaN afterwards.
    """

    highest: Float[jax.Array, "B Hk g M"]
    total: Float[jax.Array, "B Hk g M"]
    values: Float[jax.Array, "B Hk g M D"]
    sees_spoiled: Bool[jax.Array, "B M"]

    @classmethod
    def nothing(
        cls, q: Float[jax.Array, "B M Hq D"], Hk: int, sinks: Float[jax.Array, " Hq"] | None
    ) -> "_Partial":
        """Returns an accumulator of the sinks; its maximum is finite, so empty rows give 0."""
        B, M, Hq, D = q.shape
        zeros = jnp.zeros((B, Hk, Hq // Hk, M), jnp.float32)
        highest = zeros - 1e30 if sinks is None else zeros + sinks.reshape(Hk, -1, 1)
        total = zeros + (sinks is not None)
        return cls(highest, total, jnp.zeros((*zeros.shape, D)), jnp.zeros((B, M), bool))

    def attended(self) -> Float[jax.Array, "B M Hq D"]:
        """Returns the output of each row."""
        B, Hk, g, M, D = self.values.shape
        out = jnp.moveaxis(self.values / jnp.maximum(self.total, 1e-30)[..., None], 3, 1)
        out = out.reshape(B, M, Hk * g, D)
        return jnp.where(self.sees_spoiled[:, :, None, None], jnp.nan, out)


def _with_block(
    so_far: _Partial,
    q: Float[jax.Array, "B M Hq D"],
    k: Float[jax.Array, "B positions Hk D"],
    v: Float[jax.Array, "B positions Hk D"],
    seen: Bool[jax.Array, "B M positions"],
    scale: float,
    softcap: float | None,
) -> _Partial:
    (B, M, Hq, D), Hk = q.shape, k.shape[2]
    product = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    # One query head at a time: the reduction order of a CPU GEMM over a GQA group depends on the
    # number of heads, and so on the TP size.
    grouped = jnp.unstack(q.reshape(B, M, Hk, Hq // Hk, D), axis=3)
    scores = jnp.stack(
        [jnp.einsum("bmhd,bphd->bhmp", head, k, **product) for head in grouped], axis=2
    )
    scores = scores * jnp.float32(scale)
    scores = scores if softcap is None else layers.plain_softcap(scores, softcap)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    highest = jnp.maximum(so_far.highest, scores.max(axis=-1))
    weights, kept = jnp.exp(scores - highest[..., None]), jnp.exp(so_far.highest - highest)
    spoiled = ~jnp.isfinite(v).all(axis=(2, 3))  # [B, positions]
    v = jnp.where(spoiled[:, :, None, None], 0, v)
    shares = jnp.unstack(weights.astype(v.dtype), axis=2)
    out = jnp.stack([jnp.einsum("bhmp,bphd->bhmd", x, v, **product) for x in shares], axis=2)
    return _Partial(
        highest,
        so_far.total * kept + layers.summed(weights)[..., 0],
        so_far.values * kept[..., None] + out,
        so_far.sees_spoiled | (seen & spoiled[:, None]).any(axis=2),
    )


def plain_bidirectional_attention(
    qkv: Float[jax.Array, "R columns"],
    cos: Float[jax.Array, "R half"],
    sin: Float[jax.Array, "R half"],
    count: Int[jax.Array, " 1"],
) -> Float[jax.Array, "R hidden"]:
    """Computes bidirectional softmax attention over the valid rows; padding rows are undefined.

    Args:
      qkv: Unscaled queries, then keys, then values, with the same number of heads.
      cos, sin: RoPE cos and sin of the rows.
      count: Number of valid rows, which come first.
    """
    q, k, v = qkv.reshape(len(qkv), 3, -1, 2 * cos.shape[1]).swapaxes(0, 1)
    q, k = (layers.apply_rotary(each, cos, sin) for each in (q, k))
    seen = jnp.arange(len(k)) < count
    values, scale = jnp.where(seen[:, None, None], v, 0), q.shape[2] ** -0.5
    exact = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}

    def attended(queries: Float[jax.Array, "some H D"]) -> Float[jax.Array, "some H D"]:
        scores = jnp.einsum("qhd,khd->hqk", queries, k, **exact) * scale
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v.dtype)
        return jnp.einsum("hqk,khd->qhd", weights, values, **exact).astype(q.dtype)

    block = min(QUERIES, len(q))
    padded = jnp.pad(q, ((0, -len(q) % block), (0, 0), (0, 0)))
    out = lax.map(attended, padded.reshape(-1, block, *q.shape[1:]))
    return out.reshape(len(padded), -1)[: len(q)]


def kernel_bidirectional_attention(
    kernels: Kernels,
    qkv: Float[jax.Array, "R columns"],
    cos: Float[jax.Array, "R half"],
    sin: Float[jax.Array, "R half"],
    count: Int[jax.Array, " 1"],
) -> Float[jax.Array, "R hidden"]:
    size, tile = 2 * cos.shape[1], ATTENTION.tile
    tiles = kernels.tiles.encoder_attention.of(item_bytes=2, rows=len(qkv), head_size=size)
    attend = kernels.encoder_attention.bidirectional_attention
    return attend(qkv, cos, sin, count, tile=tile, scale=size**-0.5, tiles=tiles)


bidirectional_attention = kernel_or_reference(
    kernel_bidirectional_attention, plain_bidirectional_attention, is_bfloat16
)


def plain_compact_accepted_kv(
    pages: Float[jax.Array, "*pools P page H D"],
    page_table: Int[jax.Array, "B table"],
    lengths: Int[jax.Array, " B"],
    path: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
) -> Float[jax.Array, "*pools P page H D"]:
    """Compacts the KV of accepted paths to the front of the window, in any number of pools."""
    page_size = pages.shape[-3]
    steps = jnp.arange(path.shape[1])
    is_real = steps < counts[:, None]
    source, target = (lengths[:, None] + jnp.where(is_real, x, 0) for x in (path, steps))
    page, to_page = (jnp.take_along_axis(page_table, x // page_size, 1) for x in (source, target))
    moved = pages[..., page, source % page_size, :, :]
    return pages.at[..., to_page, target % page_size, :, :].set(moved)


def kernel_compact_accepted_kv(
    kernels: Kernels,
    pages: Float[jax.Array, "*pools P page H D"],
    page_table: Int[jax.Array, "B table"],
    lengths: Int[jax.Array, " B"],
    path: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
) -> Float[jax.Array, "*pools P page H D"]:
    """Same as `plain_compact_accepted_kv`; without a kernel XLA would copy all pools to scatter."""
    return kernels.kv_compaction.commit(pages, page_table, lengths, path, counts)


compact_accepted_kv = kernel_or_reference(kernel_compact_accepted_kv, plain_compact_accepted_kv)
