"""Trie of n-grams with LRU eviction, as compiled loops over flat arrays.

A node represents the tokens on the path from its scope's root: an n-gram. Adding a token to a
sequence visits one node per n-gram that ends with it. The *anchors* of a sequence are the nodes of
its newest 0, 1, .. D - 1 tokens; the children of an anchor are the tokens that followed these
before. Several scopes (tenants, or single requests) share one array, each below its own root; a
walk from a root never leaves its scope.

Siblings are listed by recency, newest first: a child that is visited again moves to the front. This
list decides all ties, so the same sequences in the same order give the same drafts on any build. If
the array is full, the least recently visited leaf is evicted.

Node 0 means none. A freed node gets another number in `BORN` when it is reused, so that stale
anchors are detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from shared.engine.jit import compiled

TOKEN, PARENT, FIRST, PREV, NEXT, COUNT, OLDER, NEWER, CHAIN, BORN = range(10)
"""Columns of a node: token and parent, first child, siblings, number of visits, neighbours in
eviction order (leaves only), next node of its hash bucket, and number of reuses."""

NUM_COLUMNS = 10
USED, FREE, LIVE, OLDEST, NEWEST, READ = range(6)
"""Entries of the head: rows ever used, first free row, live nodes, ends of the eviction order, and
the unused result of `_read_ahead`."""

NUM_HEADS = 6

Nodes = Int32[np.ndarray, "rows columns"]
Buckets = Int32[np.ndarray, " buckets"]
Head = Int64[np.ndarray, " heads"]


class NewTokens(NamedTuple):
    """New tokens of several sequences.

    Attributes:
      rows: Row of each sequence.
      tokens: Their new tokens, concatenated.
      starts: Start of each sequence in `tokens`, and the end.
    """

    rows: Int32[np.ndarray, " n"]
    tokens: Int32[np.ndarray, " T"]
    starts: Int32[np.ndarray, " n+1"]

    @classmethod
    def of(cls, texts: Sequence[tuple[int, Sequence[int]]]) -> NewTokens:
        """Returns rows and their new tokens as arrays."""
        return cls(
            rows=np.array([row for row, _ in texts], np.int32),
            tokens=np.array([token for _, new in texts for token in new], np.int32),
            starts=np.array([0, *accumulate(len(new) for _, new in texts)], np.int32),
        )


@dataclass
class Trie:
    """Arrays of a trie.

    Attributes:
      nodes: One row per node, see the columns above.
      buckets: First node of each hash bucket, by parent and token; the number is a power of two.
      head: See its entries above.
    """

    nodes: Nodes
    buckets: Buckets
    head: Head

    @classmethod
    def empty(cls, capacity: int) -> Trie:
        """Returns a trie with rows for `capacity` - 1 nodes.

        The arrays have their full size from the start and never move. They are zeros, for which the
        system allocates memory page by page as rows are used. Growing an array would stall all
        requests while it is copied and its buckets are filled again: about one second for some
        millions of nodes.
        """
        head = np.zeros(NUM_HEADS, np.int64)
        head[USED] = 1
        buckets = np.zeros(1 << (capacity - 1).bit_length(), np.int32)
        return cls(np.zeros((capacity, NUM_COLUMNS), np.int32), buckets, head)

    @property
    def num_nodes(self) -> int:
        """Live nodes, including the roots."""
        return int(self.head[LIVE])

    def new_root(self) -> int:
        """Returns a new root without children; 0 if there is no room."""
        return int(new_root(self.nodes, self.buckets, self.head))

    def drop(self, root: int) -> None:
        """Frees a root and everything below it."""
        if root:
            drop(self.nodes, self.buckets, self.head, root)

    def extend(self, anchors: Int32[np.ndarray, "texts D 2"], new: NewTokens) -> None:
        """Adds new tokens to sequences and advances their anchors; see `extend` of this module."""
        extend(self.nodes, self.buckets, self.head, anchors, new.rows, new.tokens, new.starts)

    def advance(self, anchors: Int32[np.ndarray, "texts D 2"], new: NewTokens) -> None:
        """Advances anchors by new tokens, without adding them."""
        advance(self.nodes, self.buckets, anchors, new.rows, new.tokens, new.starts)


@compiled
def _bucket(parent: int, token: int, buckets: Buckets) -> int:
    key = parent * 0x9E3779B1 + token * 0x85EBCA77
    return (key ^ (key >> 29)) & (len(buckets) - 1)


@compiled
def find(nodes: Nodes, buckets: Buckets, parent: int, token: int) -> int:
    """Returns the child of `parent` with `token`, or 0."""
    node = buckets[_bucket(parent, token, buckets)]
    while node and (nodes[node, PARENT] != parent or nodes[node, TOKEN] != token):
        node = nodes[node, CHAIN]
    return node


@compiled
def _leave_order(nodes: Nodes, head: Head, node: int) -> None:
    older, newer = nodes[node, OLDER], nodes[node, NEWER]
    if older:
        nodes[older, NEWER] = newer
    else:
        head[OLDEST] = newer
    if newer:
        nodes[newer, OLDER] = older
    else:
        head[NEWEST] = older


@compiled
def _join_as_newest(nodes: Nodes, head: Head, node: int) -> None:
    nodes[node, OLDER], nodes[node, NEWER] = head[NEWEST], 0
    if head[NEWEST]:
        nodes[head[NEWEST], NEWER] = node
    else:
        head[OLDEST] = node
    head[NEWEST] = node


@compiled
def _join_as_oldest(nodes: Nodes, head: Head, node: int) -> None:
    nodes[node, OLDER], nodes[node, NEWER] = 0, head[OLDEST]
    if head[OLDEST]:
        nodes[head[OLDEST], OLDER] = node
    else:
        head[NEWEST] = node
    head[OLDEST] = node


@compiled
def _leave_siblings(nodes: Nodes, node: int) -> None:
    parent, before, after = nodes[node, PARENT], nodes[node, PREV], nodes[node, NEXT]
    if before:
        nodes[before, NEXT] = after
    else:
        nodes[parent, FIRST] = after
    if after:
        nodes[after, PREV] = before


@compiled
def _join_siblings(nodes: Nodes, node: int) -> None:
    parent = nodes[node, PARENT]
    first = nodes[parent, FIRST]
    nodes[node, PREV], nodes[node, NEXT] = 0, first
    if first:
        nodes[first, PREV] = node
    nodes[parent, FIRST] = node


@compiled
def _free(nodes: Nodes, head: Head, node: int) -> None:
    born = nodes[node, BORN]
    nodes[node] = 0
    nodes[node, BORN] = born + 1
    nodes[node, NEXT] = head[FREE]
    head[FREE] = node
    head[LIVE] -= 1


@compiled
def _delete(nodes: Nodes, buckets: Buckets, head: Head, node: int) -> None:
    """Removes a leaf; a parent that becomes a leaf was visited no later, so it is the oldest."""
    parent = nodes[node, PARENT]
    at = _bucket(parent, nodes[node, TOKEN], buckets)
    if buckets[at] == node:
        buckets[at] = nodes[node, CHAIN]
    else:
        other = buckets[at]
        while nodes[other, CHAIN] != node:
            other = nodes[other, CHAIN]
        nodes[other, CHAIN] = nodes[node, CHAIN]
    _leave_siblings(nodes, node)
    _leave_order(nodes, head, node)
    _free(nodes, head, node)
    if nodes[parent, FIRST] == 0 and nodes[parent, PARENT]:
        _join_as_oldest(nodes, head, parent)


@compiled
def _allocate(nodes: Nodes, buckets: Buckets, head: Head) -> int:
    """Returns a free row, evicting the least recently visited leaf if needed; 0 if there is
    none.
    """
    if head[FREE] == 0 and head[USED] == len(nodes) and head[OLDEST]:
        _delete(nodes, buckets, head, head[OLDEST])
    node = head[FREE]
    if node:
        head[FREE] = nodes[node, NEXT]
        nodes[node, NEXT] = 0
    elif head[USED] < len(nodes):
        node = head[USED]
        head[USED] += 1
    else:
        return 0
    head[LIVE] += 1
    return node


@compiled
def new_root(nodes: Nodes, buckets: Buckets, head: Head) -> int:
    """Returns a row without a parent, outside of the eviction order."""
    node = _allocate(nodes, buckets, head)
    if node:
        nodes[node, TOKEN] = -1
    return node


@compiled
def drop(nodes: Nodes, buckets: Buckets, head: Head, root: int) -> None:
    """Frees a subtree from its leaves up."""
    node = root
    while nodes[root, FIRST]:
        if nodes[node, FIRST]:
            node = nodes[node, FIRST]
        else:
            parent = nodes[node, PARENT]
            _delete(nodes, buckets, head, node)
            node = parent
    _free(nodes, head, root)


@compiled
def _pass(nodes: Nodes, buckets: Buckets, head: Head, parent: int, token: int) -> int:
    """Records a visit from `parent` to `token`; returns the child, 0 if there is no room."""
    node = find(nodes, buckets, parent, token)
    if node:
        _leave_siblings(nodes, node)
        _join_siblings(nodes, node)
        nodes[node, COUNT] += 1
        if nodes[node, FIRST] == 0:
            _leave_order(nodes, head, node)
            _join_as_newest(nodes, head, node)
        return node
    was_leaf = nodes[parent, FIRST] == 0 and nodes[parent, PARENT] != 0
    if was_leaf:  # it must not be evicted from here on
        _leave_order(nodes, head, parent)
    node = _allocate(nodes, buckets, head)
    if node == 0:
        if was_leaf:
            _join_as_newest(nodes, head, parent)
        return 0
    if not was_leaf and nodes[parent, FIRST] == 0 and nodes[parent, PARENT]:
        _leave_order(nodes, head, parent)  # its only child was evicted for the new node
    nodes[node, TOKEN], nodes[node, PARENT], nodes[node, COUNT] = token, parent, 1
    at = _bucket(parent, token, buckets)
    nodes[node, CHAIN] = buckets[at]
    buckets[at] = node
    _join_siblings(nodes, node)
    _join_as_newest(nodes, head, node)
    return node


@compiled
def _read_ahead(nodes: Nodes, buckets: Buckets, at: Int32[np.ndarray, "D 2"], token: int) -> int:
    """Prefetches what visiting a token at every anchor will read; the result prevents its removal
    by the compiler.

    Each read misses the CPU caches. The reads of different anchors are independent, so they overlap
    here, whereas in `_pass` each waits for the previous one: half of the time of `extend`.
    """
    total = 0
    for depth in range(len(at)):
        total += nodes[at[depth, 0], FIRST] + buckets[_bucket(at[depth, 0], token, buckets)]
    for depth in range(len(at)):
        node = at[depth, 0]
        child = buckets[_bucket(node, token, buckets)]
        total += nodes[child, TOKEN] + nodes[nodes[node, FIRST], PREV]
        total += nodes[nodes[node, OLDER], NEWER] + nodes[nodes[node, NEWER], OLDER]
    return total


@compiled
def extend(
    nodes: Nodes,
    buckets: Buckets,
    head: Head,
    anchors: Int32[np.ndarray, "texts D 2"],
    texts: Int32[np.ndarray, " n"],
    tokens: Int32[np.ndarray, " T"],
    starts: Int32[np.ndarray, " n+1"],
) -> None:
    """Adds tokens to sequences and advances their anchors.

    Args:
      nodes, buckets, head: The trie.
      anchors: [texts, D, 2] node and birth number of each sequence's newest 0..D-1 tokens.
      texts: [n] rows of `anchors`.
      tokens, starts: New tokens of all n sequences, concatenated; start of each, and the end.
    """
    D = anchors.shape[1]
    for index in range(len(texts)):
        at = anchors[texts[index]]
        for place in range(starts[index], starts[index + 1]):
            head[READ] = _read_ahead(nodes, buckets, at, tokens[place])
            for depth in range(D - 1, -1, -1):
                node, child = at[depth, 0], 0
                if node and nodes[node, BORN] == at[depth, 1]:
                    child = _pass(nodes, buckets, head, node, tokens[place])
                if depth + 1 < D:
                    at[depth + 1, 0], at[depth + 1, 1] = child, nodes[child, BORN]


@compiled
def advance(
    nodes: Nodes,
    buckets: Buckets,
    anchors: Int32[np.ndarray, "texts D 2"],
    texts: Int32[np.ndarray, " n"],
    tokens: Int32[np.ndarray, " T"],
    starts: Int32[np.ndarray, " n+1"],
) -> None:
    """Advances anchors by new tokens like `extend`, without adding: unknown n-grams are 0."""
    D = anchors.shape[1]
    for index in range(len(texts)):
        at = anchors[texts[index]]
        for place in range(starts[index], starts[index + 1]):
            for depth in range(D - 2, -1, -1):
                node, child = at[depth, 0], 0
                if node and nodes[node, BORN] == at[depth, 1]:
                    child = find(nodes, buckets, node, tokens[place])
                at[depth + 1, 0], at[depth + 1, 1] = child, nodes[child, BORN]


@compiled
def forget(
    nodes: Nodes,
    buckets: Buckets,
    head: Head,
    root: int,
    text: Int32[np.ndarray, " T"],
    keep: int,
    D: int,
) -> None:
    """Removes the n-grams of `text` that end at `keep` or later, latest first."""
    for end in range(len(text) - 1, keep - 1, -1):
        for start in range(max(0, end - D + 1), end + 1):
            node = root
            for place in range(start, end + 1):
                node = find(nodes, buckets, node, text[place])
                if node == 0:
                    break
            if node == 0:
                continue
            nodes[node, COUNT] -= 1
            if nodes[node, COUNT] <= 0 and nodes[node, FIRST] == 0:
                _delete(nodes, buckets, head, node)
