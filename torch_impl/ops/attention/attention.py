"""Attention over paged KV; same results as `shared.spec.attention`. Pools are written in place.

On a GPU `flatten_tree` and `compact_accepted_kv` are kernels; see `torch_impl.ops`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shared.spec.attention import QUERIES
from shared.spec.gated_delta import CHUNK
from shared.spec.reduction_order import ATTENTION
from torch_impl.ops import Kernels, clamp_rows, is_bfloat16, kernel_or_reference
from torch_impl.ops.gemm import layers
from torch_impl.ops.trees import draft_tree

KV = Float[Tensor, "L arrays pages page H D"]
Pools = tuple[KV, ...]
"""KV pools of a model or drafter, in the order of `ModelConfig.kv_pools`."""
WindowPageTables = Mapping[int, Int[Tensor, "B table"]]
"""Page tables of layers with a pool of their own, by sliding window."""


@dataclass(frozen=True)
class AttentionRows:
    """Same as the class of this name in the specification, with at most `max_rows` per request.

    Request b has the rows from `row_starts[b]` to `row_starts[b + 1]`. Later rows are padding and
    belong to request 0.
    """

    request: Int[Tensor, " R"]
    positions: Int[Tensor, " R"]
    places: Int[Tensor, " R"]
    first: Int[Tensor, " R"]
    until: Int[Tensor, " R"]
    window: Bool[Tensor, "R N"]
    is_real: Bool[Tensor, " R"]
    page_table: Int[Tensor, "B table"]
    row_starts: Int[Tensor, " B1"]
    max_rows: int
    mrope_positions: Int[Tensor, "R 3"] | None = None
    window_page_tables: WindowPageTables = field(default_factory=dict)


def causal_rows(
    row_starts: Int[Tensor, " B1"],
    first_positions: Int[Tensor, " B"],
    draft_from: Int[Tensor, " B"],
    page_table: Int[Tensor, "B table"],
    tokens: int,
) -> AttentionRows:
    """Returns rows at consecutive positions of each request, with causal visibility.

    On a CPU, rows past the last chunk are omitted.
    """
    tokens = clamp_rows(row_starts[-1], tokens, CHUNK)
    request, is_real = draft_tree.request_of(row_starts, tokens)
    row = torch.arange(tokens, dtype=torch.int32, device=row_starts.device)
    positions = torch.where(is_real, first_positions[request] + row - row_starts[request], 0)
    return AttentionRows(
        request=request,
        positions=positions,
        places=positions,
        first=draft_from[request],
        until=torch.where(is_real, positions + 1, 0),
        window=is_real.new_zeros(tokens, 0),
        is_real=is_real,
        page_table=page_table,
        row_starts=row_starts,
        max_rows=clamp_rows((row_starts[1:] - row_starts[:-1]).max(), tokens, 1),
    )


@dataclass(frozen=True)
class FlatNodes:
    """Flat rows of the nodes of draft trees: fields of `AttentionRows`, and the node of each
    row.
    """

    row_starts: Int[Tensor, " B1"]
    request: Int[Tensor, " R"]
    node: Int[Tensor, " R"]
    is_real: Bool[Tensor, " R"]
    positions: Int[Tensor, " R"]
    places: Int[Tensor, " R"]
    until: Int[Tensor, " R"]
    window: Bool[Tensor, "R seen"]


def plain_flat_nodes(
    parents: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    rows: int,
    is_chain: bool,
) -> FlatNodes:
    """Builds the flat rows of draft trees; `parents` is not read for chains."""
    row_starts, request, node, is_real = draft_tree.flatten(num_nodes, rows)
    length = lengths[request]
    places = length + node.int()
    if is_chain:
        positions, until, window = places, places + 1, is_real.new_zeros(rows, 0)
    else:
        positions, until = length + draft_tree.depths(parents)[request, node], length
        window = draft_tree.ancestors(parents)[request, node] & is_real[:, None]
    return FlatNodes(
        row_starts=row_starts,
        request=request,
        node=node,
        is_real=is_real,
        positions=positions,
        places=places,
        until=torch.where(is_real, until, 0),
        window=window,
    )


def kernel_flat_nodes(
    kernels: Kernels,
    parents: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    rows: int,
    is_chain: bool,
) -> FlatNodes:
    return FlatNodes(*kernels.flatten_tree.flat_nodes(parents, num_nodes, lengths, rows, is_chain))


flat_nodes = kernel_or_reference(kernel_flat_nodes, plain_flat_nodes)


def tree_rows(
    parents: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    page_table: Int[Tensor, "B table"],
    rows: int,
    is_chain: bool,
) -> tuple[AttentionRows, Int[Tensor, " R"]]:
    flat = flat_nodes(parents, num_nodes, lengths, rows, is_chain)
    flat_rows = AttentionRows(
        request=flat.request,
        positions=flat.positions,
        places=flat.places,
        first=torch.zeros_like(flat.places),
        until=flat.until,
        window=flat.window,
        is_real=flat.is_real,
        page_table=page_table,
        row_starts=flat.row_starts,
        max_rows=parents.shape[1],
    )
    return flat_rows, flat.node


def with_mrope(rows: AttentionRows, delta: Int[Tensor, " B"]) -> AttentionRows:
    """Adds M-RoPE positions to text rows that may follow images.

    Args:
      delta: M-RoPE position delta of each request.
    """
    position = rows.positions + delta[rows.request]
    return replace(rows, mrope_positions=torch.stack([position] * 3, dim=1))


def sliding_bounds(
    first: Int[Tensor, " R"], until: Int[Tensor, " R"], window: Bool[Tensor, "R N"], size: int
) -> tuple[Int[Tensor, " R"], Bool[Tensor, "R N"]]:
    slid = torch.maximum(first, until + window.sum(1, dtype=torch.int32) - size)
    if window.shape[1] > size:  # a tree may be deeper than the window
        window = window & (window.int().flip(1).cumsum(1, dtype=torch.int32).flip(1) <= size)
    return slid, window


def with_sliding_window(rows: AttentionRows, size: int | None) -> AttentionRows:
    if size is None:
        return rows
    first, window = sliding_bounds(rows.first, rows.until, rows.window, size)
    table = rows.window_page_tables.get(size, rows.page_table)
    return replace(rows, first=first, window=window, page_table=table)


def write(
    pages: Float[Tensor, "P page H D"],
    page_table: Int[Tensor, "B table"],
    request: Int[Tensor, " R"],
    places: Int[Tensor, " R"],
    is_real: Bool[Tensor, " R"],
    rows: Float[Tensor, "R H D"],
) -> Float[Tensor, "P page H D"]:
    """Same as the specification, in place."""
    places = torch.where(is_real, places, 0)
    page, place = _page_of(page_table, request, places, pages.shape[1])
    pages[torch.where(is_real, page, 0), place] = rows
    return pages


def _page_of(
    page_table: Int[Tensor, "B table"],
    request: Int[Tensor, "..."],
    places: Int[Tensor, "..."],
    page_size: int,
) -> tuple[Int[Tensor, "..."], Int[Tensor, "..."]]:
    """Returns the page of a KV position, and the offset in the page."""
    number = torch.div(places, page_size, rounding_mode="floor")
    return page_table[request, number], places - number * page_size


def attention_mask(
    first: Int[Tensor, "*rows"],
    until: Int[Tensor, "*rows"],
    window: Bool[Tensor, "*rows N"],
    position: Int[Tensor, " positions"],
) -> Bool[Tensor, "*rows positions"]:
    """Returns the visibility of KV positions for each row: `[first, until)` and its tree window."""
    seen = (position >= first[..., None]) & (position < until[..., None])
    if window.shape[-1]:
        place = position - until[..., None]
        inside = (place >= 0) & (place < window.shape[-1])
        named = window.gather(-1, torch.where(inside, place, 0).long())
        seen |= inside & named
    return seen


def attend(
    q: Float[Tensor, "R Hq D"],
    k_pages: Float[Tensor, "P page Hk D"],
    v_pages: Float[Tensor, "P page Hk D"],
    page_table: Int[Tensor, "B table"],
    request: Int[Tensor, " R"],
    row_starts: Int[Tensor, " B1"],
    first: Int[Tensor, " R"],
    until: Int[Tensor, " R"],
    window: Bool[Tensor, "R N"],
    max_rows: int,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " Hq"] | None = None,
) -> Float[Tensor, "R Hq D"]:
    """Same as the specification, but padding rows are undefined.

    Args:
      q, k_pages, v_pages, page_table, request, first, until, window, scale, softcap, sinks: As in
        the specification.
      row_starts, max_rows: See `AttentionRows`.
    """
    grid, back = _grid(request, row_starts, max_rows)
    page_size = k_pages.shape[1]
    num_pages = clamp_rows(
        torch.div(until.max() + window.shape[1] + page_size - 1, page_size, rounding_mode="floor"),
        page_table.shape[1],
        1,
    )
    page_table, num_positions = page_table[:, :num_pages], num_pages * page_size
    position = torch.arange(num_positions, dtype=torch.int32, device=first.device)
    seen = attention_mask(first[grid], until[grid], window[grid], position)
    # [B, positions, Hk, D]
    k, v = (pages[page_table].flatten(1, 2) for pages in (k_pages, v_pages))
    factor = q.shape[2] ** -0.5 if scale is None else scale
    return _softmax_attention(q[grid], k, v, seen, factor, softcap, sinks).flatten(0, 1)[back]


def _grid(
    request: Int[Tensor, " R"], row_starts: Int[Tensor, " B1"], max_rows: int
) -> tuple[Int[Tensor, "B M"], Int[Tensor, " R"]]:
    """Returns the flat row at each index of a [request, row] grid, and the index of each row."""
    R = len(request)
    row, column = (
        torch.arange(size, dtype=torch.int32, device=request.device) for size in (R, max_rows)
    )
    grid = (row_starts[:-1, None] + column).clamp(max=R - 1)
    place = (row - row_starts[request]).clamp(max=max_rows - 1)  # any, for padding
    return grid, request * max_rows + place


def _softmax_attention(
    q: Float[Tensor, "B M Hq D"],
    k: Float[Tensor, "B positions Hk D"],
    v: Float[Tensor, "B positions Hk D"],
    seen: Bool[Tensor, "B M positions"],
    scale: float,
    softcap: float | None,
    sinks: Float[Tensor, " Hq"] | None,
) -> Float[Tensor, "B M Hq D"]:
    # One query head at a time, with one layout for any number of heads: the reduction order of a
    # CPU GEMM over a GQA group depends on the number of heads, and so on the TP size.
    heads = q.unflatten(2, (k.shape[2], -1)).permute(3, 0, 2, 1, 4).float()  # [G, B, Hk, M, D]
    keys, heads = k.float().permute(0, 2, 3, 1).contiguous(), heads.contiguous()
    scores = torch.stack([head @ keys for head in heads], dim=2) * scale  # [B, Hk, G, M, positions]
    if softcap is not None:
        scores = layers.plain_softcap(scores, softcap)
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    highest, own = scores.amax(dim=-1, keepdim=True).clamp(min=-1e30), None
    if sinks is not None:
        own = sinks.view(k.shape[2], -1).t()[..., None, None].transpose(0, 1)  # [Hk, G, 1, 1]
        highest = torch.maximum(highest, own)
    weights = torch.exp(scores - highest)
    total = layers.summed(weights)
    if own is not None:
        total = total + torch.exp(own - highest)
    weights = weights / total.clamp(min=1e-30)
    # 0 x NaN is NaN: values that are not finite are zeroed; rows to which they are visible get NaN.
    spoiled = ~v.isfinite().flatten(2).all(dim=2)  # [B, positions]
    v = v.masked_fill(spoiled[:, :, None, None], 0)
    values, weights = v.permute(0, 2, 1, 3).contiguous(), weights.to(v.dtype)
    shares = [weights[:, :, i].contiguous() @ values for i in range(weights.shape[2])]
    out = torch.stack(shares, dim=2)
    out = out.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out.masked_fill((seen & spoiled[:, None]).any(dim=2)[:, :, None, None], torch.nan)


def plain_bidirectional_attention(
    qkv: Float[Tensor, "R columns"],
    cos: Float[Tensor, "R half"],
    sin: Float[Tensor, "R half"],
    count: Int[Tensor, " 1"],
) -> Float[Tensor, "R hidden"]:
    """Computes bidirectional softmax attention over the valid rows; padding rows are undefined."""
    q, k, v = qkv.reshape(len(qkv), 3, -1, 2 * cos.shape[1]).unbind(1)
    q, k = (layers.apply_rotary(each, cos, sin) for each in (q, k))
    seen, scale = torch.arange(len(k), device=k.device) < count, q.shape[2] ** -0.5
    keys = k.permute(1, 2, 0).float()  # [H, D, R]
    values = v.masked_fill(~seen[:, None, None], 0).transpose(0, 1)  # [H, R, D]

    def attended(queries: Float[Tensor, "some H D"]) -> Float[Tensor, "some H D"]:
        scores = queries.transpose(0, 1).float() @ keys * scale  # [H, some, R]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1).to(v.dtype)
        return (weights @ values).transpose(0, 1)

    return torch.cat([attended(queries) for queries in q.split(QUERIES)]).flatten(1)


def kernel_bidirectional_attention(
    kernels: Kernels,
    qkv: Float[Tensor, "R columns"],
    cos: Float[Tensor, "R half"],
    sin: Float[Tensor, "R half"],
    count: Int[Tensor, " 1"],
) -> Float[Tensor, "R hidden"]:
    size, tile = 2 * cos.shape[1], ATTENTION.tile
    tiles = kernels.tiles.encoder_attention.of(item_bytes=2, rows=len(qkv), head_size=size)
    attend = kernels.encoder_attention.bidirectional_attention
    return attend(qkv, cos, sin, count, tile=tile, scale=size**-0.5, tiles=tiles)


bidirectional_attention = kernel_or_reference(
    kernel_bidirectional_attention, plain_bidirectional_attention, is_bfloat16
)


def plain_compact_accepted_kv(
    pages: Float[Tensor, "*pools P page H D"],
    page_table: Int[Tensor, "B table"],
    lengths: Int[Tensor, " B"],
    path: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
) -> Float[Tensor, "*pools P page H D"]:
    """Same as the specification, in place."""
    B, W = path.shape
    place = torch.arange(W, dtype=torch.int32, device=path.device)
    request = torch.arange(B, device=path.device)[:, None]
    is_real = place < counts[:, None]
    source, target = (lengths[:, None] + torch.where(is_real, x, 0) for x in (path, place))
    page, at = _page_of(page_table, request, source, pages.shape[-3])
    to_page, to = _page_of(page_table, request, target, pages.shape[-3])
    pools = pages.view(-1, *pages.shape[-4:])
    pools[:, to_page, to] = pools[:, page, at]
    return pages


def kernel_compact_accepted_kv(
    kernels: Kernels,
    pages: Float[Tensor, "*pools P page H D"],
    page_table: Int[Tensor, "B table"],
    lengths: Int[Tensor, " B"],
    path: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
) -> Float[Tensor, "*pools P page H D"]:
    kernels.kv_compaction.commit(pages, page_table, lengths, path, counts)
    return pages


compact_accepted_kv = kernel_or_reference(kernel_compact_accepted_kv, plain_compact_accepted_kv)
