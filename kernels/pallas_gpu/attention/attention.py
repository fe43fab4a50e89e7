"""Paged attention of flat rows with online softmax over GQA groups (Pallas, Triton backend).

A program processes one block of rows of one request and one KV head. Tiles, splits and spans begin
at fixed positions, so the reduction order of a row depends on its position alone: results are
batch-invariant and independent of the number of rows of the request. `kernels/__init__.py` lists
what must equal the Triton twin.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int

from kernels.pallas_gpu.attention.attention_layer_sm90 import takes
from kernels.pallas_gpu.attention.attention_sm90 import attention_sm90
from kernels.pallas_gpu.attention.head_dim_padding import (
    columns_of,
    in_head,
    is_in_head,
    load_head,
    load_kept,
    outside,
)
from kernels.pallas_gpu.attention.online_softmax import (
    LOG2_E,
    NEGATIVE,
    SinkRefs,
    SoftmaxState,
    fold,
    with_sink,
)
from kernels.pallas_gpu.attention.qk_norm_rope_kv_write import early
from kernels.pallas_gpu.attention.row_bounds import window_operand
from kernels.pallas_gpu.gemm.activation import soft_capped
from kernels.tiles import AttentionTiles

CAPPED_LANES = 16
"""Lanes of a program with a soft cap: its powers need registers, too."""


def attend(
    q: Float[jax.Array, "R Hq D"],
    gate: Float[jax.Array, "R outputs"] | None,
    kv: Float[jax.Array, "L 2 P page Hk D"],
    layer: Int[jax.Array, " 1"],
    page_table: Int[jax.Array, "B table"],
    row_starts: Int[jax.Array, " B1"],
    first: Int[jax.Array, " R"],
    until: Int[jax.Array, " R"],
    window: Bool[jax.Array, "R N"],
    sinks: Float[jax.Array, "L2 Hq"] | None = None,
    sink_layer: Int[jax.Array, " 1"] | None = None,
    *,
    max_rows: int,
    span: int,
    split: int,
    tile: int,
    scale: float,
    softcap: float | None = None,
    tiles: AttentionTiles,
    interpret: bool = False,
) -> Float[jax.Array, "R outputs_of_heads"]:
    """Same as `shared.spec.attention.attend`, for flat rows grouped by request.

    A program processes a block of rows over the whole context, so no partial results are stored.

    Args:
      q: Queries; D is one of `kernels.kernel_limits.HEAD_SIZES`.
      gate: QKV projection, in which each query head is followed by its gate; None without gates.
      kv, layer: KV pools of all layers, and the index of the layer to read.
      page_table, first, until, window, softcap: See the specification.
      row_starts: First flat row of each request, and the end; later rows are padding.
      sinks, sink_layer: Stacked sinks of query heads, and the index of the layer; None without.
      max_rows: Maximum rows of a request.
      span, split, tile: Positions of each; they fix the reduction order.
      scale: Multiplier of the scores.
      tiles: Tile config.
      interpret: Run on a CPU.
    """
    # Mosaic GPU's interpreter does not support inline PTX.
    is_wide = tiles.described and softcap is None and not window.shape[1] and not interpret
    if is_wide and takes(q.shape[1], kv, tile):
        rows = (page_table, row_starts, first, until)
        sums = {"max_rows": max_rows, "span": span, "split": split, "scale": scale}
        return attention_sm90(q, gate, kv, layer, *rows, sinks, sink_layer, **sums, tiles=tiles)
    R, Hq, D = q.shape
    Hk, B = kv.shape[4], len(page_table)
    lanes, unroll = tiles.lanes, tiles.unroll
    if softcap is not None:
        lanes, unroll = CAPPED_LANES, 1
    blocks = pl.cdiv(max_rows * (Hq // Hk), lanes)
    return pl.pallas_call(
        functools.partial(
            _attend_kernel,
            gated=gate is not None,
            blocks=blocks,
            lanes=lanes,
            unroll=unroll,
            order=Order(span, split, tile, tiles.ones, window.shape[1], scale, softcap),
            interpret=interpret,
        ),
        grid=(Hk, blocks, B),
        out_shape=jax.ShapeDtypeStruct((R, Hq * D), q.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="prefill_attention",
    )(
        *(q, q if gate is None else gate, kv, layer, page_table, row_starts, first, until),
        window_operand(window),
        None if sinks is None else SinkRefs(sinks, sink_layer),
    )


class Order(NamedTuple):
    """Compile-time settings of the reduction.

    Attributes:
      span, split, tile: Positions of each.
      ones: Columns of 1 in the product that sums the weights.
      nodes: Width of the tree window.
      scale: Multiplier of the scores.
      softcap: Soft cap of the scores; None for none.
    """

    span: int
    split: int
    tile: int
    ones: int
    nodes: int
    scale: float
    softcap: float | None


class VisibleRange(NamedTuple):
    """KV positions that the lanes of a program attend to.

    Attributes:
      kv_ref, table_ref, window_ref: KV pools, page tables and tree masks.
      layer, request, head: Indices of the layer, the request and the KV head.
      row: Flat row of each lane.
      first, until: Visible positions of each lane before the window.
    """

    kv_ref: object
    table_ref: object
    window_ref: object
    layer: jax.Array
    request: jax.Array
    head: jax.Array
    row: jax.Array
    first: jax.Array
    until: jax.Array


def _attend_kernel(
    q_ref,
    gate_ref,
    kv_ref,
    layer_ref,
    table_ref,
    starts_ref,
    first_ref,
    until_ref,
    window_ref,
    sinks,
    out_ref,
    *,
    gated,
    blocks,
    lanes,
    unroll,
    order,
    interpret,
):
    """One program per KV head, block of rows and request."""
    head, block, request = (pl.program_id(axis) for axis in range(3))
    # The last rows attend to most positions: their programs, the longest, start first for all
    # heads.
    block = blocks - 1 - block
    group = q_ref.shape[1] // kv_ref.shape[4]
    index = request * blocks + block
    clear_padding(starts_ref, out_ref, head, index, group, q_ref.shape[2], blocks)
    start, stop = starts_ref[request], starts_ref[request + 1]

    @pl.when(start + lax.div(block * lanes, group) < stop)
    def _():
        lane = early(block * lanes + lax.iota(jnp.int32, lanes), interpret)
        row, q_head = start + lax.div(lane, group), head * group + lax.rem(lane, group)
        lane_row = jnp.minimum(row, stop - 1)  # spare lanes repeat the last row and are not written
        first, until = pltriton.load(first_ref.at[lane_row]), pltriton.load(until_ref.at[lane_row])
        capacity = table_ref.shape[1] * kv_ref.shape[3]
        low = jnp.min(jnp.minimum(first, until))
        high = jnp.minimum(jnp.max(until) + order.nodes, capacity)
        D = q_ref.shape[2]
        q = load_head(q_ref.at[lane_row[:, None], q_head[:, None], columns_of(D)[None, :]], D)
        seen = VisibleRange(
            kv_ref=kv_ref,
            table_ref=table_ref,
            window_ref=window_ref,
            layer=layer_ref[0],
            request=request,
            head=head,
            row=lane_row,
            first=first,
            until=until,
        )
        sums = with_sink(_sum_positions(q, seen, low, high, order, unroll), sinks, q_head)
        finish(sums, gate_ref if gated else None, out_ref, row, q_head, row < stop, D)


def clear_padding(starts_ref, out_ref, head, index, group, D, programs):
    """Writes zeros to a KV head's outputs in the padding rows, which are strided over programs."""
    R, requests = out_ref.shape[0], starts_ref.shape[0] - 1
    begin, stride = starts_ref[requests] + index, requests * programs
    column = outside(columns_of(D), D, out_ref.shape[1])
    zeros = jnp.zeros(column.shape, out_ref.dtype)

    def clear(number, _):
        for member in range(group):
            columns = (head * group + member) * D + column
            at = out_ref.at[begin + number * stride, columns]
            pltriton.store(at, zeros, mask=is_in_head(D))

    lax.fori_loop(0, pl.cdiv(jnp.maximum(R - begin, 0), stride), clear, None)


def _sum_positions(q, seen, low, high, order, unroll):
    """Accumulates positions [low, high): tiles into splits, splits into spans, spans in total.

    Args:
      q: Queries of the program's lanes, [lanes, D].
      seen: KV positions that the lanes attend to.
      low, high: First position, and the end.
      order: Reduction settings.
      unroll: Tiles per loop step.
    """
    tile, (lanes, D), tiles = order.tile, q.shape, order.split // order.tile
    unroll = min(unroll, tiles)
    begin = lax.div(low, tile)
    end = jnp.where(low < high, pl.cdiv(high, tile), begin)
    # Splits that are fully visible to all rows need no mask.
    whole = jnp.clip(pl.cdiv(jnp.max(seen.first), order.split) * tiles, begin, end)
    partly = jnp.clip(lax.div(jnp.min(seen.until), order.split) * tiles, whole, end)

    def whole_step(i, carry):
        number, split_sums, sums = carry
        for j in range(unroll):
            position, pages, number = pages_of(seen, number, i * unroll + j, tile)
            split_sums = add_whole(q, seen, position, pages, split_sums, order)
        if unroll == tiles:
            return number, SoftmaxState.nothing(lanes, D, order.ones), _fold_split(sums, split_sums)
        ends_split = lax.rem((i + 1) * unroll, tiles) == 0
        return number, *_fold_where(ends_split, split_sums, sums)

    def of_span(number, sums):
        start, stop = number * each, jnp.minimum((number + 1) * each, end)
        add = functools.partial(_add_tiles, q, seen, end=end, high=high, order=order)
        split_sums = add(
            jnp.maximum(start, begin), jnp.minimum(whole, stop), SoftmaxState.nothing(lanes, D)
        )
        first = pl.cdiv(jnp.maximum(start, whole), unroll)
        carry = (
            page_of(seen, first * unroll, tile),
            SoftmaxState.nothing(lanes, D, order.ones),
            split_sums,
        )
        until = lax.div(jnp.minimum(partly, stop), unroll)
        *_, split_sums = lax.fori_loop(first, until, whole_step, carry)
        return fold(sums, add(jnp.maximum(start, partly), stop, split_sums))

    # Separate loop: within a span the total over spans is not used and may leave the registers.
    each = order.span // tile
    spans = (lax.div(low, order.span), pl.cdiv(high, order.span))
    return lax.fori_loop(*spans, of_span, SoftmaxState.nothing(lanes, D))


def _add_tiles(q, seen, begin, stop, sums, *, end, high, order):
    """Adds tiles that are not fully visible to all rows to a span, split by split."""

    def add(i, carry):
        split_sums, sums = carry
        split_sums = _add_masked(q, seen, i, high, split_sums, order)
        ends_split = (lax.rem((i + 1) * order.tile, order.split) == 0) | (i + 1 == end)
        return _fold_where(ends_split, split_sums, sums)

    nothing = SoftmaxState.nothing(*q.shape, order.ones)
    _, sums = lax.fori_loop(begin, stop, add, (nothing, sums))
    return sums


def page_of(seen, i, tile):
    """Returns the page in which tile `i` begins."""
    column = lax.div(i * tile, seen.kv_ref.shape[3])
    return seen.table_ref[seen.request, jnp.minimum(column, seen.table_ref.shape[1] - 1)]


def pages_of(seen, number, i, tile):
    """Returns the positions of a tile, their pages, and the page of the next tile.

    If pages consist of whole tiles, the page is loaded one tile ahead, so key loads do not wait.
    """
    position, page = i * tile + lax.iota(jnp.int32, tile), seen.kv_ref.shape[3]
    if page % tile == 0:
        return position, number, page_of(seen, i + 1, tile)
    column = jnp.minimum(lax.div(position, page), seen.table_ref.shape[1] - 1)
    pages = pltriton.load(seen.table_ref.at[seen.request, column])[:, None]
    return position, pages, number


def load_rows(seen, which, pages, position, mask=None):
    """Loads the keys (`which` 0) or values (1) of some positions; masked positions read as 0."""
    *_, page, _, D = seen.kv_ref.shape
    where = (seen.layer, which, pages, lax.rem(position, page)[:, None], seen.head)
    return load_kept(seen.kv_ref.at[(*where, columns_of(D)[None, :])], in_head(mask, D))


EXACT = {"precision": lax.Precision.HIGHEST}  # float32 stays float32, no tf32


def add_whole(q, seen, position, pages, sums, order):
    """Adds a tile that is fully visible to all rows."""
    k = load_rows(seen, 0, pages, position)
    scores = scores_of(q, k, order)
    highest = jnp.maximum(sums.peak, scores.max(axis=1))
    v = load_rows(seen, 1, pages, position)
    weights = jnp.exp2(scores - highest[:, None]).astype(v.dtype)
    return add_tile(sums, highest, weights, v)


def scores_of(q, k, order):
    """Computes the scores of a tile, as exponents of 2: times scale and log2(e), soft-capped."""
    scores = pltriton.dot(q, k.T, **EXACT) * (order.scale * LOG2_E)
    if order.softcap is None:
        return scores
    return soft_capped(scores, order.softcap * LOG2_E)


def _add_masked(q, seen, i, high, sums, order):
    """Adds a tile that is not fully visible to all rows."""

    def masked():
        position = i * order.tile + lax.iota(jnp.int32, order.tile)
        inside, column = position < high, lax.div(position, seen.kv_ref.shape[3])
        at = seen.table_ref.at[seen.request, column]
        pages = pltriton.load(at, mask=inside, other=0)[:, None]
        load = functools.partial(load_rows, seen, mask=inside[:, None])
        k = load(which=0, pages=pages, position=position)
        scores = scores_of(q, k, order)
        sees = _visible(seen, position, order.nodes)
        scores = jnp.where(sees, scores, NEGATIVE)
        highest = jnp.maximum(sums.peak, scores.max(axis=1))
        weights = jnp.where(sees, jnp.exp2(scores - highest[:, None]), 0.0).astype(q.dtype)
        # 0 x NaN is NaN: non-finite values are set to 0, and the rows that attend to them get NaN.
        v = load(which=1, pages=pages, position=position)
        is_nonfinite = jnp.max(jnp.where(jnp.abs(v) < jnp.inf, 0, 1), axis=1)  # [tile]
        v = jnp.where(is_nonfinite[:, None] == 0, v, jnp.zeros_like(v))
        gets_nan = jnp.max(jnp.where(sees, is_nonfinite[None, :], 0), axis=1)  # [lanes]
        return jnp.where(gets_nan[:, None] == 0, sums.value, jnp.nan), highest, weights, v

    def none():
        lanes, D = q.shape
        weights = jnp.zeros((lanes, order.tile), q.dtype)
        return sums.value, sums.peak, weights, jnp.zeros((order.tile, D), q.dtype)

    # Always true. A value that leaves a branch has lost the narrow type of its inputs, from which
    # Triton would select its layout for the tensor cores and so the order of its sums.
    values, highest, weights, v = lax.cond(i * order.tile < high, masked, none)
    return add_tile(sums._replace(value=values), highest, weights, v)


def _visible(seen, position, nodes):
    """Returns the mask of the positions of a tile that each row attends to."""
    first, until = seen.first[:, None], seen.until[:, None]
    is_seen = (position[None, :] >= first) & (position[None, :] < until)
    if nodes:
        node = position[None, :] - until
        inside = (node >= 0) & (node < nodes)
        at = (seen.row[:, None], jnp.clip(node, 0, nodes - 1))
        is_seen |= pltriton.load(seen.window_ref.at[at], mask=inside, other=0) != 0
    return is_seen


def add_tile(sums, highest, weights, v):
    """Adds the weighted values and the weights of a tile to the accumulator."""
    decay = jnp.exp2(sums.peak - highest)[:, None]
    # Tensor cores sum in one order for any number of rows; a reduction over threads does not.
    ones = jnp.ones((v.shape[0], sums.total.shape[1]), v.dtype)
    total = sums.total * decay + pltriton.dot(weights, ones, **EXACT)
    return SoftmaxState(sums.value * decay + pltriton.dot(weights, v, **EXACT), highest, total)


def _fold_where(ends_split, split_sums, sums):
    """Merges a split into its span and begins the next split, if `ends_split`."""
    nothing = SoftmaxState.nothing(*split_sums.value.shape, split_sums.total.shape[1])
    return lax.cond(
        ends_split, lambda: (nothing, _fold_split(sums, split_sums)), lambda: (split_sums, sums)
    )


def _fold_split(sums, split):
    """Merges a split into its span; the total of a split has equal columns."""
    return fold(sums, split._replace(total=split.total.max(axis=1)))


def finish(sums, gate_ref, out_ref, row, q_head, is_lane, D):
    """Divides by the total weight, applies the sigmoid gate and writes the outputs of some rows."""
    column, keep = q_head[:, None] * D + columns_of(D)[None, :], in_head(is_lane[:, None], D)
    out = sums.value / jnp.maximum(sums.total, 1e-30)[:, None]
    if gate_ref is not None:
        columns = column + (q_head[:, None] + 1) * D
        gate = pltriton.load(gate_ref.at[row[:, None], columns], mask=keep, other=0.0)
        out = out / (1.0 + jnp.exp2(gate.astype(jnp.float32) * -LOG2_E))
    # A lane that is not written gets a row out of bounds, for the interpreter.
    at = jnp.where(is_lane, row, out_ref.shape[0])[:, None]
    column = outside(column, D, out_ref.shape[1])
    pltriton.store(out_ref.at[at, column], out.astype(out_ref.dtype), mask=keep)
