"""Draft tree building: ancestor masks, the next level, and the best nodes (Pallas, Triton backend).

Candidates are ranked by counting the better ones, so no lane waits for another, as in a sort. Among
many candidates the threshold of the best is found by bisection.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int

from kernels.pallas_gpu.sampling.logits_processing import HIGHEST, LOWEST, key_of

_AT_ONCE = 16  # candidates compared per step
_MOST_RANKED = 512  # largest number of candidates ranked by comparing all pairs


def ancestors(parents: Int[jax.Array, "B N"], interpret: bool = False) -> Bool[jax.Array, "B N N"]:
    """Implements `shared.spec.draft_tree.ancestors`."""
    B, N = parents.shape
    return pl.pallas_call(
        _ancestors_kernel,
        grid=(B,),
        out_shape=jax.ShapeDtypeStruct((B, N, N), jnp.int8),
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="tree_ancestors",
    )(parents).astype(bool)


def _ancestors_kernel(parents_ref, reached_ref):
    """One program per request; nodes are its lanes."""
    request, nodes = pl.program_id(0), parents_ref.shape[1]
    node = lax.iota(jnp.int32, pl.next_power_of_2(nodes))
    is_node = node < nodes

    def is_climbing(carry):
        above, _, steps = carry
        return (jnp.max(above) > 0) & (steps < nodes)  # terminates also if the parents are no tree

    def climb(carry):
        above, reached, steps = carry
        above = pltriton.load(parents_ref.at[request, above], mask=above > 0, other=0)
        return above, reached | (above[:, None] == node[None, :]), steps + 1

    above = jnp.where(is_node, node, 0)
    start = above, above[:, None] == node[None, :], jnp.int32(0)
    _, reached, _ = lax.while_loop(is_climbing, climb, start)
    at = jnp.where(is_node, node, nodes)  # outside the array, for the interpreter
    keep = is_node[:, None] & is_node[None, :]
    pltriton.store(
        reached_ref.at[request, at[:, None], at[None, :]], reached.astype(jnp.int8), mask=keep
    )


class Expanded(NamedTuple):
    """Level of a tree, with the candidates below each node and the weights of their edges."""

    tokens: Any
    edges: Any
    numbers: Any
    weights: Any
    paths: Any
    sees: Any


class Level(NamedTuple):
    """Same as `shared.spec.draft_tree.Level`."""

    tokens: Any
    weights: Any
    parents: Any
    numbers: Any
    paths: Any
    sees: Any


def next_level(
    tokens: Int[jax.Array, "B k k"],
    edges: Float[jax.Array, "B k k"],
    numbers: Int[jax.Array, "B k"],
    weights: Float[jax.Array, "B k"],
    paths: Int[jax.Array, "B k path"],
    sees: Bool[jax.Array, "B k window"],
    s: Int[jax.Array, ""],
    root_rows: int,
    interpret: bool = False,
) -> tuple[
    Int[jax.Array, "B kk"],
    Float[jax.Array, "B kk"],
    Int[jax.Array, "B k"],
    Float[jax.Array, "B k"],
    Int[jax.Array, "B k"],
    Int[jax.Array, "B k"],
    Int[jax.Array, "B k path"],
    Bool[jax.Array, "B k window"],
]:
    """Implements `shared.spec.draft_tree.next_level`; returns the fields of the level."""
    (B, k, path), window = paths.shape, sees.shape[2]
    of = jax.ShapeDtypeStruct
    node, weight = of((B, k), jnp.int32), of((B, k), jnp.float32)
    parents, path_weights, level = pl.pallas_call(
        functools.partial(_next_level_kernel, root_rows=root_rows),
        grid=(B,),
        out_shape=(
            *(of((B, k * k), jnp.int32), of((B, k * k), jnp.float32)),
            Level(
                tokens=node,
                weights=weight,
                parents=node,
                numbers=node,
                paths=of((B, k, path), jnp.int32),
                sees=of((B, k, window), jnp.int8),
            ),
        ),
        compiler_params=pltriton.CompilerParams(num_warps=1 if k * k <= 64 else 4, num_stages=1),
        interpret=interpret,
        name="tree_next_level",
    )(
        Expanded(
            tokens=tokens.reshape(B, k * k),
            edges=edges.reshape(B, k * k),
            numbers=numbers,
            weights=weights,
            paths=paths,
            sees=sees.astype(jnp.int8),
        ),
        jnp.reshape(s, (1,)),
    )
    return parents, path_weights, *level._replace(sees=level.sees.astype(bool))


def _next_level_kernel(expanded, s_ref, found_parents_ref, found_weights_ref, level, *, root_rows):
    """One program per request; candidates are its lanes."""
    (_, width, path), window = expanded.paths.shape, expanded.sees.shape[2]
    request, s, count = pl.program_id(0), s_ref[0], width * width
    lane = lax.iota(jnp.int32, pl.next_power_of_2(count))
    is_in = lane < count
    # Lanes without a candidate get an index outside the array, which the interpreter requires.
    place, parent = jnp.where(is_in, lane, count), jnp.where(is_in, lane // width, width)

    def weight_of(some):
        inside = some < count
        at, of = jnp.minimum(some, count - 1), jnp.minimum(some // width, width - 1)
        weight = pltriton.load(expanded.weights.at[request, of], mask=inside, other=0.0)
        return weight + pltriton.load(expanded.edges.at[request, at], mask=inside, other=0.0)

    weight = weight_of(lane)
    of = pltriton.load(expanded.numbers.at[request, parent], mask=is_in, other=0)
    pltriton.store(found_weights_ref.at[request, place], weight, mask=is_in)
    pltriton.store(found_parents_ref.at[request, place], of, mask=is_in)
    rank = _rank(key_of(weight), lane, count, lambda other: key_of(weight_of(other)))
    keep = is_in & (rank < width)
    at = jnp.where(keep, rank, width)
    token = pltriton.load(expanded.tokens.at[request, place], mask=keep, other=0)
    number = 1 + width + (s - 1) * count + lane
    fields = ((level.tokens, token), (level.weights, weight), (level.numbers, number))
    for ref, x in (*fields, (level.parents, request * width + lane // width)):
        pltriton.store(ref.at[request, at], x, mask=keep)
    for old_ref, new_ref, size in (
        (expanded.paths, level.paths, path),
        (expanded.sees, level.sees, window),
    ):
        column = lax.iota(jnp.int32, pl.next_power_of_2(size))[None, :]
        both, column = keep[:, None] & (column < size), jnp.minimum(column, size)
        old = pltriton.load(old_ref.at[request, parent[:, None], column], mask=both, other=0)
        if new_ref is level.paths:
            new = jnp.where(column == s, token[:, None], old)
        else:
            is_self = column == root_rows + s * width + rank[:, None]
            new = ((old != 0) | is_self).astype(jnp.int8)
        pltriton.store(new_ref.at[request, at[:, None], column], new, mask=both)


def _rank(key, lane, count, key_at):
    """Counts the candidates before each one; among equal ones the lower index is first."""

    def add(chunk, rank):
        other = chunk * _AT_ONCE + lax.iota(jnp.int32, _AT_ONCE)
        other_keys = jnp.where(other < count, key_at(other), LOWEST)
        is_equal = (other_keys[None, :] == key[:, None]) & (other[None, :] < lane[:, None])
        is_before = (other_keys[None, :] > key[:, None]) | is_equal
        return rank + is_before.astype(jnp.int32).sum(axis=1)

    return lax.fori_loop(0, pl.cdiv(count, _AT_ONCE), add, jnp.zeros(lane.shape, jnp.int32))


def _is_best(key, count):
    """Returns whether each key is among the `count` largest; the first ones among equal keys."""

    def is_open(span):
        low, high = span
        return low < high

    def halve(span):
        low, high = span
        middle = (low & high) + ((low ^ high) >> 1)
        is_below = (key > middle).astype(jnp.int32).sum() >= count
        return jnp.where(is_below, middle + 1, low), jnp.where(is_below, high, middle)

    start = jnp.int32(LOWEST), jnp.int32(HIGHEST)
    low, _ = lax.while_loop(is_open, halve, start)
    is_tie = (key == low).astype(jnp.int32)
    room = count - (key > low).astype(jnp.int32).sum()
    return (key > low) | ((is_tie > 0) & (lax.cumsum(is_tie, axis=0) <= room))


class Candidates(NamedTuple):
    """Candidates of each request, and the number of nodes that it may keep."""

    newest: Any
    tokens: Any
    weights: Any
    parents: Any
    max_drafts: Any
    has_relay: Any


class BestNodes(NamedTuple):
    """Trees of the best candidates, and the candidate of each node."""

    tokens: Any
    parents: Any
    num_nodes: Any
    weights: Any
    node_of: Any


def keep_best(
    newest: Int[jax.Array, " B"],
    tokens: Int[jax.Array, "B C"],
    weights: Float[jax.Array, "B C"],
    parents: Int[jax.Array, "B C"],
    max_drafts: Int[jax.Array, " B"],
    has_relay: Bool[jax.Array, " B"],
    nodes: int,
    interpret: bool = False,
) -> tuple[
    Int[jax.Array, "B N"],
    Int[jax.Array, "B N"],
    Int[jax.Array, " B"],
    Float[jax.Array, "B N"],
]:
    """Implements `shared.spec.draft_tree.keep_best`."""
    B, C = tokens.shape
    of, node = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((B, nodes), jnp.int32)
    (kept,) = pl.pallas_call(
        functools.partial(_keep_best_kernel, interpret=interpret),
        grid=(B,),
        out_shape=(
            BestNodes(
                tokens=node,
                parents=node,
                num_nodes=of((B,), jnp.int32),
                weights=of((B, nodes), jnp.float32),
                node_of=of((B, C), jnp.int32),
            ),
        ),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="tree_keep_best",
    )(
        Candidates(
            newest=newest,
            tokens=tokens,
            weights=weights,
            parents=parents,
            max_drafts=max_drafts,
            has_relay=has_relay.astype(jnp.int8),
        )
    )
    return kept.tokens, kept.parents, kept.num_nodes, kept.weights


def _keep_best_kernel(candidates, kept, *, interpret):
    """One program per request; candidates are its lanes."""
    request, (count, nodes) = pl.program_id(0), (candidates.tokens.shape[1], kept.tokens.shape[1])
    lane = lax.iota(jnp.int32, pl.next_power_of_2(count))
    is_in, place = lane < count, jnp.minimum(lane, count)

    def weight_at(some):
        at = candidates.weights.at[request, jnp.minimum(some, count - 1)]
        return pltriton.load(at, mask=some < count, other=0.0)

    weight = weight_at(lane)
    key = jnp.where(is_in, key_of(weight), LOWEST)
    most = jnp.clip(candidates.max_drafts[request], 0, min(nodes - 1, count))
    num_drafts = jnp.where(candidates.has_relay[request] != 0, most, 0)
    if len(lane) <= _MOST_RANKED:
        rank = _rank(key, lane, count, lambda other: key_of(weight_at(other)))
        keep = is_in & (rank < num_drafts)
    else:
        keep = is_in & _is_best(key, num_drafts)
    node = lax.cumsum(keep.astype(jnp.int32), axis=0)
    pltriton.store(kept.node_of.at[request, place], node, mask=is_in)
    if not interpret:
        pltriton.debug_barrier()  # other threads than the writers read them
    parent = pltriton.load(candidates.parents.at[request, place], mask=keep, other=0)
    at = kept.node_of.at[request, jnp.maximum(parent - 1, 0)]
    parent = pltriton.load(at, mask=keep & (parent > 0), other=0, volatile=True)
    token = pltriton.load(candidates.tokens.at[request, place], mask=keep, other=0)
    target = lax.iota(jnp.int32, pl.next_power_of_2(nodes))
    is_rest = (target < nodes) & ((target == 0) | (target > num_drafts))
    root = jnp.where(target == 0, candidates.newest[request], 0)
    # Lanes that store nothing get an index outside the array, which the interpreter requires.
    node, target = jnp.where(keep, node, nodes), jnp.where(is_rest, target, nodes)
    stores = (kept.tokens, token, root), (kept.parents, parent, 0 * root)
    for ref, x, rest in (*stores, (kept.weights, weight, jnp.zeros(target.shape, jnp.float32))):
        pltriton.store(ref.at[request, node], x, mask=keep)
        pltriton.store(ref.at[request, target], rest, mask=is_rest)
    kept.num_nodes[request] = 1 + num_drafts


def chains(
    drafts: Int[jax.Array, "B S"],
    newest: Int[jax.Array, " B"],
    max_drafts: Int[jax.Array, " B"],
    can_draft: Bool[jax.Array, " B"],
    interpret: bool = False,
) -> tuple[Int[jax.Array, "B N"], Int[jax.Array, "B N"], Int[jax.Array, " B"]]:
    """Implements `shared.spec.draft_tree.chains`."""
    B, S = drafts.shape
    outputs = pl.pallas_call(
        _chains_kernel,
        grid=(B,),
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((B, S + 1), (B, S + 1), (B,))
        ],
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="draft_chains",
    )(drafts, newest, max_drafts, can_draft.astype(jnp.int8))
    return tuple(outputs)


def _chains_kernel(
    drafts_ref, newest_ref, max_drafts_ref, can_draft_ref, tokens_ref, parents_ref, num_nodes_ref
):
    """One program per request; nodes are its lanes."""
    request, depth = pl.program_id(0), drafts_ref.shape[1]
    node = lax.iota(jnp.int32, pl.next_power_of_2(depth + 1))
    most = jnp.clip(max_drafts_ref[request], 0, depth)
    num_drafts = jnp.where(can_draft_ref[request] != 0, most, 0)
    is_draft, is_node = (node > 0) & (node <= num_drafts), node <= depth
    at = drafts_ref.at[request, jnp.clip(node - 1, 0, depth - 1)]
    draft = pltriton.load(at, mask=is_draft, other=0)
    token, parent = (
        jnp.where(node == 0, newest_ref[request], draft),
        jnp.where(is_draft, node - 1, 0),
    )
    at = jnp.minimum(node, depth + 1)  # outside the array, for the interpreter
    pltriton.store(tokens_ref.at[request, at], token, mask=is_node)
    pltriton.store(parents_ref.at[request, at], parent, mask=is_node)
    num_nodes_ref[request] = 1 + num_drafts
