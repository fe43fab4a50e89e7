"""Growth of dynamic draft trees with any drafter, level by level (EAGLE-2).

Source: EAGLE-2, Li et al. 2024, arXiv:2406.16858.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int

from shared.spec import draft_tree
from shared.spec.attention import AttentionRows
from shared.spec.draft_tree import Level, TreeShape

Logits = Float[np.ndarray, "R vocab"]
Tokens = Int[np.ndarray, " R"]

Rank = Callable[
    [Float[np.ndarray, "B k vocab"], Int[np.ndarray, "B k path"]],
    tuple[Int[np.ndarray, "B k width"], Float[np.ndarray, "B k width"]],
]
"""Selects the children of nodes. Inputs: their logits, and the draft tokens on the path to each
node (without the root). Outputs: the best tokens, best first, and the log weights of their edges.
"""

Lists = tuple[Int[np.ndarray, "B S P K"], Float[np.ndarray, "B S P K"], Int[np.ndarray, "B S P K"]]
"""Candidates of the slots of a block: tokens, log weights and lists; see `best_prefixes.grow`."""

RankLists = Callable[[Float[np.ndarray, "B S P P"], Int[np.ndarray, "B S P"]], Lists]
"""Ranks the candidates of a block's slots after each candidate of the slot before. Inputs: logits
of the candidates after each, and the candidates."""

MAX_LISTS = 16
"""Maximum number of candidates of a slot in a tree, if they depend on the token before."""

DraftKV = TypeVar("DraftKV")
"""KV of a drafter: pools of a head or of a model."""

Expand = Callable[[AttentionRows, Tokens, Int[np.ndarray, " R"], DraftKV], tuple[Logits, DraftKV]]
"""Runs a drafter on the nodes of a level. Inputs: their rows and tokens, and the row of each node's
parent in the previous expansion (first: its request). Outputs: their logits, and the KV."""

Tree = tuple[
    Int[np.ndarray, "B N"],
    Int[np.ndarray, "B N"],
    Int[np.ndarray, " B"],
    Float[np.ndarray, "B N"],
]
"""Result of `draft_tree.keep_best`: tokens, parents, node counts and path weights."""


@dataclass(frozen=True)
class DraftRequests:
    """Requests of a step that drafts.

    Attributes:
      newest: Newest token of each request, which is the root of its tree.
      lengths: Length of each request: the position of its newest token.
      draft_from: First position of each request with draft KV, which is complete from there to the
        length. If it equals the length, the request drafts nothing.
      max_drafts: Maximum number of draft tokens of each request.
      page_table: Pages of each request.
    """

    newest: Int[np.ndarray, " B"]
    lengths: Int[np.ndarray, " B"]
    draft_from: Int[np.ndarray, " B"]
    max_drafts: Int[np.ndarray, " B"]
    page_table: Int[np.ndarray, "B table"]

    @property
    def can_draft(self) -> Bool[np.ndarray, " B"]:
        """True for requests with draft KV."""
        return np.less(self.draft_from, self.lengths)


def grow(
    expand: "Expand[DraftKV]",
    kv: DraftKV,
    first: tuple[Int[np.ndarray, "B k"], Float[np.ndarray, "B k"]],
    requests: DraftRequests,
    shape: TreeShape,
    rank: Rank,
    root_rows: int,
) -> tuple[Tree, DraftKV]:
    """Grows draft trees level by level with any drafter.

    Expansion s (from 1) runs the drafter on the k nodes of its frontier, at position `lengths +
    root_rows + s - 1`. It writes draft KV from `lengths + root_rows + (s - 1) k` on. A node attends
    to the draft KV from `draft_from` to the length, to the root's row if there is one, and to its
    ancestors and itself.

    Args:
      expand: The drafter.
      kv: The drafter's KV.
      first: The root's children and their log weights; invalid for a request without draft KV.
      requests: Requests of the step.
      shape: Shape of the trees.
      rank: Selects each node's k children.
      root_rows: 1 if the drafter has written a row for the root, at the length; else 0.

    Returns:
      The trees, and the drafter's KV.
    """
    tokens, weights = first
    B, k = tokens.shape
    levels = [(tokens, weights, np.zeros((B, k), np.int32))]
    level = _first_level(tokens, weights, shape, root_rows)
    for s in range(1, shape.depth):
        rows = _expansion_rows(level.sees, s, requests, root_rows)
        logits, kv = expand(rows, level.tokens.reshape(-1), level.parents.reshape(-1), kv)
        ids, edges = rank(logits.reshape(B, k, -1), level.paths)
        parents, weights, level = draft_tree.next_level(level, ids, edges, s, root_rows)
        levels.append((ids.reshape(B, k * k), weights, parents))
    ids, weights, parents = (np.concatenate(parts, axis=1) for parts in zip(*levels, strict=True))
    tree = draft_tree.keep_best(
        newest=requests.newest,
        tokens=ids,
        weights=weights,
        parents=parents,
        max_drafts=requests.max_drafts,
        has_relay=requests.can_draft,
        nodes=shape.nodes,
    )
    return tree, kv


def _first_level(
    tokens: Int[np.ndarray, "B k"],
    weights: Float[np.ndarray, "B k"],
    shape: TreeShape,
    root_rows: int,
) -> Level:
    B, k = tokens.shape
    sees = np.zeros((B, k, root_rows + k * (shape.depth - 1)), bool)
    sees[:, :, :root_rows] = True
    sees |= np.arange(sees.shape[2]) == root_rows + np.arange(k)[:, None]
    return Level(
        tokens=tokens,
        weights=weights,
        parents=np.repeat(np.arange(B)[:, None], k, axis=1),
        numbers=np.tile(np.arange(1, k + 1), (B, 1)),
        paths=tokens[:, :, None],
        sees=sees,
    )


def _expansion_rows(
    sees: Bool[np.ndarray, "B k window"], s: int, requests: DraftRequests, root_rows: int
) -> AttentionRows:
    B, k, _ = sees.shape
    request = np.repeat(np.arange(B), k)
    is_real = requests.can_draft[request]
    length = np.where(is_real, requests.lengths[request], 0)
    return AttentionRows(
        request=request,
        positions=length + root_rows + s - 1,
        places=length + root_rows + (s - 1) * k + np.tile(np.arange(k), B),
        first=requests.draft_from[request],
        until=length,
        window=sees.reshape(B * k, -1) & is_real[:, None],
        is_real=is_real,
        page_table=requests.page_table,
    )
