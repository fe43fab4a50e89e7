"""N-gram hash table on the device: inserts tokens and grows draft trees (Pallas, Triton backend).

Entries are indexed by length, group and way, with `_WAYS` ways for each of eight lengths.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int

_AT_ONCE = 64
"""Tokens that a program inserts per step."""

_WINDOW, _LENGTHS, _WAYS = 16, 8, 8
_LATEST, _MOST_AGE = 2**31 - 1, 2**28 - 1
_FIRST, _SECOND = 0x01000193, 0x5BD1E995
_NONE = 2**30
_RING = 32
"""N-gram starts that are followed along a path; the oldest are replaced."""


class NgramArrays(NamedTuple):
    """Arrays of an n-gram table."""

    tokens: Any
    checks: Any
    stamps: Any
    clocks: Any


class NgramTexts(NamedTuple):
    """Contexts, and the tokens that followed them."""

    contexts: Any
    following: Any
    scopes: Any
    is_real: Any


class NgramTree(NamedTuple):
    """Draft tree while it grows.

    Attributes:
      firsts, seconds: For each node, the hashes of the n-grams that start at each slot of the ring.
      tokens, parents, levels, costs: Token, parent, depth and cost of each node.
      open_costs, open_tokens: Candidate children of each node.
      size: Number of nodes.
      grows: Whether the last step added a node.
    """

    firsts: Any
    seconds: Any
    tokens: Any
    parents: Any
    levels: Any
    costs: Any
    open_costs: Any
    open_tokens: Any
    size: Any
    grows: Any


def insert(
    tokens: Int[jax.Array, "lengths groups ways"],
    checks: Int[jax.Array, "lengths groups ways"],
    stamps: Int[jax.Array, "lengths groups ways"],
    clocks: Int[jax.Array, " lengths"],
    contexts: Int[jax.Array, "n window"],
    following: Int[jax.Array, " n"],
    scopes: Int[jax.Array, "n 2"],
    is_real: Bool[jax.Array, " n"],
    interpret: bool = False,
) -> tuple[
    Int[jax.Array, "lengths groups ways"],
    Int[jax.Array, "lengths groups ways"],
    Int[jax.Array, "lengths groups ways"],
    Int[jax.Array, " lengths"],
]:
    """Implements `shared.spec.ngram.insert`; the table is updated in place."""
    table = NgramArrays(tokens=tokens, checks=checks, stamps=stamps, clocks=clocks)
    texts = NgramTexts(contexts=contexts, following=following, scopes=scopes, is_real=is_real)
    outputs = pl.pallas_call(
        functools.partial(_learn_kernel, interpret=interpret),
        grid=(_LENGTHS,),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in table],
        input_output_aliases={number: number for number in range(len(table))},
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="ngram_insert",
    )(table, texts)
    return tuple(outputs)


def _mix(values):
    """Same as `shared.spec.ngram.hash_mix`; a shift copies the sign bit, which is masked out."""
    mixed = (values ^ ((values >> 16) & 0xFFFF)) * -2048144789
    mixed = (mixed ^ ((mixed >> 13) & 0x7FFFF)) * -1028477387
    return mixed ^ ((mixed >> 16) & 0xFFFF)


def _length(place):
    """Returns an n-gram length: 1, 2, then 3 and 4 times the powers of two."""
    above = jnp.maximum(place - 2, 0)
    return jnp.where(place < 2, place + 1, (3 + (place & 1)) << (above >> 1))


def _learn_kernel(_, texts, tokens_ref, checks_ref, stamps_ref, clocks_ref, *, interpret):
    """One program per length, which inserts in order, several tokens per step.

    The program has one warp, so its stores are ordered.
    """
    place, count, groups = pl.program_id(0), texts.following.shape[0], tokens_ref.shape[1]
    length, clock = _length(place), clocks_ref[place]

    def insert_some(part, _):
        row = part * _AT_ONCE + lax.iota(jnp.int32, _AT_ONCE)
        is_in, at = row < count, jnp.minimum(row, count - 1)
        first = pltriton.load(texts.scopes.at[at, 0], mask=is_in, other=0)
        second = pltriton.load(texts.scopes.at[at, 1], mask=is_in, other=0)
        for column in range(_WINDOW):
            token = pltriton.load(texts.contexts.at[at, column], mask=is_in, other=0) + 1
            is_part = column >= _WINDOW - length
            first = jnp.where(is_part, first * _FIRST + token, first)
            second = jnp.where(is_part, second * _SECOND + token, second)
        oldest = pltriton.load(texts.contexts.at[at, _WINDOW - length], mask=is_in, other=-1)
        is_real = pltriton.load(texts.is_real.at[at], mask=is_in, other=False)
        is_real = is_real & is_in & (oldest >= 0)
        token = pltriton.load(texts.following.at[at], mask=is_in, other=0) + 1
        group, way = _mix(first) & (groups - 1), _mix(token) & (_WAYS - 1)
        entry = group * _WAYS + way
        later = (entry[:, None] == entry[None, :]) & (row[None, :] > row[:, None])
        is_last = (later & is_real[None, :]).astype(jnp.int32).max(axis=1) == 0
        is_kept = is_real & is_last
        group = jnp.where(is_kept, group, groups)  # outside the array, for the interpreter
        pltriton.store(tokens_ref.at[place, group, way], token, mask=is_kept)
        pltriton.store(checks_ref.at[place, group, way], _mix(second), mask=is_kept)
        stamp = (clock + row) & _LATEST
        pltriton.store(stamps_ref.at[place, group, way], stamp, mask=is_kept)
        if not interpret:
            pltriton.debug_barrier()
        return 0

    lax.fori_loop(0, pl.cdiv(count, _AT_ONCE), insert_some, 0)
    clocks_ref[place] = (clock + count) & _LATEST


def draft(
    tokens: Int[jax.Array, "lengths groups ways"],
    checks: Int[jax.Array, "lengths groups ways"],
    stamps: Int[jax.Array, "lengths groups ways"],
    clocks: Int[jax.Array, " lengths"],
    contexts: Int[jax.Array, "B window"],
    scopes: Int[jax.Array, "B 2"],
    max_drafts: Int[jax.Array, " B"],
    nodes: int,
    depth: int,
    width: int,
    interpret: bool = False,
) -> tuple[
    Int[jax.Array, "B N"], Int[jax.Array, "B N"], Int[jax.Array, " B"], Float[jax.Array, "B N"]
]:
    """Implements `shared.spec.ngram.draft`."""
    B, table = (
        len(contexts),
        NgramArrays(tokens=tokens, checks=checks, stamps=stamps, clocks=clocks),
    )
    shapes = ((B, nodes), jnp.int32), ((B, nodes), jnp.int32), ((B,), jnp.int32)
    outputs = pl.pallas_call(
        functools.partial(_draft_kernel, depth=depth, width=width),
        grid=(B,),
        out_shape=[jax.ShapeDtypeStruct(*x) for x in (*shapes, ((B, nodes), jnp.float32))],
        compiler_params=pltriton.CompilerParams(num_warps=1 if nodes <= 16 else 4, num_stages=1),
        interpret=interpret,
        name="ngram_draft",
    )(table, contexts, scopes, max_drafts)
    return tuple(outputs)


def _at(values, is_at):
    """Returns the element of a matrix selected by a mask; 0 without one."""
    return jnp.sum(jnp.sum(jnp.where(is_at, values, 0), axis=1), axis=0)


def _row(values, is_row):
    """Returns the row of a matrix selected by a mask."""
    return jnp.sum(jnp.where(is_row[:, None], values, 0), axis=0)


def _entry(table, first, second, level, missing):
    """Looks up a sequence's n-grams: returns tokens and their ranking keys, -1 for misses.

    Args:
      table: Arrays of the table.
      first, second: Hashes of the n-grams that start at each slot of the ring.
      level: Depth along the path.
      missing: Tokens missing before the start of the sequence.
    """
    groups = table.tokens.shape[1]
    ring, place, way = (lax.iota(jnp.int32, size) for size in (_RING, _LENGTHS, _WAYS))
    begin = _WINDOW + level - _length(place)
    is_at = ring[None, :] == (begin & (_RING - 1))[:, None]
    group = _mix(jnp.sum(jnp.where(is_at, first[None, :], 0), axis=1)) & (groups - 1)
    check = _mix(jnp.sum(jnp.where(is_at, second[None, :], 0), axis=1))
    at = place[:, None], group[:, None], way[None, :]
    is_there = (begin >= missing)[:, None] & (way >= 0)[None, :]
    token = pltriton.load(table.tokens.at[at], mask=is_there, other=0)
    known = pltriton.load(table.checks.at[at], mask=is_there, other=0)
    stamp = pltriton.load(table.stamps.at[at], mask=is_there, other=0)
    is_found = (token > 0) & (known == check[:, None])
    age = jnp.minimum((table.clocks[place][:, None] - stamp) & _LATEST, _MOST_AGE)
    return token, jnp.where(is_found, place[:, None] * (_MOST_AGE + 1) + _MOST_AGE - age, -1)


def _draft_kernel(
    table,
    contexts_ref,
    scopes_ref,
    max_ref,
    tokens_ref,
    parents_ref,
    num_nodes_ref,
    weights_ref,
    *,
    depth,
    width,
):
    """One program per request, which grows its tree node by node."""
    request, nodes = pl.program_id(0), tokens_ref.shape[1]
    lanes, children = pl.next_power_of_2(nodes), pl.next_power_of_2(width)
    node, child = lax.iota(jnp.int32, lanes), lax.iota(jnp.int32, children)
    ring, place, way = (lax.iota(jnp.int32, size) for size in (_RING, _LENGTHS, _WAYS))
    slot = place[:, None] * _WAYS + way[None, :]
    number = node[:, None] * children + child[None, :]
    scope, other_scope = scopes_ref[request, 0], scopes_ref[request, 1]
    limit = jnp.minimum(nodes, 1 + max_ref[request])
    first = jnp.zeros(_RING, jnp.int32) + scope
    second = jnp.zeros(_RING, jnp.int32) + other_scope
    missing, newest = jnp.int32(0), jnp.int32(0)
    for at in range(_WINDOW):
        newest = contexts_ref[request, at]
        missing += (newest < 0).astype(jnp.int32)
        first = jnp.where(ring <= at, first * _FIRST + newest + 1, first)
        second = jnp.where(ring <= at, second * _SECOND + newest + 1, second)
    is_root, zero = node == 0, jnp.zeros(lanes, jnp.int32)
    root = NgramTree(
        firsts=jnp.where(is_root[:, None], first[None, :], 0),
        seconds=jnp.where(is_root[:, None], second[None, :], 0),
        tokens=jnp.where(is_root, newest, 0),
        parents=zero,
        levels=zero,
        costs=zero,
        open_costs=jnp.full((lanes, children), _NONE, jnp.int32),
        open_tokens=jnp.zeros((lanes, children), jnp.int32),
        size=jnp.int32(1),
        grows=jnp.bool_(True),
    )

    def grow(tree):
        is_last = node == tree.size - 1
        level = jnp.sum(jnp.where(is_last, tree.levels, 0))
        spent = jnp.sum(jnp.where(is_last, tree.costs, 0))
        absent = jnp.where(level < depth, missing, _NONE)  # the last level has no children
        hashes = _row(tree.firsts, is_last), _row(tree.seconds, is_last)
        token, rank = _entry(table, *hashes, level, absent)
        open_costs, open_tokens = tree.open_costs, tree.open_tokens
        for sibling in range(width):
            best = jnp.max(jnp.max(rank, axis=1), axis=0)
            lane = jnp.where(rank == best, slot, _LENGTHS * _WAYS)
            found = _at(token, slot == jnp.min(jnp.min(lane, axis=1), axis=0))
            shorter = _LENGTHS - 1 - jnp.maximum(best, 0) // (_MOST_AGE + 1)
            price = spent + 108 + 23 * shorter * shorter + 1232 * min(sibling, 2)
            is_child = is_last[:, None] & (child == sibling)[None, :]
            open_costs = jnp.where(is_child, jnp.where(best >= 0, price, _NONE), open_costs)
            open_tokens = jnp.where(is_child, found - 1, open_tokens)
            rank = jnp.where(token == found, -1, rank)
        price = jnp.min(jnp.min(open_costs, axis=1), axis=0)
        grows = price < _NONE
        best = jnp.where(open_costs == price, number, lanes * children)
        best = jnp.min(jnp.min(best, axis=1), axis=0)
        newest, parent = _at(open_tokens, number == best), best // children
        is_parent, is_new = node == parent, node == jnp.where(grows, tree.size, lanes)
        level = jnp.sum(jnp.where(is_parent, tree.levels, 0)) + 1
        is_begun = ring == ((_WINDOW - 1 + level) & (_RING - 1))
        first = jnp.where(is_begun, scope, _row(tree.firsts, is_parent)) * _FIRST + newest + 1
        second = (
            jnp.where(is_begun, other_scope, _row(tree.seconds, is_parent)) * _SECOND + newest + 1
        )
        return NgramTree(
            firsts=jnp.where(is_new[:, None], first[None, :], tree.firsts),
            seconds=jnp.where(is_new[:, None], second[None, :], tree.seconds),
            tokens=jnp.where(is_new, newest, tree.tokens),
            parents=jnp.where(is_new, parent, tree.parents),
            levels=jnp.where(is_new, level, tree.levels),
            costs=jnp.where(is_new, price, tree.costs),
            open_costs=jnp.where(number == best, _NONE, open_costs),
            open_tokens=open_tokens,
            size=tree.size + grows.astype(jnp.int32),
            grows=grows,
        )

    tree = lax.while_loop(lambda tree: (tree.size < limit) & tree.grows, grow, root)
    is_in, at = node < nodes, jnp.minimum(node, nodes)  # outside the array, for the interpreter
    pltriton.store(tokens_ref.at[request, at], tree.tokens, mask=is_in)
    pltriton.store(parents_ref.at[request, at], tree.parents, mask=is_in)
    # Division by a power of two is exact.
    weight = jnp.where(node < tree.size, -tree.costs.astype(jnp.float32) * (1 / 1024), -jnp.inf)
    pltriton.store(weights_ref.at[request, at], weight, mask=is_in)
    num_nodes_ref[request] = tree.size
