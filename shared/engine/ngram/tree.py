"""Growth of n-gram draft trees from the trie and the corpora, as compiled loops.

A tree first takes the paths of the matching corpora, each up to its share. Then it takes the trie's
continuations, anchor by anchor with the longest match first. Remaining nodes go to the corpus with
the longest match. A continuation that is already in the tree costs no node, so siblings have
different tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int32, Int64

from shared.engine.jit import compiled
from shared.engine.ngram.trie import BORN, COUNT, FIRST, NEXT, TOKEN, Buckets, Nodes, find

SCANNED_CHILDREN = 64
"""Newest children of a node that are ranked by frequency."""


MATCHES, COUNTS, ELDERS = 6, 4, 3
KINDS = MATCHES * COUNTS * ELDERS
"""Number of kinds of nodes: by length of the match (1, 2, 3, to 7, to 15, longer), frequency
(unknown for a corpus, 1, to 3, more), and earlier siblings (0, 1, more)."""


class TreeParams(NamedTuple):
    """Parameters of tree growth.

    Attributes:
      corpus_nodes: Nodes that the corpora share.
      by_frequency: True to rank children by frequency instead of recency.
      min_breadth, max_breadth: Children of an anchor of the longest and of the shortest match.
      depth: S, levels below the root.
      chain: True if every tree must be a chain.
    """

    corpus_nodes: int
    by_frequency: bool
    min_breadth: int
    max_breadth: int
    depth: int
    chain: bool


class CorpusContinuations(NamedTuple):
    """Continuations of n sequences in C corpora.

    Attributes:
      paths: [n, C, S] tokens.
      lengths: [n, C] number of tokens.
      matched: [n, C] length of the match.
    """

    paths: Int32[np.ndarray, "n C S"]
    lengths: Int32[np.ndarray, "n C"]
    matched: Int32[np.ndarray, "n C"]


class NgramTreeBatch(NamedTuple):
    """Trees of n sequences, see `HostDraft`; node 0 is the root.

    Attributes:
      tokens, parents, num_nodes: The trees.
      evidence: Kind of each node, below `KINDS`; 0 for a root.
    """

    tokens: Int32[np.ndarray, "n N"]
    parents: Int32[np.ndarray, "n N"]
    num_nodes: Int32[np.ndarray, " n"]
    evidence: Int32[np.ndarray, "n N"]


def roots_of(count: int, nodes: int) -> NgramTreeBatch:
    """Returns trees with only a root, with room for `nodes` nodes."""
    tokens, parents, evidence = np.zeros((3, count, nodes), np.int32)
    return NgramTreeBatch(tokens, parents, np.ones(count, np.int32), evidence)


def corpus_nodes(trees: NgramTreeBatch, row: int) -> list[int]:
    """Returns the nodes of a row's tree that come from an external corpus."""
    kinds = trees.evidence[row, 1 : trees.num_nodes[row]] // ELDERS % COUNTS
    return (1 + np.flatnonzero(kinds == 0)).tolist()


class _Tree(NamedTuple):
    """Tree of one sequence, which grows to at most `limit` nodes."""

    tokens: Int32[np.ndarray, " N"]
    parents: Int32[np.ndarray, " N"]
    evidence: Int32[np.ndarray, " N"]
    limit: int
    depth: int
    chain: bool


@compiled
def _child_of(tree: _Tree, size: int, parent: int, token: int) -> int:
    """Returns the node below `parent` with `token`, or 0."""
    for node in range(parent + 1, size):
        if tree.parents[node] == parent and tree.tokens[node] == token:
            return node
    return 0


@compiled
def _kind(matched: int, times: int, elders: int) -> int:
    """Returns the kind of a node, below `KINDS`.

    Args:
      matched: Length of the match that it continues, including the path to its parent.
      times: Its frequency there; 0 for a corpus, which has no counts.
      elders: Earlier children of its parent.
    """
    length = 0
    while length < MATCHES - 1 and matched > 1:
        matched, length = matched // 2 if matched > 3 else matched - 1, length + 1
    often = 0 if times < 1 else 1 if times == 1 else 2 if times < 4 else 3
    return (length * COUNTS + often) * ELDERS + min(elders, ELDERS - 1)


@compiled
def _add(tree: _Tree, size: int, parent: int, token: int, matched: int, times: int) -> int:
    """Adds node `size` below `parent`; returns 0 if a chain would branch."""
    if tree.chain and parent != size - 1:
        return 0
    elders = 0
    for node in range(parent + 1, size):
        elders += tree.parents[node] == parent
    tree.tokens[size], tree.parents[size] = token, parent
    tree.evidence[size] = _kind(matched, times, elders)
    return size


@compiled
def _add_path(
    tree: _Tree, size: int, path: Int32[np.ndarray, " S"], length: int, most: int, matched: int
) -> int:
    """Adds at most `most` new nodes along a path from the root; returns the new size."""
    parent, stop = 0, size + most
    for place in range(length):
        node = _child_of(tree, size, parent, path[place])
        if node == 0:
            if size == stop:
                break
            node = _add(tree, size, parent, path[place], matched + place, 0)
            if node == 0:
                break
            size += 1
        parent = node
    return size


@compiled
def _add_corpora(
    tree: _Tree,
    size: int,
    most: int,
    paths: Int32[np.ndarray, "C S"],
    lengths: Int32[np.ndarray, " C"],
    matched: Int32[np.ndarray, " C"],
) -> tuple[int, int]:
    """Adds the path of each well-matching corpus, up to its share of `most` nodes, longest match
    first.

    The shares are equal; a match less than half as long as the longest gets none.

    Returns:
      The new size, and the corpus with the longest match, or -1.
    """
    longest, best, num_matching = 0, -1, 0
    for corpus in range(len(paths)):
        if lengths[corpus] and matched[corpus] > longest:
            longest, best = matched[corpus], corpus
    for corpus in range(len(paths)):
        num_matching += lengths[corpus] > 0 and 2 * matched[corpus] >= longest
    if num_matching == 0:
        return size, -1
    share, stop = max(1, most // num_matching), size + most
    order = np.argsort(-matched, kind="mergesort")
    for rank in range(len(order)):
        corpus = int(order[rank])
        if lengths[corpus] and 2 * matched[corpus] >= longest and size < stop:
            new = min(share, stop - size)
            length = lengths[corpus]
            size = _add_path(tree, size, paths[corpus], length, new, matched[corpus])
    return size, best


@compiled
def _add_by_recency(
    tree: _Tree,
    size: int,
    nodes: Nodes,
    anchor: int,
    breadth: float,
    fall: float,
    match: int,
    queue: Int64[np.ndarray, "entries 3"],
) -> int:
    """Adds the newest children level by level, fewer on each level; returns the new size."""
    queue[0, 0], queue[0, 1], queue[0, 2] = anchor, 0, 0
    first, last = 0, 1
    while first < last and size < tree.limit:
        source, parent, level = queue[first, 0], queue[first, 1], queue[first, 2]
        first += 1
        if level == tree.depth:
            break
        left = max(1, int(breadth - level * fall))
        child = nodes[source, FIRST]
        while child and left and size < tree.limit:
            node = _child_of(tree, size, parent, nodes[child, TOKEN])
            if node == 0:
                # A removed n-gram may remain as an inner node; at least 1, because 0 means a
                # corpus.
                times = max(1, nodes[child, COUNT])
                node = _add(tree, size, parent, nodes[child, TOKEN], match + level, times)
                if node == 0:
                    break
                size += 1
            queue[last, 0], queue[last, 1], queue[last, 2] = child, node, level + 1
            last += 1
            left -= 1
            child = nodes[child, NEXT]
    return size


@compiled
def _push_children(
    nodes: Nodes,
    source: int,
    parent: int,
    level: int,
    weight: float,
    breadth: int,
    heap: Int64[np.ndarray, "entries 3"],
    weights: Float64[np.ndarray, " entries"],
    last: int,
) -> int:
    """Adds the most frequent children of a trie node to the candidates."""
    first, total, child = last, 0.0, nodes[source, FIRST]
    for _ in range(SCANNED_CHILDREN):
        if child == 0:
            break
        # Sorted by descending count; of equal counts the newer one is first.
        count, at = nodes[child, COUNT], last
        while at > first and nodes[heap[at - 1, 0], COUNT] < count:
            at -= 1
        if at < first + breadth:
            last = min(last + 1, first + breadth)
            for move in range(last - 1, at, -1):
                heap[move] = heap[move - 1]
            heap[at, 0], heap[at, 1], heap[at, 2] = child, parent, level
        child = nodes[child, NEXT]
    for at in range(first, last):
        total += max(nodes[heap[at, 0], COUNT], 0)
    for at in range(first, last):
        weights[at] = weight * max(nodes[heap[at, 0], COUNT], 0) / max(total, 1.0)
    return last


@compiled
def _add_by_frequency(
    tree: _Tree,
    size: int,
    nodes: Nodes,
    anchor: int,
    breadth: int,
    match: int,
    heap: Int64[np.ndarray, "entries 3"],
    weights: Float64[np.ndarray, " entries"],
) -> int:
    """Adds the most probable continuations first, whatever their level; returns the new size."""
    last = _push_children(nodes, anchor, 0, 1, 1.0, breadth, heap, weights, 0)
    while size < tree.limit:
        best = -1
        for at in range(last):
            if weights[at] > 0.0 and (best < 0 or weights[at] > weights[best]):
                best = at
        if best < 0:
            break
        source, parent, level = heap[best, 0], heap[best, 1], heap[best, 2]
        weight, weights[best] = weights[best], 0.0
        node = _child_of(tree, size, parent, nodes[source, TOKEN])
        if node == 0:
            times = nodes[source, COUNT]
            node = _add(tree, size, parent, nodes[source, TOKEN], match + level - 1, times)
            if node == 0:
                continue
            size += 1
        if level < tree.depth:
            last = _push_children(
                nodes, source, node, level + 1, weight, breadth, heap, weights, last
            )
    return size


@compiled
def extend_path(
    nodes: Nodes,
    buckets: Buckets,
    anchors: Int32[np.ndarray, "texts D 2"],
    texts: Int32[np.ndarray, " n"],
    most: Int32[np.ndarray, " n"],
    growth: TreeParams,
    trees: NgramTreeBatch,
) -> None:
    """Starts each tree with one path that treats its own tokens as part of the sequence.

    Each token is the newest (or the most frequent) child of the longest match, and advances the
    match. A path can therefore be longer than any stored n-gram.

    Args:
      nodes, buckets, anchors, texts, growth: See `draft`.
      most: [n] nodes of each path.
      trees: Trees with roots only, to which the paths are added.
    """
    D = anchors.shape[1]
    at, moved = np.empty((D, 2), np.int64), np.empty((D, 2), np.int64)
    for row in range(len(texts)):
        at[:] = anchors[texts[row]]
        tree = _Tree(
            trees.tokens[row],
            trees.parents[row],
            trees.evidence[row],
            most[row] + 1,
            growth.depth,
            growth.chain,
        )
        size = 1
        while size < tree.limit and size <= tree.depth:
            child, matched = 0, 0
            for match in range(D - 1, 0, -1):
                anchor = at[match, 0]
                if anchor and nodes[anchor, BORN] == at[match, 1] and nodes[anchor, FIRST]:
                    child, matched = nodes[anchor, FIRST], match
                    break
            if child == 0:
                break
            if growth.by_frequency:
                child = _most_frequent(nodes, child)
            token, times = nodes[child, TOKEN], max(1, nodes[child, COUNT])
            size = _add(tree, size, size - 1, token, matched, times) + 1
            moved[0] = at[0]
            for depth in range(D - 1):
                node, after = at[depth, 0], 0
                if node and nodes[node, BORN] == at[depth, 1]:
                    after = find(nodes, buckets, node, token)
                moved[depth + 1, 0], moved[depth + 1, 1] = after, nodes[after, BORN]
            at[:] = moved
        trees.num_nodes[row] = size


@compiled
def _most_frequent(nodes: Nodes, first: int) -> int:
    """Returns the most frequent child of a node, of equals the newest; `first` is the newest."""
    best, child = first, first
    for _ in range(SCANNED_CHILDREN):
        if child == 0:
            break
        if nodes[child, COUNT] > nodes[best, COUNT]:
            best = child
        child = nodes[child, NEXT]
    return best


@compiled
def draft(
    nodes: Nodes,
    anchors: Int32[np.ndarray, "texts D 2"],
    texts: Int32[np.ndarray, " n"],
    limits: Int32[np.ndarray, " n"],
    continuations: CorpusContinuations,
    growth: TreeParams,
    trees: NgramTreeBatch,
) -> None:
    """Fills the trees of n sequences.

    Args:
      nodes, anchors, texts: See `trie.extend`.
      limits: [n] maximum nodes of each tree including its root.
      continuations: Continuations in the corpora.
      growth: Parameters of all trees.
      trees: Trees with roots, or with their first paths; filled.
    """
    D, N = anchors.shape[1], trees.tokens.shape[1]
    fall = (growth.max_breadth - growth.min_breadth) / max(1, D - 1)
    queue = np.empty((2 * N + growth.max_breadth + 2, 3), np.int64)
    candidates = N * growth.max_breadth + growth.max_breadth if growth.by_frequency else 1
    heap, weights = np.empty((candidates, 3), np.int64), np.empty(candidates)
    for row in range(len(texts)):
        limit = min(limits[row], N)
        paths, lengths = continuations.paths[row], continuations.lengths[row]
        tree = _Tree(
            trees.tokens[row],
            trees.parents[row],
            trees.evidence[row],
            limit,
            growth.depth,
            growth.chain,
        )
        most = min(growth.corpus_nodes, limit - 1)
        matched_of, begun = continuations.matched[row], trees.num_nodes[row]
        most = min(most, limit - begun)
        size, best = _add_corpora(tree, begun, most, paths, lengths, matched_of)
        at = anchors[texts[row]]
        for match in range(D - 1, 0, -1):
            anchor = at[match, 0]
            if size == limit:
                break
            if anchor == 0 or nodes[anchor, BORN] != at[match, 1] or nodes[anchor, FIRST] == 0:
                continue
            if growth.by_frequency:
                size = _add_by_frequency(
                    tree, size, nodes, anchor, growth.max_breadth, match, heap, weights
                )
            else:
                breadth = (D - match) * fall + growth.min_breadth
                size = _add_by_recency(tree, size, nodes, anchor, breadth, fall, match, queue)
        if best >= 0 and growth.corpus_nodes:
            length, matched = lengths[best], continuations.matched[row, best]
            size = _add_path(tree, size, paths[best], length, limit - size, matched)
        trees.num_nodes[row] = size
