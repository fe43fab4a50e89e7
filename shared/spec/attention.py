"""Paged attention: KV writes, visibility of positions (causal, tree and sliding window), and
compaction of accepted KV.

KV position p of a request is stored in page `page_table[p // page_size]` at offset `p % page_size`.
Page 0 is reserved: padding rows are written there and nothing reads it. A row attends to positions
`[first, until)`, and to the positions of the window `[until, until + N)` that its tree mask
selects. A prefill row ends at itself and has no window. A tree node attends to the committed prefix
and to its ancestors in the window.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from shared.spec import draft_tree, layers

WindowPageTables = Mapping[int, Int[np.ndarray, "B table"]]
"""Page tables of layers with a pool of their own, by sliding window."""


@dataclass(frozen=True)
class AttentionRows:
    """Positions and visibility of the rows of a forward pass.

    Attributes:
      request: Request of each row.
      positions: Rotary positions.
      places: KV position that each row is written to.
      first, until, window: Visible positions, see `attention_mask`.
      is_real: False for padding.
      page_table: Pages of each request.
      mrope_positions: M-RoPE positions (time, row, column) of a vision-language model; None if all
        three equal the position.
      window_page_tables: Pages of each request in the pools of sliding-window layers; such layers
        use `page_table` if it has none for their window.
    """

    request: Int[np.ndarray, " R"]
    positions: Int[np.ndarray, " R"]
    places: Int[np.ndarray, " R"]
    first: Int[np.ndarray, " R"]
    until: Int[np.ndarray, " R"]
    window: Bool[np.ndarray, "R N"]
    is_real: Bool[np.ndarray, " R"]
    page_table: Int[np.ndarray, "B table"]
    mrope_positions: Int[np.ndarray, "R 3"] | None = field(default=None, kw_only=True)
    window_page_tables: WindowPageTables = field(default_factory=dict, kw_only=True)


def causal_rows(
    row_starts: Int[np.ndarray, " B1"],
    first_positions: Int[np.ndarray, " B"],
    draft_from: Int[np.ndarray, " B"],
    page_table: Int[np.ndarray, "B table"],
    tokens: int,
) -> AttentionRows:
    """Returns consecutive rows of each request, with causal attention.

    Args:
      row_starts: First flat row of each request, and the end; later rows are padding.
      first_positions: Position of each request's first row.
      draft_from: First visible position; 0 except for a drafter.
      page_table: Pages of each request.
      tokens: Number of flat rows.
    """
    row = np.arange(tokens)
    is_real = row < row_starts[-1]
    request = np.where(is_real, np.searchsorted(row_starts[1:], row, side="right"), 0)
    positions = np.where(is_real, first_positions[request] + row - row_starts[request], 0)
    until = np.where(is_real, positions + 1, 0)
    window = np.zeros((tokens, 0), bool)
    first = draft_from[request]
    return AttentionRows(request, positions, positions, first, until, window, is_real, page_table)


def tree_rows(
    parents: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    lengths: Int[np.ndarray, " B"],
    page_table: Int[np.ndarray, "B table"],
    rows: int,
) -> tuple[AttentionRows, Int[np.ndarray, " R"]]:
    """Returns the flat verify rows of a batch of trees (tree attention), and the node of each row.

    A node has position `lengths + depth`, is written at `lengths + node`, and attends to the
    committed positions and its ancestors.
    """
    _, request, node, is_real = draft_tree.flatten(num_nodes, rows)
    depth = draft_tree.depths(parents)[request, node]
    length = lengths[request]
    until = np.where(is_real, length, 0)
    window = draft_tree.ancestors(parents)[request, node] & is_real[:, None]
    first = np.zeros(rows, np.int64)
    places = length + node
    return AttentionRows(
        request, length + depth, places, first, until, window, is_real, page_table
    ), node


def with_mrope(rows: AttentionRows, delta: Int[np.ndarray, " B"]) -> AttentionRows:
    """Adds M-RoPE positions to text rows.

    Args:
      rows: Rows of text.
      delta: M-RoPE position delta of each request: rotary minus sequence position of its text.
    """
    position = rows.positions + delta[rows.request]
    return replace(rows, mrope_positions=np.stack([position] * 3, axis=1))


def sliding_bounds(
    first: Int[np.ndarray, " R"],
    until: Int[np.ndarray, " R"],
    window: Bool[np.ndarray, "R N"],
    size: int,
) -> tuple[Int[np.ndarray, " R"], Bool[np.ndarray, "R N"]]:
    """Returns `first` and `window` limited to the last `size` visible positions (sliding window).

    They are counted along the row's sequence: committed positions, then its ancestors and itself.
    The tree may be deeper than the window: then `first` is beyond `until`.
    """
    from_here = np.cumsum(window[:, ::-1], axis=1)[:, ::-1]  # visible nodes from each one on
    slid = np.maximum(first, until + window.sum(axis=1, dtype=until.dtype) - size)
    return slid, window & (from_here <= size)


def with_sliding_window(rows: AttentionRows, size: int | None) -> AttentionRows:
    """Returns the rows with the visibility and the pages of a sliding-window layer; unchanged if
    `size` is None.
    """
    if size is None:
        return rows
    first, window = sliding_bounds(rows.first, rows.until, rows.window, size)
    table = rows.window_page_tables.get(size, rows.page_table)
    return replace(rows, first=first, window=window, page_table=table)


def write(
    pages: Float[np.ndarray, "P page H D"],
    page_table: Int[np.ndarray, "B table"],
    request: Int[np.ndarray, " R"],
    places: Int[np.ndarray, " R"],
    is_real: Bool[np.ndarray, " R"],
    rows: Float[np.ndarray, "R H D"],
) -> Float[np.ndarray, "P page H D"]:
    """Writes one row of keys (or values) per token at its KV position.

    Args:
      pages: Pool of one layer.
      page_table: Pages of each request.
      request: Request of each row.
      places: KV position of each row, within the page table.
      is_real: False for padding, which is written to page 0.
      rows: Keys or values.

    Returns:
      The pool after the writes.
    """
    page_size = pages.shape[1]
    page = np.where(is_real, page_table[request, np.where(is_real, places // page_size, 0)], 0)
    pages = pages.copy()
    pages[page, places % page_size] = rows
    return pages


def read(
    pages: Float[np.ndarray, "P page H D"],
    page_table: Int[np.ndarray, "B table"],
    num_positions: int,
) -> Float[np.ndarray, "B positions H D"]:
    """Returns the first `num_positions` KV positions of each request."""
    position = np.arange(num_positions)
    page_size = pages.shape[1]
    return pages[page_table[:, position // page_size], position % page_size]


def attention_mask(
    first: Int[np.ndarray, " R"],
    until: Int[np.ndarray, " R"],
    window: Bool[np.ndarray, "R N"],
    num_positions: int,
) -> Bool[np.ndarray, "R positions"]:
    """Returns the attention mask of each row: `[first, until)` and its part of the window after
    it.
    """
    position = np.arange(num_positions)
    visible = (position >= first[:, None]) & (position < until[:, None])
    if window.shape[1]:
        place = position - until[:, None]
        inside = (place >= 0) & (place < window.shape[1])
        named = np.take_along_axis(window, np.where(inside, place, 0), axis=1)
        visible |= inside & named
    return visible


def attend(
    q: Float[np.ndarray, "R Hq D"],
    k_pages: Float[np.ndarray, "P page Hk D"],
    v_pages: Float[np.ndarray, "P page Hk D"],
    page_table: Int[np.ndarray, "B table"],
    request: Int[np.ndarray, " R"],
    first: Int[np.ndarray, " R"],
    until: Int[np.ndarray, " R"],
    window: Bool[np.ndarray, "R N"],
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[np.ndarray, " Hq"] | None = None,
) -> Float[np.ndarray, "R Hq D"]:
    """Computes softmax attention (GQA) of each row; query head h uses KV head h // (Hq / Hk).

    Invisible positions are replaced by 0 before the product with the values, so that NaN in them
    has no effect. A row without visible positions (padding) returns 0.

    Args:
      q: Queries after the rotation, not scaled.
      k_pages, v_pages: Pools of one layer, which contain the rows' own keys and values already.
      page_table: Pages of each request.
      request: Request of each row.
      first, until, window: Visible positions, see `attention_mask`.
      scale: Multiplier of the scores; None for D ** -0.5.
      softcap: Soft cap of the scaled scores: softcap * tanh(score / softcap); None for none.
      sinks: Logit of each query head that is part of each row's softmax, once, and has no value, so
        that the weights of a row add up to less than 1; None for none.

    Source of sinks: gpt-oss model card, arXiv:2508.10925.
    """
    R, Hq, D = q.shape
    Hk = k_pages.shape[2]
    num_positions = min(
        int(until.max(initial=0)) + window.shape[1], page_table.shape[1] * k_pages.shape[1]
    )
    visible = attention_mask(first, until, window, num_positions)[:, :, None, None]
    k = np.where(visible, read(k_pages, page_table, num_positions)[request], 0)
    v = np.where(visible, read(v_pages, page_table, num_positions)[request], 0)
    grouped = q.reshape(R, Hk, Hq // Hk, D)
    scores = np.einsum("rhgd,rphd->rhgp", grouped, k, optimize=True)
    scores = scores * np.float32(D**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = layers.softcap(scores, softcap)
    scores = np.where(visible[:, None, None, :, 0, 0], scores, -np.inf)
    highest = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), np.float32(-1e30))
    if sinks is not None:
        of_heads = sinks.reshape(Hk, -1, 1)
        highest = np.maximum(highest, of_heads)
    weights = np.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(of_heads - highest)
    total = np.maximum(total, np.float32(1e-30))
    return np.einsum("rhgp,rphd->rhgd", weights / total, v, optimize=True).reshape(R, Hq, D)


QUERIES = 256
"""Rows of an image whose attention scores are in memory at once."""


def bidirectional_attention(
    qkv: Float[np.ndarray, "R columns"],
    cos: Float[np.ndarray, "R half"],
    sin: Float[np.ndarray, "R half"],
    count: Int[np.ndarray, " 1"],
) -> Float[np.ndarray, "R hidden"]:
    """Computes bidirectional attention between the patches of an image, as in a ViT.

    Args:
      qkv: Unscaled queries of all heads, then keys, then values.
      cos, sin: Rotary cos and sin of each row, over half of a head.
      count: Number of real rows. Later rows are padding: they are not visible, and their output is
        undefined.
    """
    q, k, v = qkv.reshape(len(qkv), 3, -1, 2 * cos.shape[1]).transpose(1, 0, 2, 3)
    q, k = (layers.apply_rotary(each, cos, sin) for each in (q, k))
    is_real = np.arange(len(k)) < count
    scores = np.einsum("qhd,khd->hqk", q, k, optimize=True) * np.float32(q.shape[2] ** -0.5)
    scores = np.where(is_real, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    values = np.where(is_real[:, None, None], v, 0)
    return np.einsum("hqk,khd->qhd", weights, values, optimize=True).reshape(len(qkv), -1)


def compact_accepted_kv(
    pages: Float[np.ndarray, "*pools P page H D"],
    page_table: Int[np.ndarray, "B table"],
    lengths: Int[np.ndarray, " B"],
    path: Int[np.ndarray, "B W"],
    counts: Int[np.ndarray, " B"],
) -> Float[np.ndarray, "*pools P page H D"]:
    """Compacts accepted KV: moves the rows of the accepted path to the front of the window.

    The rows of a chain stay in place. All rows are read before any is written, because source and
    target rows overlap.

    Args:
      pages: Any number of pools.
      page_table: Pages of each request.
      lengths: Committed positions of each request, where the window begins.
      path: Window indices of the path's nodes, the root (0) first.
      counts: Number of committed nodes.

    Returns:
      The pools after the move.
    """
    page_size = pages.shape[-3]
    steps = np.arange(path.shape[1])
    is_real = steps < counts[:, None]
    source, target = (lengths[:, None] + np.where(is_real, x, 0) for x in (path, steps))
    page, to_page = (np.take_along_axis(page_table, x // page_size, 1) for x in (source, target))
    moved = pages[..., page, source % page_size, :, :]
    pages = pages.copy()
    pages[..., to_page, target % page_size, :, :] = moved
    return pages
