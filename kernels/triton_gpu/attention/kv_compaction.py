"""KV compaction of accepted rows after verification (Triton)."""

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

_MOVED_ELEMENTS = 8192  # row elements that a program moves


def commit(
    pages: Float[Tensor, "*pools P page H D"],
    page_table: Int[Tensor, "B table"],
    lengths: Int[Tensor, " B"],
    path: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
) -> None:
    """Same as `shared.spec.attention.compact_accepted_kv`, in place; window pages are not shared.

    Raises:
      ValueError: The pools are not contiguous.
    """
    if not pages.is_contiguous():
        raise ValueError("the pools must be contiguous")
    (B, W), (P, page, H, D) = path.shape, pages.shape[-4:]
    lanes = triton.next_power_of_2(W)
    columns = min(triton.next_power_of_2(H * D), max(1, _MOVED_ELEMENTS // lanes))
    pools = pages.numel() // (P * page * H * D)
    rows = (x.contiguous() for x in (page_table, lengths, path, counts))
    _compact_kernel[(triton.cdiv(H * D, columns), pools, B)](
        *(pages, *rows, P, page_table.shape[1]),
        steps=W,
        page=page,
        width=H * D,
        lanes=lanes,
        columns=columns,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_pages", "table_columns"])
def _compact_kernel(
    pages_at,
    table_at,
    lengths_at,
    path_at,
    counts_at,
    num_pages,
    table_columns,
    steps: tl.constexpr,
    page: tl.constexpr,
    width: tl.constexpr,
    lanes: tl.constexpr,
    columns: tl.constexpr,
):
    """One program per block of columns, pool and request; rows that stay in place are skipped."""
    pool, request, step = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.arange(0, lanes)
    node = tl.load(path_at + request * steps + step, mask=step < steps, other=0)
    moves = (step < steps) & (step < tl.load(counts_at + request)) & (node != step)
    length, table_at = tl.load(lengths_at + request), table_at + request * table_columns
    column = (tl.program_id(0) * columns + tl.arange(0, columns))[None, :]
    keep = moves[:, None] & (column < width)
    pool_at = pages_at + pool * num_pages * (page * width) + column
    source = _row_of(table_at, length + node, moves, page)
    target = _row_of(table_at, length + step, moves, page)
    moved = tl.load(pool_at + source[:, None] * width, mask=keep)
    tl.debug_barrier()  # other threads may still read what this one overwrites
    tl.store(pool_at + target[:, None] * width, moved, mask=keep)


@triton.jit
def _row_of(table_at, position, is_in, page: tl.constexpr):
    """Returns the pool row of a KV position."""
    number = tl.load(table_at + position // page, mask=is_in, other=0)
    return number.to(tl.int64) * page + position % page
