"""Flattened draft trees: the nodes of all requests as consecutive rows (Triton)."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Int
from torch import Tensor

_PAIRS = 4096  # (row, request) pairs that a program compares


class Flat(NamedTuple):
    """Rows of flattened trees, consecutive per request; chains have no tree mask."""

    row_starts: Any
    request: Any
    node: Any
    is_real: Any
    positions: Any
    places: Any
    until: Any
    window: Any


def flat_nodes(
    parents: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    rows: int,
    is_chain: bool,
) -> tuple[
    Int[Tensor, " B1"],
    Int[Tensor, " R"],
    Int[Tensor, " R"],
    Bool[Tensor, " R"],
    Int[Tensor, " R"],
    Int[Tensor, " R"],
    Int[Tensor, " R"],
    Bool[Tensor, "R seen"],
]:
    """Implements `shared.spec.attention.tree_rows`.

    Returns the first row of each request, and per row its request and node, whether it is valid,
    its position, its KV position and its visible range.
    """
    (B, N), lanes = parents.shape, triton.next_power_of_2(len(parents))
    block = max(1, min(32, _PAIRS // lanes))
    is_real = lengths.new_empty(rows, dtype=torch.bool)
    flat = Flat(
        row_starts=lengths.new_empty(B + 1),
        request=lengths.new_empty(rows, dtype=torch.int64),
        node=lengths.new_empty(rows, dtype=torch.int64),
        is_real=is_real,
        positions=lengths.new_empty(rows),
        places=lengths.new_empty(rows),
        until=lengths.new_empty(rows),
        window=is_real.new_empty((rows, 0 if is_chain else N)),
    )
    _flat_nodes_kernel[(triton.cdiv(rows, block),)](
        *(parents.contiguous(), num_nodes.contiguous(), lengths.contiguous(), flat),
        rows=rows,
        requests=B,
        nodes=N,
        is_chain=is_chain,
        block=block,
        lanes=lanes,
        columns=triton.next_power_of_2(N),
        num_warps=4,
    )
    return tuple(flat)


@triton.jit
def _flat_nodes_kernel(
    parents_at,
    num_nodes_at,
    lengths_at,
    flat,
    rows: tl.constexpr,
    requests: tl.constexpr,
    nodes: tl.constexpr,
    is_chain: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    columns: tl.constexpr,
):
    """One program per block of rows, which scans all requests."""
    lane, row = tl.arange(0, lanes), tl.program_id(0) * block + tl.arange(0, block)
    is_row = row < rows
    count = tl.load(num_nodes_at + lane, mask=lane < requests, other=0)
    ends = tl.cumsum(count, 0)
    if tl.program_id(0) == 0:
        tl.store(flat.row_starts, 0)
        tl.store(flat.row_starts + 1 + lane, ends, mask=lane < requests)
    is_before = (row[:, None] >= ends[None, :]) & (lane < requests)[None, :]
    is_real = row < tl.sum(count)
    request = tl.where(is_real, tl.sum(is_before.to(tl.int32), axis=1), 0)
    start = tl.sum(tl.where(is_before, count[None, :], 0), axis=1)
    node = tl.where(is_real, row - start, 0)
    place = tl.load(lengths_at + request) + node
    tl.store(flat.request + row, request.to(tl.int64), mask=is_row)
    tl.store(flat.node + row, node.to(tl.int64), mask=is_row)
    tl.store(flat.is_real + row, is_real, mask=is_row)
    tl.store(flat.places + row, place, mask=is_row)
    depth, until = node, place + 1
    if not is_chain:
        depth, until, column, steps = node * 0, place - node, tl.arange(0, columns), 0
        above = node
        seen = above[:, None] == column[None, :]
        while (tl.max(above) > 0) & (steps < nodes):
            depth += (above > 0).to(tl.int32)
            above = tl.load(parents_at + request * nodes + above, mask=above > 0, other=0)
            seen = seen | (above[:, None] == column[None, :])
            steps += 1
        at = flat.window + row[:, None] * nodes + column[None, :]
        tl.store(at, seen & is_real[:, None], mask=is_row[:, None] & (column < nodes)[None, :])
    tl.store(flat.positions + row, place - node + depth, mask=is_row)
    tl.store(flat.until + row, tl.where(is_real, until, 0), mask=is_row)
