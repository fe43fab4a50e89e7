"""N-gram hash table and its draft trees; same as `shared.spec.ngram`.

On a GPU `insert` and `draft` are kernels; see `jax_impl.ops`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from jax_impl.ops import Kernels, kernel_or_reference
from shared.spec.ngram import LATEST, LENGTHS, MOST_AGE, MULTIPLIERS, UNITS, WAYS, WINDOW, cost

_NONE = 2**30
"""The cost of no candidate."""


class NgramTable(NamedTuple):
    """Table entries by n-gram length, group and index; same fields as in the specification."""

    tokens: Int[jax.Array, "lengths groups ways"]
    checks: Int[jax.Array, "lengths groups ways"]
    stamps: Int[jax.Array, "lengths groups ways"]
    clocks: Int[jax.Array, " lengths"]


class NgramState(NamedTuple):
    """N-gram state between steps; same fields as in the specification."""

    tails: Int[jax.Array, "slots window"]
    table: NgramTable


class BuiltTrees(NamedTuple):
    """Draft trees; same fields as in the specification."""

    tokens: Int[jax.Array, "B N"]
    parents: Int[jax.Array, "B N"]
    num_nodes: Int[jax.Array, " B"]
    weights: Float[jax.Array, "B N"]


def hash_mix(values: Int[jax.Array, "*shape"]) -> Int[jax.Array, "*shape"]:
    """Mixes all 32 bits of a hash; the mask clears the sign bits that the shift copies in."""
    mixed = (values ^ ((values >> 16) & 0xFFFF)) * (0x85EBCA6B - 2**32)
    mixed = (mixed ^ ((mixed >> 13) & 0x7FFFF)) * (0xC2B2AE35 - 2**32)
    return mixed ^ ((mixed >> 16) & 0xFFFF)


def keys(
    contexts: Int[jax.Array, "n window"], scopes: Int[jax.Array, "n 2"]
) -> tuple[Int[jax.Array, "n lengths"], Int[jax.Array, "n lengths"], Bool[jax.Array, "n lengths"]]:
    """Returns two hashes of the last n tokens for each n, and True if n tokens exist."""
    begins = WINDOW - jnp.array(LENGTHS, jnp.int32)
    found = []
    for scope, multiplier in zip(scopes.T, MULTIPLIERS, strict=True):
        key = jnp.repeat(scope[:, None], len(LENGTHS), axis=1)
        for place in range(WINDOW):
            longer = key * multiplier + contexts[:, place, None] + 1
            key = jnp.where(place >= begins, longer, key)
        found.append(hash_mix(key))
    return found[0], found[1], contexts[:, begins] >= 0


def plain_insert(
    table: NgramTable,
    contexts: Int[jax.Array, "n window"],
    following: Int[jax.Array, " n"],
    scopes: Int[jax.Array, "n 2"],
    is_real: Bool[jax.Array, " n"],
) -> NgramTable:
    """Adds the tokens that followed contexts; the last of several writes to one entry wins."""
    groups, n = table.tokens.shape[1], len(contexts)
    first, second, is_there = keys(contexts, scopes)
    length = jnp.arange(len(LENGTHS), dtype=jnp.int32)
    entry = (length * groups + (first & (groups - 1))) * WAYS
    entry += (hash_mix(following + 1) & (WAYS - 1))[:, None]
    stamp = (table.clocks + jnp.arange(n, dtype=jnp.int32)[:, None]) & LATEST
    entry = jnp.where(is_there & is_real[:, None], entry, -1).T.reshape(-1)
    # After sorting by entry, the last write to an entry is the last of its run.
    order = jnp.argsort(entry, stable=True)
    at = entry[order]
    is_last = (at != jnp.roll(at, -1)).at[-1].set(True)
    at = jnp.where(is_last & (at >= 0), at, table.tokens.size)

    def written(
        held: Int[jax.Array, "lengths groups ways"], new: Int[jax.Array, " entries"]
    ) -> Int[jax.Array, "lengths groups ways"]:
        return held.reshape(-1).at[at].set(new[order], mode="drop").reshape(held.shape)

    return NgramTable(
        tokens=written(table.tokens, jnp.tile(following + 1, len(LENGTHS))),
        checks=written(table.checks, second.T.reshape(-1)),
        stamps=written(table.stamps, stamp.T.reshape(-1)),
        clocks=(table.clocks + n) & LATEST,
    )


def kernel_insert(
    kernels: Kernels,
    table: NgramTable,
    contexts: Int[jax.Array, "n window"],
    following: Int[jax.Array, " n"],
    scopes: Int[jax.Array, "n 2"],
    is_real: Bool[jax.Array, " n"],
) -> NgramTable:
    return NgramTable(*kernels.ngram.insert(*table, contexts, following, scopes, is_real))


insert = kernel_or_reference(kernel_insert, plain_insert)


def _children(
    table: NgramTable,
    contexts: Int[jax.Array, "B window"],
    scopes: Int[jax.Array, "B 2"],
    width: int,
) -> tuple[Int[jax.Array, "B k"], Int[jax.Array, "B k"]]:
    """Returns the most likely tokens after contexts and their costs; `_NONE` for missing ones."""
    groups, (first, second, is_there) = table.tokens.shape[1], keys(contexts, scopes)
    length = jnp.arange(len(LENGTHS), dtype=jnp.int32)
    group = first & (groups - 1)
    tokens, checks, stamps = (x[length, group] for x in (table.tokens, table.checks, table.stamps))
    is_found = is_there[:, :, None] & (tokens > 0) & (checks == second[:, :, None])
    age = jnp.minimum((table.clocks[:, None] - stamps) & LATEST, MOST_AGE)
    rank = length[:, None] * (MOST_AGE + 1) + MOST_AGE - age
    rank = jnp.where(is_found, rank, -1).reshape(len(contexts), -1)
    entry, found, costs = tokens.reshape(rank.shape), [], []
    for elders in range(width):
        best = rank.argmax(axis=1, keepdims=True)
        value, token = (jnp.take_along_axis(x, best, axis=1) for x in (rank, entry))
        shorter = len(LENGTHS) - 1 - jnp.maximum(value, 0) // (MOST_AGE + 1)
        after = cost(len(LENGTHS) - 1, elders) + 23 * shorter**2
        found.append(token - 1)
        costs.append(jnp.where(value >= 0, after, _NONE))
        rank = jnp.where(entry == token, -1, rank)
    return jnp.concatenate(found, axis=1), jnp.concatenate(costs, axis=1)


def plain_draft(
    table: NgramTable,
    contexts: Int[jax.Array, "B window"],
    scopes: Int[jax.Array, "B 2"],
    max_drafts: Int[jax.Array, " B"],
    nodes: int,
    depth: int,
    width: int,
) -> BuiltTrees:
    """Builds a tree for each context by adding the most likely token below any node in turn."""
    B, row = len(contexts), jnp.arange(len(contexts))
    none = jnp.zeros((B, nodes), jnp.int32)
    tokens = none.at[:, 0].set(contexts[:, -1])
    texts = jnp.repeat(contexts[:, None], nodes, axis=1)
    open_costs = jnp.full((B, (nodes - 1) * width), _NONE, jnp.int32)

    def grow(node: jax.Array, state: tuple) -> tuple:
        tokens, parents, costs, levels, texts, open_costs, open_tokens, num_nodes = state
        found, more = _children(table, texts[:, node - 1], scopes, width)
        is_open = (num_nodes == node) & (levels[:, node - 1] < depth)
        more = jnp.minimum(costs[:, node - 1, None] + more, _NONE)
        more = jnp.where(is_open[:, None], more, _NONE)
        at = (0, (node - 1) * width)
        open_costs = lax.dynamic_update_slice(open_costs, more, at)
        open_tokens = lax.dynamic_update_slice(open_tokens, found, at)
        best = open_costs.argmin(axis=1)
        price, token, parent = open_costs[row, best], open_tokens[row, best], best // width
        grows = (num_nodes == node) & (price < _NONE) & (node <= max_drafts)
        longer = jnp.concatenate([texts[row, parent, 1:], token[:, None]], axis=1)
        return (
            tokens.at[:, node].set(jnp.where(grows, token, 0)),
            parents.at[:, node].set(jnp.where(grows, parent, 0)),
            costs.at[:, node].set(price),
            levels.at[:, node].set(levels[row, parent] + 1),
            texts.at[:, node].set(longer),
            open_costs.at[row, best].set(_NONE),
            open_tokens,
            num_nodes + grows,
        )

    ones = jnp.ones(B, jnp.int32)
    state = (tokens, none, none, none, texts, open_costs, jnp.zeros_like(open_costs), ones)
    tokens, parents, costs, *_, num_nodes = lax.fori_loop(1, nodes, grow, state)
    is_node = jnp.arange(nodes) < num_nodes[:, None]
    weights = jnp.where(is_node, -costs.astype(jnp.float32) / UNITS, -jnp.inf)
    return BuiltTrees(tokens, parents, num_nodes, weights)


def kernel_draft(
    kernels: Kernels,
    table: NgramTable,
    contexts: Int[jax.Array, "B window"],
    scopes: Int[jax.Array, "B 2"],
    max_drafts: Int[jax.Array, " B"],
    nodes: int,
    depth: int,
    width: int,
) -> BuiltTrees:
    given = (contexts, scopes, max_drafts, nodes, depth, width)
    return BuiltTrees(*kernels.ngram.draft(*table, *given))


draft = kernel_or_reference(kernel_draft, plain_draft)


def windows(
    tails: Int[jax.Array, "B window"], tokens: Int[jax.Array, "B W"]
) -> Int[jax.Array, "B W window"]:
    """Returns the context window before each of the new tokens."""
    stream = jnp.concatenate([tails, tokens], axis=1)
    at = jnp.arange(tokens.shape[1])[:, None] + jnp.arange(WINDOW)
    return stream[:, at]


def update_tails(
    tails: Int[jax.Array, "B window"], tokens: Int[jax.Array, "B W"], counts: Int[jax.Array, " B"]
) -> Int[jax.Array, "B window"]:
    """Returns the last tokens of each row after the new tokens."""
    stream = jnp.concatenate([tails, tokens], axis=1)
    return jnp.take_along_axis(stream, counts[:, None] + jnp.arange(WINDOW), axis=1)


def prompt_windows(
    tokens: Int[jax.Array, " T"],
    row_starts: Int[jax.Array, " B1"],
    request: Int[jax.Array, " T"],
    before: Int[jax.Array, "B window"],
) -> Int[jax.Array, "T window"]:
    """Returns the context window that ends with each token of the prompt chunks."""
    starts = row_starts[request]
    place = jnp.arange(len(tokens), dtype=jnp.int32) - starts
    at = place[:, None] - (WINDOW - 1) + jnp.arange(WINDOW, dtype=jnp.int32)
    own = tokens[jnp.maximum(starts[:, None] + at, 0)]
    return jnp.where(at >= 0, own, before[request[:, None], jnp.minimum(WINDOW + at, WINDOW - 1)])


def learn_prompts(
    memory: NgramState,
    slots: Int[jax.Array, " B"],
    windows: Int[jax.Array, "T window"],
    following: Int[jax.Array, " T"],
    request: Int[jax.Array, " T"],
    last: Int[jax.Array, " B"],
    scopes: Int[jax.Array, "B 2"],
    is_real: Bool[jax.Array, " T"],
) -> NgramState:
    """Adds prompt chunks to the table."""
    table = insert(memory.table, windows, following, scopes[request], is_real)
    tails = jnp.concatenate([windows[last, 1:], following[last][:, None]], axis=1)
    return NgramState(memory.tails.at[slots].set(tails), table)


def learn_outputs(
    memory: NgramState,
    slots: Int[jax.Array, " B"],
    tokens: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
    scopes: Int[jax.Array, "B 2"],
) -> NgramState:
    """Adds committed tokens to the table: the first `counts` of the tokens of each row."""
    (B, W), held = tokens.shape, memory.tails[slots]
    is_real = jnp.arange(W) < counts[:, None]
    flat = windows(held, tokens).reshape(B * W, WINDOW), tokens.reshape(-1)
    table = insert(memory.table, *flat, jnp.repeat(scopes, W, axis=0), is_real.reshape(-1))
    return NgramState(memory.tails.at[slots].set(update_tails(held, tokens, counts)), table)
