"""N-gram hash table on the device: inserts tokens and grows draft trees (Triton).

Entries are indexed by length, group and way, with `_WAYS` ways for each of eight lengths.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

_AT_ONCE = 64
"""Tokens that a program inserts per step."""

_WINDOW = tl.constexpr(16)
_LENGTHS = tl.constexpr(8)
_WAYS = tl.constexpr(8)
_LATEST = tl.constexpr(2**31 - 1)
_MOST_AGE = tl.constexpr(2**28 - 1)
_FIRST = tl.constexpr(0x01000193)
_SECOND = tl.constexpr(0x5BD1E995)
_NONE = tl.constexpr(2**30)
_RING = tl.constexpr(32)
"""N-gram starts that are followed along a path; the oldest are replaced."""


class NgramArrays(NamedTuple):
    """Arrays of an n-gram table."""

    tokens: Any
    checks: Any
    stamps: Any
    clocks: Any


class NgramTreeArgs(NamedTuple):
    """Output trees."""

    tokens: Any
    parents: Any
    num_nodes: Any
    weights: Any


class NgramSizes(NamedTuple):
    """Tree sizes: nodes, levels and children of a node, and powers of two that hold them."""

    nodes: int
    depth: int
    width: int
    lanes: int
    children: int
    candidates: int


def insert(
    tokens: Int[Tensor, "lengths groups ways"],
    checks: Int[Tensor, "lengths groups ways"],
    stamps: Int[Tensor, "lengths groups ways"],
    clocks: Int[Tensor, " lengths"],
    contexts: Int[Tensor, "n window"],
    following: Int[Tensor, " n"],
    scopes: Int[Tensor, "n 2"],
    is_real: Bool[Tensor, " n"],
) -> None:
    """Implements `shared.spec.ngram.insert`, in place."""
    given = (x.contiguous() for x in (contexts, following, scopes, is_real))
    _learn_kernel[(len(clocks),)](
        NgramArrays(tokens=tokens, checks=checks, stamps=stamps, clocks=clocks),
        *given,
        *(len(following), tokens.shape[1]),
        at_once=_AT_ONCE,
        num_warps=1,
    )


@triton.jit
def _mix(values):
    """Same as `shared.spec.ngram.hash_mix`; a shift copies the sign bit, which is masked out."""
    mixed = (values ^ ((values >> 16) & 0xFFFF)) * -2048144789
    mixed = (mixed ^ ((mixed >> 13) & 0x7FFFF)) * -1028477387
    return mixed ^ ((mixed >> 16) & 0xFFFF)


@triton.jit
def _length(place):
    """Returns an n-gram length: 1, 2, then 3 and 4 times the powers of two."""
    above = tl.maximum(place - 2, 0)
    return tl.where(place < 2, place + 1, (3 + (place & 1)) << (above >> 1))


@triton.jit(do_not_specialize=["count"])
def _learn_kernel(
    table, contexts_at, following_at, scopes_at, real_at, count, groups, at_once: tl.constexpr
):
    """One program per length, which inserts in order, several tokens per step.

    The program has one warp, so its stores are ordered.
    """
    place = tl.program_id(0)
    length, clock = _length(place), tl.load(table.clocks + place)
    for start in range(0, count, at_once):
        row = start + tl.arange(0, at_once)
        is_in = row < count
        first = tl.load(scopes_at + 2 * row, mask=is_in, other=0)
        second = tl.load(scopes_at + 2 * row + 1, mask=is_in, other=0)
        for at in tl.static_range(0, _WINDOW):
            token = tl.load(contexts_at + row * _WINDOW + at, mask=is_in, other=0) + 1
            is_part = at >= _WINDOW - length
            first = tl.where(is_part, first * _FIRST + token, first)
            second = tl.where(is_part, second * _SECOND + token, second)
        oldest = tl.load(contexts_at + row * _WINDOW + _WINDOW - length, mask=is_in, other=-1)
        is_real = tl.load(real_at + row, mask=is_in, other=0).to(tl.int32) != 0
        is_real = is_real & (oldest >= 0)
        token = tl.load(following_at + row, mask=is_in, other=0) + 1
        group = place * groups + (_mix(first) & (groups - 1))
        entry = group * _WAYS + (_mix(token) & (_WAYS - 1))
        later = (entry[:, None] == entry[None, :]) & (row[None, :] > row[:, None])
        is_last = tl.max((later & is_real[None, :]).to(tl.int32), axis=1) == 0
        is_kept = is_real & is_last
        tl.store(table.tokens + entry, token, mask=is_kept)
        tl.store(table.checks + entry, _mix(second), mask=is_kept)
        tl.store(table.stamps + entry, (clock + row) & _LATEST, mask=is_kept)
        tl.debug_barrier()
    tl.store(table.clocks + place, (clock + count) & _LATEST)


def draft(
    tokens: Int[Tensor, "lengths groups ways"],
    checks: Int[Tensor, "lengths groups ways"],
    stamps: Int[Tensor, "lengths groups ways"],
    clocks: Int[Tensor, " lengths"],
    contexts: Int[Tensor, "B window"],
    scopes: Int[Tensor, "B 2"],
    max_drafts: Int[Tensor, " B"],
    nodes: int,
    depth: int,
    width: int,
) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Int[Tensor, " B"], Float[Tensor, "B N"]]:
    """Implements `shared.spec.ngram.draft`."""
    B, lanes = len(contexts), triton.next_power_of_2(nodes)
    trees = NgramTreeArgs(
        tokens=contexts.new_empty((B, nodes)),
        parents=contexts.new_empty((B, nodes)),
        num_nodes=contexts.new_empty(B),
        weights=contexts.new_empty((B, nodes), dtype=torch.float32),
    )
    children = triton.next_power_of_2(width)
    _draft_kernel[(B,)](
        NgramArrays(tokens=tokens, checks=checks, stamps=stamps, clocks=clocks),
        *(x.contiguous() for x in (contexts, scopes, max_drafts)),
        *(trees, tokens.shape[1]),
        sizes=NgramSizes(
            nodes=nodes,
            depth=depth,
            width=width,
            lanes=lanes,
            children=children,
            candidates=lanes * children,
        ),
        num_warps=1 if lanes <= 16 else 4,
    )
    return tuple(trees)


@triton.jit
def _row(values, is_row):
    """Returns the row of a matrix selected by a mask."""
    return tl.sum(tl.where(is_row[:, None], values, 0), axis=0)


@triton.jit
def _entry(table, first, second, level, missing, groups):
    """Looks up a sequence's n-grams: returns tokens and their ranking keys, -1 for misses.

    Args:
      table: Arrays of the table.
      first, second: Hashes of the n-grams that start at each slot of the ring.
      level: Depth along the path.
      missing: Tokens missing before the start of the sequence.
    """
    ring, place, way = tl.arange(0, _RING), tl.arange(0, _LENGTHS), tl.arange(0, _WAYS)
    begin = _WINDOW + level - _length(place)
    is_at = ring[None, :] == (begin & (_RING - 1))[:, None]
    group = _mix(tl.sum(tl.where(is_at, first[None, :], 0), axis=1)) & (groups - 1)
    check = _mix(tl.sum(tl.where(is_at, second[None, :], 0), axis=1))
    entry = ((place * groups + group) * _WAYS)[:, None] + way[None, :]
    is_there = (begin >= missing)[:, None] & (way >= 0)[None, :]
    token = tl.load(table.tokens + entry, mask=is_there, other=0)
    is_found = (token > 0) & (
        tl.load(table.checks + entry, mask=is_there, other=0) == check[:, None]
    )
    stamp = tl.load(table.stamps + entry, mask=is_there, other=0)
    clock = tl.load(table.clocks + place)
    age = tl.minimum((clock[:, None] - stamp) & _LATEST, _MOST_AGE)
    return token, tl.where(is_found, place[:, None] * (_MOST_AGE + 1) + _MOST_AGE - age, -1)


@triton.jit
def _draft_kernel(table, contexts_at, scopes_at, max_at, trees, groups, sizes: tl.constexpr):
    """One program per request, which grows its tree node by node."""
    lanes: tl.constexpr = sizes.lanes
    children: tl.constexpr = sizes.children
    width: tl.constexpr = sizes.width
    request, node = tl.program_id(0), tl.arange(0, lanes)
    ring, child = tl.arange(0, _RING), tl.arange(0, children)
    slot = tl.arange(0, _LENGTHS)[:, None] * _WAYS + tl.arange(0, _WAYS)[None, :]
    number = node[:, None] * children + child[None, :]
    scope, other_scope = tl.load(scopes_at + 2 * request), tl.load(scopes_at + 2 * request + 1)
    limit = tl.minimum(sizes.nodes, 1 + tl.load(max_at + request))
    first = tl.zeros((_RING,), tl.int32) + scope
    second = tl.zeros((_RING,), tl.int32) + other_scope
    newest, missing = 0, 0
    for at in tl.static_range(0, _WINDOW):
        newest = tl.load(contexts_at + request * _WINDOW + at)
        missing += (newest < 0).to(tl.int32)
        first = tl.where(ring <= at, first * _FIRST + newest + 1, first)
        second = tl.where(ring <= at, second * _SECOND + newest + 1, second)
    is_root = node == 0
    firsts = tl.where(is_root[:, None], first[None, :], 0)
    seconds = tl.where(is_root[:, None], second[None, :], 0)
    token_of, parent_of = tl.where(is_root, newest, 0), tl.zeros((lanes,), tl.int32)
    level_of, cost_of = parent_of, parent_of
    open_costs = tl.zeros((lanes, children), tl.int32) + _NONE
    open_tokens = tl.zeros((lanes, children), tl.int32)
    size, grows = 1, 1
    while (size < limit) & (grows > 0):
        is_last = node == size - 1
        level, spent = tl.sum(tl.where(is_last, level_of, 0)), tl.sum(tl.where(is_last, cost_of, 0))
        # The last level has no children.
        absent = tl.where(level < sizes.depth, missing, _NONE)
        token, rank = _entry(
            table, _row(firsts, is_last), _row(seconds, is_last), level, absent, groups
        )
        for sibling in tl.static_range(0, width):
            best = tl.max(tl.max(rank, axis=1), axis=0)
            lane = tl.where(rank == best, slot, _LENGTHS * _WAYS)
            lane = tl.min(tl.min(lane, axis=1), axis=0)
            found = tl.sum(tl.sum(tl.where(slot == lane, token, 0), axis=1), axis=0)
            shorter = _LENGTHS - 1 - tl.maximum(best, 0) // (_MOST_AGE + 1)
            price = spent + 108 + 23 * shorter * shorter + 1232 * min(sibling, 2)
            is_child = is_last[:, None] & (child == sibling)[None, :]
            open_costs = tl.where(is_child, tl.where(best >= 0, price, _NONE), open_costs)
            open_tokens = tl.where(is_child, found - 1, open_tokens)
            rank = tl.where(token == found, -1, rank)
        price = tl.min(tl.min(open_costs, axis=1), axis=0)
        grows = (price < _NONE).to(tl.int32)
        best = tl.where(open_costs == price, number, sizes.candidates)
        best = tl.min(tl.min(best, axis=1), axis=0)
        newest = tl.sum(tl.sum(tl.where(number == best, open_tokens, 0), axis=1), axis=0)
        open_costs = tl.where(number == best, _NONE, open_costs)
        parent = best // children
        is_parent, is_new = node == parent, node == tl.where(grows > 0, size, lanes)
        level = tl.sum(tl.where(is_parent, level_of, 0)) + 1
        is_begun = ring == ((_WINDOW - 1 + level) & (_RING - 1))
        first = tl.where(is_begun, scope, _row(firsts, is_parent)) * _FIRST + newest + 1
        second = tl.where(is_begun, other_scope, _row(seconds, is_parent)) * _SECOND + newest + 1
        firsts = tl.where(is_new[:, None], first[None, :], firsts)
        seconds = tl.where(is_new[:, None], second[None, :], seconds)
        token_of, parent_of = (
            tl.where(is_new, newest, token_of),
            tl.where(is_new, parent, parent_of),
        )
        level_of, cost_of = tl.where(is_new, level, level_of), tl.where(is_new, price, cost_of)
        size += grows
    is_in, at = node < sizes.nodes, request * sizes.nodes + node
    tl.store(trees.tokens + at, token_of, mask=is_in)
    tl.store(trees.parents + at, parent_of, mask=is_in)
    # Division by a power of two is exact.
    weight = tl.where(node < size, -cost_of.to(tl.float32) * (1 / 1024), -float("inf"))
    tl.store(trees.weights + at, weight, mask=is_in)
    tl.store(trees.num_nodes + request, size)
