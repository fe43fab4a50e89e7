"""N-gram drafting (prompt lookup) on the device: a hash table of n-grams, and the draft trees it
yields.

The table stores the tokens that followed n-grams of 1, 2, ... 16 tokens. It has an entry for each
n-gram and following token, in one of `WAYS` ways of a group selected by the n-gram's hash; the
token selects the way. Later writes overwrite earlier ones, so the table never grows, and its
contents depend only on the order of writes. A second hash is stored with an entry: a mismatch means
that the entry belongs to another n-gram. Both hashes start from the scope (tenant or request), so
scopes never read each other's entries.

A tree grows by its most likely candidate. The estimated probability of a token depends on the
length of its n-gram and on its rank at that place: longer n-grams first, then the most recent
entry. Probabilities are integers (fixed point), so every implementation grows the same tree.

The host is not involved: a step inserts the tokens that it commits, and the next step drafts from
them.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""N-gram lengths that are looked up. All lengths up to 16 find hardly more: on four tasks of the
demo model 1.97, 3.24, 2.40 and 2.71 tokens per step, versus 1.96, 3.24, 2.41 and 2.67 with these.
"""

WINDOW = LENGTHS[-1]
"""Number of last tokens of a sequence that are used."""

WAYS = 8
"""Ways (entries) of a group."""

LATEST = 2**31 - 1
"""Value at which clocks wrap around."""

MOST_AGE = 2**28 - 1
"""Ages from this value on count as equal."""

UNITS = 1024
"""Fixed-point units per natural logarithm unit, so that weights are integers."""

MULTIPLIERS = 0x01000193, 0x5BD1E995
"""Multipliers of the two hashes: the primes of FNV and MurmurHash2."""


@dataclass(frozen=True)
class NgramTable:
    """Hash table entries by n-gram length, group and way.

    Attributes:
      tokens: Following token + 1; 0 for an empty entry.
      checks: Second hash of the n-gram.
      stamps: Time of the write, by the clock of its length.
      clocks: Number of writes so far for each length.
    """

    tokens: Int32[np.ndarray, "lengths groups ways"]
    checks: Int32[np.ndarray, "lengths groups ways"]
    stamps: Int32[np.ndarray, "lengths groups ways"]
    clocks: Int32[np.ndarray, " lengths"]

    @classmethod
    def empty(cls, groups: int) -> "NgramTable":
        """Returns an empty table; `groups`, per length, is a power of two."""
        tokens, checks, stamps = np.zeros((3, len(LENGTHS), groups, WAYS), np.int32)
        return cls(tokens, checks, stamps, np.zeros(len(LENGTHS), np.int32))


@dataclass(frozen=True)
class NgramState:
    """N-gram state between steps.

    Attributes:
      tails: Last tokens of each slot's sequence, including the newest.
      table: Followers of n-grams of all sequences.
    """

    tails: Int32[np.ndarray, "slots window"]
    table: NgramTable


@dataclass(frozen=True)
class BuiltTrees:
    """Draft trees; node 0 is the newest token.

    Attributes:
      tokens, parents, num_nodes: The trees.
      weights: Log of the estimated probability that the output continues up to each node; minus
        infinity for padding.
    """

    tokens: Int[np.ndarray, "B N"]
    parents: Int[np.ndarray, "B N"]
    num_nodes: Int[np.ndarray, " B"]
    weights: Float[np.ndarray, "B N"]


def width_of(nodes: int, accept_rule: str) -> int:
    """Returns the maximum children of a node for trees of `nodes` nodes; rejection rules need
    chains.
    """
    return min(WAYS, nodes - 1) if accept_rule == "exact" else 1


def hash_mix(values: Int32[np.ndarray, "*shape"]) -> Int32[np.ndarray, "*shape"]:
    """Mixes the bits of hashes.

    Source: the finaliser of MurmurHash3, Appleby 2011.
    """
    mixed = values.view(np.uint32)
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
    return (mixed ^ (mixed >> 16)).view(np.int32)


def keys(
    contexts: Int[np.ndarray, "n window"], scopes: Int[np.ndarray, "n 2"], length: int
) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
    """Returns two hashes of the last `length` tokens of sequences, before mixing."""
    hashes = []
    for scope, multiplier in zip(scopes.T, MULTIPLIERS, strict=True):
        key = scope.astype(np.uint32)
        for token in contexts[:, WINDOW - length :].astype(np.uint32).T:
            key = key * np.uint32(multiplier) + token + np.uint32(1)
        hashes.append(key.view(np.int32))
    return hashes[0], hashes[1]


def insert(
    table: NgramTable,
    contexts: Int[np.ndarray, "n window"],
    following: Int[np.ndarray, " n"],
    scopes: Int[np.ndarray, "n 2"],
    is_real: Bool[np.ndarray, " n"],
) -> NgramTable:
    """Inserts the tokens that followed sequences; of several writes to one entry the last remains.

    Args:
      table: The table.
      contexts: Last tokens of each sequence, the newest last; -1 before its start.
      following: Token that came next.
      scopes: Scope of each sequence, as two int32; each starts one of the hashes.
      is_real: False for entries that are not inserted; the clocks count them.
    """
    groups, n = table.tokens.shape[1], len(contexts)
    tokens, checks, stamps = (x.copy() for x in (table.tokens, table.checks, table.stamps))
    way = hash_mix(following.astype(np.int32) + 1) & (WAYS - 1)
    for place, length in enumerate(LENGTHS):
        first, second = keys(contexts, scopes, length)
        rows = np.flatnonzero(is_real & (contexts[:, WINDOW - length] >= 0))
        at = place, (hash_mix(first) & (groups - 1))[rows], way[rows]
        tokens[at] = following[rows] + 1  # numpy keeps the last of those with one place
        checks[at] = hash_mix(second)[rows]
        stamps[at] = (int(table.clocks[place]) + rows) & LATEST
    clocks = (table.clocks.astype(np.int64) + n) & LATEST
    return NgramTable(tokens, checks, stamps, clocks.astype(np.int32))


def children(
    table: NgramTable, context: Int[np.ndarray, " window"], scope: Int[np.ndarray, " 2"], width: int
) -> list[tuple[int, int]]:
    """Returns the most likely next tokens, at most `width`, with their costs in `UNITS`."""
    groups, entries = table.tokens.shape[1], list[tuple[int, int, int]]()
    for place, length in enumerate(LENGTHS):
        if context[WINDOW - length] < 0:
            continue
        first, second = keys(context[None], scope[None], length)
        at = place, int(hash_mix(first)[0]) & (groups - 1)
        for way in range(WAYS):
            if table.tokens[at][way] and table.checks[at][way] == hash_mix(second)[0]:
                age = (int(table.clocks[place]) - int(table.stamps[at][way])) & LATEST
                entries.append((-place, min(age, MOST_AGE), int(table.tokens[at][way]) - 1))
    children: dict[int, int] = {}
    for longest_first, _, token in sorted(entries, key=lambda entry: entry[:2]):
        if token not in children and len(children) < width:
            children[token] = cost(-longest_first, len(children))
    return list(children.items())


def cost(place: int, elders: int) -> int:
    """Returns the cost of a token in `UNITS`: the negative log of its estimated probability.

    The first token of the longest n-gram is right nine times in ten, after one token three times in
    ten. Each of the first two ranks divides the probability by about three.

    Args:
      place: Index of the n-gram's length in `LENGTHS`.
      elders: Number of more likely tokens at the same place.
    """
    return 108 + 23 * (len(LENGTHS) - 1 - place) ** 2 + 1232 * min(elders, 2)


def draft(
    table: NgramTable,
    contexts: Int[np.ndarray, "B window"],
    scopes: Int[np.ndarray, "B 2"],
    max_drafts: Int[np.ndarray, " B"],
    nodes: int,
    depth: int,
    width: int,
) -> BuiltTrees:
    """Grows a draft tree for each sequence, adding the most likely candidate first; ties go to the
    earlier one.

    Args:
      table: The table.
      contexts, scopes: See `insert`; the newest token is the root.
      max_drafts: Maximum number of nodes per request, without the root.
      nodes: N, maximum nodes of a tree.
      depth: S, levels below the root.
      width: k, maximum children of a node.
    """
    B = len(contexts)
    tokens, parents = np.zeros((2, B, nodes), np.int32)
    weights, num_nodes = np.full((B, nodes), -np.inf, np.float32), np.ones(B, np.int32)
    tokens[:, 0], weights[:, 0] = contexts[:, -1], 0
    for b in range(B):
        texts, levels, costs = [contexts[b]], [0], [0]
        candidates = list[tuple[int, int, int]]()  # cost, parent, token
        for node in range(1, min(nodes, 1 + int(max_drafts[b]))):
            if levels[-1] < depth:
                below = children(table, texts[-1], scopes[b], width)
                candidates += [(costs[-1] + more, node - 1, token) for token, more in below]
            if not candidates:
                break
            best = min(candidates, key=lambda candidate: candidate[0])
            candidates.remove(best)
            costs.append(best[0])
            parents[b, node], tokens[b, node] = best[1:]
            texts.append(np.append(texts[best[1]][1:], best[2]))
            levels.append(levels[best[1]] + 1)
            weights[b, node], num_nodes[b] = -best[0] / UNITS, node + 1
    return BuiltTrees(tokens, parents, num_nodes, weights)


def windows(
    tails: Int[np.ndarray, "B window"], tokens: Int[np.ndarray, "B W"]
) -> Int[np.ndarray, "B W window"]:
    """Returns the tokens before each of the tokens that continue sequences.

    Args:
      tails: Last tokens of each sequence.
      tokens: The continuation of each sequence.
    """
    stream = np.concatenate([tails, tokens], axis=1)
    before = np.lib.stride_tricks.sliding_window_view(stream, WINDOW, axis=1)
    return before[:, : tokens.shape[1]]


def update_tails(
    tails: Int[np.ndarray, "B window"],
    tokens: Int[np.ndarray, "B W"],
    counts: Int[np.ndarray, " B"],
) -> Int[np.ndarray, "B window"]:
    """Returns the last tokens of each sequence after it has grown by the first `counts` tokens."""
    stream = np.concatenate([tails, tokens], axis=1)
    at = counts[:, None] + np.arange(WINDOW)
    return np.take_along_axis(stream, at, axis=1)


def prompt_windows(
    tokens: Int[np.ndarray, " T"],
    row_starts: Int[np.ndarray, " B1"],
    request: Int[np.ndarray, " T"],
    before: Int[np.ndarray, "B window"],
) -> Int[np.ndarray, "T window"]:
    """Returns the context that ends with each token of prompt chunks.

    Args:
      tokens, row_starts: All chunks, concatenated; start of each chunk, and the end.
      request: Request of each token.
      before: Tokens before each chunk.
    """
    place = np.arange(len(tokens)) - row_starts[request]
    at = place[:, None] - (WINDOW - 1) + np.arange(WINDOW)
    own = tokens[np.maximum(row_starts[request][:, None] + at, 0)]
    return np.where(at >= 0, own, before[request[:, None], np.minimum(WINDOW + at, WINDOW - 1)])


def learn_prompts(
    memory: NgramState,
    slots: Int[np.ndarray, " B"],
    windows: Int[np.ndarray, "T window"],
    following: Int[np.ndarray, " T"],
    request: Int[np.ndarray, " T"],
    last: Int[np.ndarray, " B"],
    scopes: Int[np.ndarray, "B 2"],
    is_real: Bool[np.ndarray, " T"],
) -> NgramState:
    """Inserts prompt chunks.

    Args:
      memory: N-gram state.
      slots: Slots of the requests.
      windows, request: Contexts from `prompt_windows`; request of each token.
      following: Token after each token of the chunks.
      last: Index of each chunk's last token.
      scopes: Scope of each request.
      is_real: True for tokens that are inserted, with a following token of the same sequence.
    """
    table = insert(memory.table, windows, following, scopes[request], is_real)
    tails = memory.tails.copy()
    tails[slots] = update_tails(windows[last], following[last][:, None], np.ones_like(last))
    return NgramState(tails, table)


def learn_outputs(
    memory: NgramState,
    slots: Int[np.ndarray, " B"],
    tokens: Int[np.ndarray, "B W"],
    counts: Int[np.ndarray, " B"],
    scopes: Int[np.ndarray, "B 2"],
) -> NgramState:
    """Inserts the tokens that a step has committed: the first `counts` of each row."""
    B, W = tokens.shape
    old_tails = memory.tails[slots]
    before, is_real = windows(old_tails, tokens), np.arange(W) < counts[:, None]
    table = insert(
        memory.table,
        before.reshape(B * W, WINDOW),
        tokens.reshape(-1),
        np.repeat(scopes, W, axis=0),
        is_real.reshape(-1),
    )
    tails = memory.tails.copy()
    tails[slots] = update_tails(old_tails, tokens, counts)
    return NgramState(tails, table)
