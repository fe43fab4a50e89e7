"""Draft trees from what came after a text's newest tokens before, as compiled loops.

A tree takes the paths of the matching corpora first, each up to its share, then the trie's
continuations, anchor by anchor with the longest match first, and what is left goes to the corpus
that matches longest. A continuation that the tree already has costs no node, so siblings differ.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int32, Int64

from shared.engine.ngram.compiled import compiled
from shared.engine.ngram.trie import BORN, COUNT, FIRST, NEXT, TOKEN, Nodes

SCANNED_CHILDREN = 64
"""Newest children of a node that are weighed by how often they were seen."""


@compiled
def _child_of(
    tokens: Int32[np.ndarray, " N"],
    parents: Int32[np.ndarray, " N"],
    size: int,
    parent: int,
    token: int,
) -> int:
    """The node below `parent` with `token`, or 0."""
    for node in range(parent + 1, size):
        if parents[node] == parent and tokens[node] == token:
            return node
    return 0


@compiled
def _add_path(
    tokens: Int32[np.ndarray, " N"],
    parents: Int32[np.ndarray, " N"],
    size: int,
    path: Int32[np.ndarray, " S"],
    length: int,
    most: int,
    chain: bool,
) -> int:
    """Adds at most `most` new nodes along a path from the root; returns the new size."""
    parent, stop = 0, size + most
    for place in range(length):
        node = _child_of(tokens, parents, size, parent, path[place])
        if node == 0:
            if size == stop or (chain and parent != size - 1):
                break
            node = size
            tokens[node], parents[node] = path[place], parent
            size += 1
        parent = node
    return size


@compiled
def _add_corpora(
    tokens: Int32[np.ndarray, " N"],
    parents: Int32[np.ndarray, " N"],
    size: int,
    most: int,
    paths: Int32[np.ndarray, "C S"],
    lengths: Int32[np.ndarray, " C"],
    matched: Int32[np.ndarray, " C"],
    chain: bool,
) -> tuple[int, int]:
    """Gives each corpus that matches well its share of `most` nodes, the longest match first.

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
            size = _add_path(tokens, parents, size, paths[corpus], lengths[corpus], new, chain)
    return size, best


@compiled
def _add_by_recency(
    nodes: Nodes,
    anchor: int,
    breadth: float,
    fall: float,
    tokens: Int32[np.ndarray, " N"],
    parents: Int32[np.ndarray, " N"],
    size: int,
    limit: int,
    depth: int,
    queue: Int64[np.ndarray, "entries 3"],
    chain: bool,
) -> int:
    """Level by level the newest children, fewer of them on each; returns the new size."""
    queue[0, 0], queue[0, 1], queue[0, 2] = anchor, 0, 0
    first, last = 0, 1
    while first < last and size < limit:
        source, parent, level = queue[first, 0], queue[first, 1], queue[first, 2]
        first += 1
        if level == depth:
            break
        left = max(1, int(breadth - level * fall))
        child = nodes[source, FIRST]
        while child and left and size < limit:
            node = _child_of(tokens, parents, size, parent, nodes[child, TOKEN])
            if node == 0:
                if chain and parent != size - 1:
                    break
                node = size
                tokens[node], parents[node] = nodes[child, TOKEN], parent
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
    """Puts the most frequent children of a trie node among the candidates."""
    first, total, child = last, 0.0, nodes[source, FIRST]
    for _ in range(SCANNED_CHILDREN):
        if child == 0:
            break
        # Kept in falling order of counts; among equals the newer one stays before.
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
    nodes: Nodes,
    anchor: int,
    breadth: int,
    tokens: Int32[np.ndarray, " N"],
    parents: Int32[np.ndarray, " N"],
    size: int,
    limit: int,
    depth: int,
    heap: Int64[np.ndarray, "entries 3"],
    weights: Float64[np.ndarray, " entries"],
    chain: bool,
) -> int:
    """The most probable continuation first, whatever its level; returns the new size."""
    last = _push_children(nodes, anchor, 0, 1, 1.0, breadth, heap, weights, 0)
    while size < limit:
        best = -1
        for at in range(last):
            if weights[at] > 0.0 and (best < 0 or weights[at] > weights[best]):
                best = at
        if best < 0:
            break
        source, parent, level = heap[best, 0], heap[best, 1], heap[best, 2]
        weight, weights[best] = weights[best], 0.0
        node = _child_of(tokens, parents, size, parent, nodes[source, TOKEN])
        if node == 0:
            if chain and parent != size - 1:
                continue
            node = size
            tokens[node], parents[node] = nodes[source, TOKEN], parent
            size += 1
        if level < depth:
            last = _push_children(
                nodes, source, node, level + 1, weight, breadth, heap, weights, last
            )
    return size


@compiled
def draft(
    nodes: Nodes,
    anchors: Int32[np.ndarray, "texts D 2"],
    texts: Int32[np.ndarray, " n"],
    limits: Int32[np.ndarray, " n"],
    paths: Int32[np.ndarray, "n C S"],
    lengths: Int32[np.ndarray, "n C"],
    matched: Int32[np.ndarray, "n C"],
    corpus_nodes: int,
    by_frequency: bool,
    min_breadth: int,
    max_breadth: int,
    depth: int,
    chain: bool,
    tokens: Int32[np.ndarray, "n N"],
    parents: Int32[np.ndarray, "n N"],
    num_nodes: Int32[np.ndarray, " n"],
) -> None:
    """Fills the trees of n texts.

    Args:
      nodes, anchors, texts: As in `trie.extend`.
      limits: [n] most nodes of each tree with its root.
      paths, lengths, matched: [n, C, S], [n, C], [n, C] of the corpora, as in `corpus`.
      corpus_nodes: Nodes that the corpora share.
      by_frequency: Weighs children by how often they were seen instead of how lately.
      min_breadth, max_breadth: Children of an anchor of the longest and the shortest match.
      depth: S, levels below the root.
      chain: Every tree is to be a chain.
      tokens, parents: [n, N], filled; node 0 is the root.
      num_nodes: [n], filled.
    """
    D, N = anchors.shape[1], tokens.shape[1]
    fall = (max_breadth - min_breadth) / max(1, D - 1)
    queue = np.empty((2 * N + max_breadth + 2, 3), np.int64)
    candidates = N * max_breadth + max_breadth if by_frequency else 1
    heap, weights = np.empty((candidates, 3), np.int64), np.empty(candidates)
    for row in range(len(texts)):
        size, limit = 1, min(limits[row], N)
        most = min(corpus_nodes, limit - 1)
        size, best = _add_corpora(
            tokens[row], parents[row], size, most, paths[row], lengths[row], matched[row],
            chain,
        )  # fmt: skip
        at = anchors[texts[row]]
        for match in range(D - 1, 0, -1):
            anchor = at[match, 0]
            if size == limit:
                break
            if anchor == 0 or nodes[anchor, BORN] != at[match, 1] or nodes[anchor, FIRST] == 0:
                continue
            if by_frequency:
                size = _add_by_frequency(
                    nodes, anchor, max_breadth, tokens[row], parents[row], size, limit, depth,
                    heap, weights, chain,
                )  # fmt: skip
            else:
                breadth = (D - match) * fall + min_breadth
                size = _add_by_recency(
                    nodes, anchor, breadth, fall, tokens[row], parents[row], size, limit, depth,
                    queue, chain,
                )  # fmt: skip
        if best >= 0 and corpus_nodes:
            size = _add_path(
                tokens[row], parents[row], size, paths[row, best], lengths[row, best],
                limit - size, chain,
            )  # fmt: skip
        num_nodes[row] = size
