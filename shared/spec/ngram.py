"""N-grams of seen text in a table on the device, and the draft trees that follow from them.

The table says which tokens came after a text's last 1, 2, .. 16 tokens before. It has an entry for
each such n-gram and token, in one of `WAYS` places of a group that the n-gram's hash names; the
token says which place. What is written later takes the place of what lay there, so the table never
grows, and what it holds follows from the order of the texts alone. A second hash is kept beside an
entry: where it differs, the entry is another n-gram's. Both begin with the scope of the text, its
tenant or its request, so no scope reads another one's entries.

A tree grows by its likeliest node. How likely a token is follows from the length of the n-gram it
came after, and from how many tokens are likelier in the same place: the longest n-gram's come
first, and of one n-gram's the one that was written last. Chances are whole numbers, so every
implementation grows the same tree.

Nothing here needs the host: what a step commits is learnt in the step, and the next one drafts from
it.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Tokens of the n-grams that are looked up. All lengths up to 16 find hardly more: of four kinds of
the model's tasks 1.97, 3.24, 2.40 and 2.71 tokens a step for 1.96, 3.24, 2.41 and 2.67."""

WINDOW = LENGTHS[-1]
"""Tokens of a text that matter."""

WAYS = 8
"""Places of a group."""

LATEST = 2**31 - 1
"""Clocks go round here."""

MOST_AGE = 2**28 - 1
"""Entries that are older count as equally old."""

UNITS = 1024
"""Of a natural logarithm, so that weights are whole numbers of them."""

MULTIPLIERS = 0x01000193, 0x5BD1E995
"""Of the two hashes: FNV's prime and MurmurHash2's."""


@dataclass(frozen=True)
class Table:
    """Entries by length, group and place.

    Attributes:
      tokens: One more than the token; 0 where nothing was written.
      checks: The second hash of the n-gram before it.
      stamps: When it was written, by the clock of its length.
      clocks: Of each length, how much was written so far.
    """

    tokens: Int32[np.ndarray, "lengths groups ways"]
    checks: Int32[np.ndarray, "lengths groups ways"]
    stamps: Int32[np.ndarray, "lengths groups ways"]
    clocks: Int32[np.ndarray, " lengths"]

    @classmethod
    def empty(cls, groups: int) -> "Table":
        """A table without entries; `groups`, of each length, is a power of two."""
        tokens, checks, stamps = np.zeros((3, len(LENGTHS), groups, WAYS), np.int32)
        return cls(tokens, checks, stamps, np.zeros(len(LENGTHS), np.int32))


@dataclass(frozen=True)
class Memory:
    """What is kept of texts from one step to the next.

    Attributes:
      tails: The last tokens of each slot's text, with the newest.
      table: What followed n-grams of all texts.
    """

    tails: Int32[np.ndarray, "slots window"]
    table: Table


@dataclass(frozen=True)
class Grown:
    """Draft trees; node 0 carries the newest token.

    Attributes:
      weights: For each node the logarithm of the chance that the text goes on as far as it; of
        padding minus infinity.
    """

    tokens: Int[np.ndarray, "B N"]
    parents: Int[np.ndarray, "B N"]
    num_nodes: Int[np.ndarray, " B"]
    weights: Float[np.ndarray, "B N"]


def width_of(nodes: int, accept_rule: str) -> int:
    """Most children of a node in trees of so many nodes; rules but "exact" take chains."""
    return min(WAYS, nodes - 1) if accept_rule == "exact" else 1


def mix(values: Int32[np.ndarray, "*shape"]) -> Int32[np.ndarray, "*shape"]:
    """Spreads what differs over all 32 bits.

    Source: the last step of MurmurHash3, Appleby 2011.
    """
    mixed = values.view(np.uint32)
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
    return (mixed ^ (mixed >> 16)).view(np.int32)


def keys(
    contexts: Int[np.ndarray, "n window"], scopes: Int[np.ndarray, "n 2"], length: int
) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
    """Two hashes of the last `length` tokens of texts, each before it is mixed."""
    found = []
    for scope, multiplier in zip(scopes.T, MULTIPLIERS, strict=True):
        key = scope.astype(np.uint32)
        for token in contexts[:, WINDOW - length :].astype(np.uint32).T:
            key = key * np.uint32(multiplier) + token + np.uint32(1)
        found.append(key.view(np.int32))
    return found[0], found[1]


def learn(
    table: Table,
    contexts: Int[np.ndarray, "n window"],
    following: Int[np.ndarray, " n"],
    scopes: Int[np.ndarray, "n 2"],
    is_real: Bool[np.ndarray, " n"],
) -> Table:
    """Enters what came after texts; of those that want one place, the last has it.

    Args:
      contexts: The last tokens of each text, the newest last; -1 before its beginning.
      following: The token that came next.
      scopes: Whose text it is, in two words: one begins each hash.
      is_real: The others are left out; the clocks count them.
    """
    groups, n = table.tokens.shape[1], len(contexts)
    tokens, checks, stamps = (x.copy() for x in (table.tokens, table.checks, table.stamps))
    way = mix(following.astype(np.int32) + 1) & (WAYS - 1)
    for place, length in enumerate(LENGTHS):
        first, second = keys(contexts, scopes, length)
        rows = np.flatnonzero(is_real & (contexts[:, WINDOW - length] >= 0))
        at = place, (mix(first) & (groups - 1))[rows], way[rows]
        tokens[at] = following[rows] + 1  # numpy keeps the last of those with one place
        checks[at] = mix(second)[rows]
        stamps[at] = (int(table.clocks[place]) + rows) & LATEST
    clocks = (table.clocks.astype(np.int64) + n) & LATEST
    return Table(tokens, checks, stamps, clocks.astype(np.int32))


def children(
    table: Table, context: Int[np.ndarray, " window"], scope: Int[np.ndarray, " 2"], width: int
) -> list[tuple[int, int]]:
    """The likeliest tokens after a text, at most `width`, and what each costs in `UNITS`."""
    groups, entries = table.tokens.shape[1], list[tuple[int, int, int]]()
    for place, length in enumerate(LENGTHS):
        if context[WINDOW - length] < 0:
            continue
        first, second = keys(context[None], scope[None], length)
        at = place, int(mix(first)[0]) & (groups - 1)
        for way in range(WAYS):
            if table.tokens[at][way] and table.checks[at][way] == mix(second)[0]:
                age = (int(table.clocks[place]) - int(table.stamps[at][way])) & LATEST
                entries.append((-place, min(age, MOST_AGE), int(table.tokens[at][way]) - 1))
    found: dict[int, int] = {}
    for longest_first, _, token in sorted(entries, key=lambda entry: entry[:2]):
        if token not in found and len(found) < width:
            found[token] = cost(-longest_first, len(found))
    return list(found.items())


def cost(place: int, elders: int) -> int:
    """What a token costs in `UNITS`: the negative logarithm of its chance.

    The longest n-gram's is right nine times of ten, that after one token three times; a token with
    one or more before it three times less for each of the first two.

    Args:
      place: Of the n-gram's length among `LENGTHS`.
      elders: Tokens that are likelier.
    """
    return 108 + 23 * (len(LENGTHS) - 1 - place) ** 2 + 1232 * min(elders, 2)


def draft(
    table: Table,
    contexts: Int[np.ndarray, "B window"],
    scopes: Int[np.ndarray, "B 2"],
    max_drafts: Int[np.ndarray, " B"],
    nodes: int,
    depth: int,
    width: int,
) -> Grown:
    """Grows a tree from each text: node by node the likeliest token below any, of equals the first.

    Args:
      contexts, scopes: As of `learn`; the newest token is the root.
      max_drafts: Most nodes beside the root that a request may have.
      nodes: N, most nodes of a tree.
      depth: S, levels below the root.
      width: k, most children of a node.
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
    return Grown(tokens, parents, num_nodes, weights)


def windows(
    tails: Int[np.ndarray, "B window"], tokens: Int[np.ndarray, "B W"]
) -> Int[np.ndarray, "B W window"]:
    """What stands before each of the tokens that texts go on with.

    Args:
      tails: The last tokens of each text.
    """
    stream = np.concatenate([tails, tokens], axis=1)
    before = np.lib.stride_tricks.sliding_window_view(stream, WINDOW, axis=1)
    return before[:, : tokens.shape[1]]


def tails_after(
    tails: Int[np.ndarray, "B window"],
    tokens: Int[np.ndarray, "B W"],
    counts: Int[np.ndarray, " B"],
) -> Int[np.ndarray, "B window"]:
    """The last tokens of each text once it has gone on by the first `counts` of the tokens."""
    stream = np.concatenate([tails, tokens], axis=1)
    at = counts[:, None] + np.arange(WINDOW)
    return np.take_along_axis(stream, at, axis=1)


def prompt_windows(
    tokens: Int[np.ndarray, " T"],
    row_starts: Int[np.ndarray, " B1"],
    request: Int[np.ndarray, " T"],
    before: Int[np.ndarray, "B window"],
) -> Int[np.ndarray, "T window"]:
    """The texts that end with each token of prompt chunks.

    Args:
      tokens, row_starts: All chunks, and where each begins, and the end.
      request: Whose chunk each token is of.
      before: What stands before each chunk.
    """
    place = np.arange(len(tokens)) - row_starts[request]
    at = place[:, None] - (WINDOW - 1) + np.arange(WINDOW)
    own = tokens[np.maximum(row_starts[request][:, None] + at, 0)]
    return np.where(at >= 0, own, before[request[:, None], np.minimum(WINDOW + at, WINDOW - 1)])


def learn_prompts(
    memory: Memory,
    slots: Int[np.ndarray, " B"],
    windows: Int[np.ndarray, "T window"],
    following: Int[np.ndarray, " T"],
    request: Int[np.ndarray, " T"],
    last: Int[np.ndarray, " B"],
    scopes: Int[np.ndarray, "B 2"],
    is_real: Bool[np.ndarray, " T"],
) -> Memory:
    """Learns chunks of prompts.

    Args:
      windows, request: As of `prompt_windows`.
      following: The token after each of the chunks'.
      last: The place of each chunk's last token.
      is_real: Tokens that are learnt from, and followed by one of the text.
    """
    table = learn(memory.table, windows, following, scopes[request], is_real)
    tails = memory.tails.copy()
    tails[slots] = tails_after(windows[last], following[last][:, None], np.ones_like(last))
    return Memory(tails, table)


def learn_outputs(
    memory: Memory,
    slots: Int[np.ndarray, " B"],
    tokens: Int[np.ndarray, "B W"],
    counts: Int[np.ndarray, " B"],
    scopes: Int[np.ndarray, "B 2"],
) -> Memory:
    """Learns what a step has committed: the first `counts` of the tokens of each row."""
    B, W = tokens.shape
    held = memory.tails[slots]
    before, is_real = windows(held, tokens), np.arange(W) < counts[:, None]
    flat = before.reshape(B * W, WINDOW), tokens.reshape(-1), np.repeat(scopes, W, axis=0)
    table, tails = learn(memory.table, *flat, is_real.reshape(-1)), memory.tails.copy()
    tails[slots] = tails_after(held, tokens, counts)
    return Memory(tails, table)
