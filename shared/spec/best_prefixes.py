"""Best prefixes: the draft tree of a block head, of its most probable prefixes.

A block head gives the candidates of every depth in one pass. A prefix is a path of candidates from
the root, and its weight is the sum of the log weights of its edges, added in the order of the path
in float32. The tree has the N - 1 prefixes of largest weight. An edge's log weight is at most 0, so
a prefix never weighs more than its parent, and the best prefixes always form a tree. If the depths
are independent, this tree has the largest expected acceptance length of all trees of N nodes.

The first path of the tree consists of first candidates only. A head without a causal mask predicts
later depths for the first path, so its candidates are rarely right off it, and its weights do not
show this. The host therefore calibrates the edges below nodes off the first path.

The prefixes are found in the order of their weights. Each step takes the best open prefix and opens
its next sibling and its first child. At most one prefix is opened per step in addition to the one
that was taken, so N lanes suffice, and a tree of fewer nodes is the beginning of a larger one.

Source: DDTree (liranringel/ddtree), with an order that is fixed for equal weights.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from shared.spec.tree_growth import Tree

NONE = np.float32(-np.inf)
"""Weight of a prefix that is never drafted."""


def grow(
    newest: Int[np.ndarray, " B"],
    tokens: Int[np.ndarray, "B S P K"],
    edges: Float[np.ndarray, "B S P K"],
    lists: Int[np.ndarray, "B S P K"] | None,
    branch_calibration: Float[np.ndarray, "B S_max"],
    max_drafts: Int[np.ndarray, " B"],
    can_draft: Bool[np.ndarray, " B"],
    nodes: int,
) -> Tree:
    """Builds each request's tree from its best prefixes, the best first.

    Of equal weights the prefix that was opened first wins; a sibling is opened before a child.

    Args:
      newest: Token of the root.
      tokens: Candidates of each depth, best first. There are P lists of K candidates at a depth;
        the root's children are in the first list of the first depth.
      edges: Log weights of the candidates' edges, at most 0 and descending in a list. Candidates of
        weight minus infinity or NaN, and those after them in their list, are never drafted.
      lists: List of the next depth with the children of each candidate; None if P is 1, because all
        candidates of a depth have the same children.
      branch_calibration: Log weight by depth that is added to the edges below nodes off the first
        path, at most 0; S_max is at least S.
      max_drafts: Maximum number of nodes per request, without the root.
      can_draft: False for requests that get their root only.
      nodes: N.

    Returns:
      See `shared.spec.tree_growth.Tree`.
    """
    B = len(newest)
    trees = np.zeros((2, B, nodes), np.int32)  # tokens and parents
    num_nodes, weights = np.ones(B, np.int32), np.zeros((B, nodes), np.float32)
    trees[0, :, 0] = newest
    for b in range(B):
        most = int(np.clip(max_drafts[b], 0, nodes - 1)) if can_draft[b] else 0
        following = None if lists is None else lists[b]
        found = best_prefixes(edges[b], following, branch_calibration[b], most)
        for node, (parent, slot, weight) in enumerate(found, start=1):
            trees[:, b, node] = tokens[b].flat[slot], parent
            weights[b, node] = weight
        num_nodes[b] += len(found)
    return trees[0], trees[1], num_nodes, weights


def best_prefixes(
    edges: Float[np.ndarray, "S P K"],
    lists: Int[np.ndarray, "S P K"] | None,
    branch_calibration: Float[np.ndarray, " S_max"],
    most: int,
) -> list[tuple[int, int, np.float32]]:
    """Returns the best prefixes of one request, at most `most`.

    Returns:
      For each prefix, best first: the node of its parent (0 for the root, i for the i-th prefix),
      the index of its last candidate in the flat `edges`, and its weight.
    """
    S, P, K = edges.shape
    flat = np.where(edges > NONE, edges, NONE).astype(np.float32).reshape(-1)
    opened: list[tuple[np.float32, int, int, np.float32, bool]] = []

    def open_prefix(parent: int, slot: int, above: np.float32, is_off_path: bool) -> None:
        calibration = branch_calibration[slot // (P * K)] if is_off_path else np.float32(0)
        opened.append((above + (flat[slot] + calibration), parent, slot, above, is_off_path))

    found: list[tuple[int, int, np.float32]] = []
    open_prefix(0, 0, np.float32(0), False)
    taken = np.zeros(2 * most + 1, bool)
    while len(found) < most:
        weights = [NONE if taken[i] else each[0] for i, each in enumerate(opened)]
        number = int(np.argmax(weights))
        if not weights[number] > NONE:
            break
        taken[number] = True
        weight, parent, slot, above, is_off_path = opened[number]
        found.append((parent, slot, weight))
        if (slot + 1) % K:
            open_prefix(parent, slot + 1, above, is_off_path)
        if (depth := slot // (P * K) + 1) < S:
            below = 0 if lists is None else int(lists.flat[slot])
            begin = (depth * P + below) * K
            open_prefix(len(found), begin, weight, is_off_path or slot % K > 0)
    return found
