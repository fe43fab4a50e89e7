"""Which drafts of a tree become text: one rule for every temperature and every drafter.

Each node has the target's choice for the token after it. From the root, the walk goes to the
child that carries the choice, and stops where there is none. The tokens of the step are the choices
on the way, so they depend on the prefix, the parameters and the seed, never on the drafts; the last
one, the bonus token, is not in the tree and has no KV yet.
"""

import numpy as np
from jaxtyping import Bool, Int


def force(
    tokens: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    choices: Int[np.ndarray, "B N"],
    forced: Bool[np.ndarray, " B"],
) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, " B"]]:
    """Puts a forced row's own tokens in the place of the target's choices.

    A forced row is a chain of n nodes. Nodes 0 to n - 2 are accepted whatever the target says, and
    the bonus token is the token of node n - 1: it has no KV, as the newest token never has, and so
    the row walks as one of n - 1 nodes. A forced row of one node has nothing to force.

    Returns:
      The choices and the node counts with which to `walk`.
    """
    following = np.concatenate([tokens[:, 1:], choices[:, -1:]], axis=1)
    forces = forced & (num_nodes > 1)
    return np.where(forces[:, None], following, choices), num_nodes - forces.astype(num_nodes.dtype)


def walk(
    tokens: Int[np.ndarray, "B N"],
    parents: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    choices: Int[np.ndarray, "B N"],
    depth: int,
) -> tuple[Int[np.ndarray, "B W"], Int[np.ndarray, " B"]]:
    """Follows the target's choices from each root.

    Args:
      tokens, parents: The trees; siblings carry different tokens.
      num_nodes: Real nodes of each tree; the others are never accepted.
      choices: The target's token after each node.
      depth: S, the most drafts that can be accepted; W = S + 1.

    Returns:
      The nodes on the way, the root first, and how many there are: accepted drafts + 1. Entries
      past the count repeat the last node of the way, so that a gather stays in the tree.
    """
    B, N = tokens.shape
    node = np.zeros(B, np.int32)
    path, counts = [node], np.ones(B, np.int32)
    for _ in range(depth):
        wanted = np.take_along_axis(choices, node[:, None], axis=1)
        is_next = (parents == node[:, None]) & (tokens == wanted)
        is_next &= (np.arange(N) > 0) & (np.arange(N) < num_nodes[:, None])
        found = is_next.any(axis=1)
        node = np.where(found, is_next.argmax(axis=1), node).astype(np.int32)
        path.append(node)
        counts = counts + found.astype(np.int32)
    return np.stack(path, axis=1), counts


def emitted(
    choices: Int[np.ndarray, "B N"], path: Int[np.ndarray, "B W"], counts: Int[np.ndarray, " B"]
) -> Int[np.ndarray, "B W"]:
    """The step's tokens, the bonus token last; 0 past a row's count (0: a failed row)."""
    chosen = np.take_along_axis(choices, path, axis=1)
    return np.where(np.arange(path.shape[1]) < counts[:, None], chosen, 0).astype(np.int32)


def failed(is_bad: Bool[np.ndarray, "B N"], path: Int[np.ndarray, "B W"]) -> Bool[np.ndarray, " B"]:
    """Whether a logit on the way was not finite; elsewhere in the tree it cannot reach the text."""
    return np.any(np.take_along_axis(is_bad, path, axis=1), axis=1)
