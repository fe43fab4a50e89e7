"""Acceptance of draft tokens by exact match, one program per request (Triton)."""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Int
from torch import Tensor


def follow(
    tokens: Int[Tensor, "B N"],
    parents: Int[Tensor, "B N"],
    num_nodes: Int[Tensor, " B"],
    choices: Int[Tensor, "B N"],
    row_of: Int[Tensor, "B N"],
    is_finite: Bool[Tensor, " R"],
    is_row: Bool[Tensor, " B"],
    depth: int,
) -> tuple[
    Int[Tensor, "B W"],
    Int[Tensor, " B"],
    Int[Tensor, "B W"],
    Bool[Tensor, " B"],
    Int[Tensor, "B W"],
]:
    """Implements `shared.spec.acceptance.follow`; returns its fields."""
    B, N = tokens.shape
    path, emitted, rows = tokens.new_empty((3, B, depth + 1), dtype=torch.int32)
    counts = tokens.new_empty(B, dtype=torch.int32)
    failed = tokens.new_empty(B, dtype=torch.bool)
    given = (tokens, parents, num_nodes, choices, row_of, is_finite, is_row)
    _follow_kernel[(B,)](
        *(x.contiguous() for x in given),
        *(path, counts, emitted, failed, rows),
        nodes=N,
        depth=depth,
        lanes=triton.next_power_of_2(N),
        ways=triton.next_power_of_2(depth + 1),
        num_warps=1,
    )
    return path, counts, emitted, failed, rows


@triton.jit
def _follow_kernel(
    tokens_at,
    parents_at,
    num_nodes_at,
    choices_at,
    row_of_at,
    is_finite_at,
    is_row_at,
    path_at,
    counts_at,
    emitted_at,
    failed_at,
    rows_at,
    nodes: tl.constexpr,
    depth: tl.constexpr,
    lanes: tl.constexpr,
    ways: tl.constexpr,
):
    """One program per request; nodes are its lanes."""
    request, lane, step = tl.program_id(0), tl.arange(0, lanes), tl.arange(0, ways)
    at, is_node = request * nodes + lane, lane < nodes
    token = tl.load(tokens_at + at, mask=is_node, other=-1)
    parent = tl.load(parents_at + at, mask=is_node, other=-1)
    choice = tl.load(choices_at + at, mask=is_node, other=0)
    row = tl.load(row_of_at + at, mask=is_node, other=0)
    is_bad = tl.load(is_finite_at + row, mask=is_node, other=1).to(tl.int32) == 0
    is_draft = (lane > 0) & (lane < tl.load(num_nodes_at + request)) & is_node
    node, count = request * 0, request * 0 + 1
    path, emitted, rows = tl.zeros((ways,), tl.int32), step * 0, step * 0
    num_bad = request * 0
    for level in range(depth + 1):
        has_arrived, is_step = lane == node, step == level
        wanted = tl.sum(tl.where(has_arrived, choice, 0))
        num_bad += tl.sum((has_arrived & is_bad).to(tl.int32))
        path = tl.where(is_step, node, path)
        emitted = tl.where(is_step, wanted, emitted)
        rows = tl.where(is_step, tl.sum(tl.where(has_arrived, row, 0)), rows)
        is_next = is_draft & (parent == node) & (token == wanted)
        following = tl.min(tl.where(is_next, lane, lanes))
        is_found = (following < lanes) & (level < depth)
        node = tl.where(is_found, following, node)
        count += is_found.to(tl.int32)
    is_row = tl.load(is_row_at + request).to(tl.int32) != 0
    is_failed = is_row & (num_bad > 0)
    count = tl.where(is_row & (num_bad == 0), count, 0)
    tl.store(counts_at + request, count)
    tl.store(failed_at + request, is_failed)
    at, is_way = request * (depth + 1) + step, step <= depth
    tl.store(path_at + at, path, mask=is_way)
    tl.store(emitted_at + at, tl.where(step < count, emitted, 0), mask=is_way)
    tl.store(rows_at + at, rows, mask=is_way)
