"""What the prefix cache has of a request's context, and what it knows of the request as it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from shared.engine.allocator import NO_PAGES
from shared.engine.radix_cache import NO_SNAPSHOT, Node
from shared.engine.request import Request


@dataclass(frozen=True)
class Prefix:
    """What is there of a request's context.

    Attributes:
      node: Node of the last page; None where nothing is there.
      pages: Full pages, in the order of positions.
      length: Positions that they hold.
      draft_from: Position from which on their draft KV is whole.
      snapshot: State at their end; 0: none.
      branch: Position up to which pages are there too, but without a state; 0: none.
    """

    node: Node | None = None
    pages: Int32[np.ndarray, " n"] = field(default_factory=lambda: NO_PAGES, compare=False)
    length: int = 0
    draft_from: int = 0
    snapshot: int = NO_SNAPSHOT
    branch: int = 0


@dataclass
class Standing:
    """What the cache knows of a running request.

    Attributes:
      request: Which.
      node: The last of its pages that is in the cache; None: none is.
      pinned: Snapshot that its first step is yet to restore; 0: none.
      branch: See `Prefix`.
      fed: Positions of its context that steps have fed, as far as their results are known.
      is_broken: Whether there is a hole in its draft KV.
      holes: Positions from and to which steps did not feed the drafter, since it got its slot.
      saving: Snapshots by the position at which chunks in flight may take them.
      pending: Position and snapshot that decode steps in flight may take; they pass one at most.
      kept: Position and snapshot of each state that was taken, the oldest first.
    """

    request: Request
    node: Node | None
    pinned: int
    branch: int
    fed: int
    is_broken: bool
    holes: list[tuple[int, int]] = field(default_factory=list)
    saving: dict[int, int] = field(default_factory=dict)
    pending: tuple[int, int] = (0, NO_SNAPSHOT)
    kept: list[tuple[int, int]] = field(default_factory=list)


def snapshots_of(standing: Standing) -> Iterator[int]:
    """The snapshots that a request has for itself."""
    named = [standing.pending, *standing.kept, *standing.saving.items()]
    yield from (snapshot for _, snapshot in named if snapshot)
