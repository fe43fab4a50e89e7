"""Prefix-cache state of a request: the matched prefix at admission, and pages and snapshots while
running.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from shared.engine.page_pool import NO_PAGES
from shared.engine.radix_node import NO_SNAPSHOT, Node
from shared.engine.request import Request
from shared.engine.rows import Chunk


@dataclass(frozen=True)
class PrefixMatch:
    """Cached prefix of a request's context.

    Attributes:
      node: Node of the last page; None without a match.
      pages: Full pages, in the order of positions.
      length: Positions that they hold.
      draft_from: First position from which their draft KV is complete.
      snapshot: State snapshot at their end; 0 for none.
      window_pages: The last of the pages in each window pool, those that the next rows attend to.
      fork_position: Position up to which pages are cached but without a snapshot; 0 for none.
    """

    node: Node | None = None
    pages: Int32[np.ndarray, " n"] = field(default_factory=lambda: NO_PAGES, compare=False)
    length: int = 0
    draft_from: int = 0
    snapshot: int = NO_SNAPSHOT
    window_pages: tuple[Int32[np.ndarray, " m"], ...] = field(default=(), compare=False)
    fork_position: int = 0


@dataclass
class CacheLease:
    """Prefix-cache state of a running request.

    Attributes:
      request: The request.
      node: Node of its last page in the cache; None for none.
      restore_snapshot: Snapshot that its first step will restore; 0 for none.
      fork_position: See `PrefixMatch`.
      num_prefilled: Prefilled positions of its context, as far as results are known.
      draft_kv_incomplete: True if its draft KV has a gap.
      draft_kv_gaps: Position ranges without draft extend since it received its slot.
      saving: Snapshots by the position at which chunks in flight may save them.
      pending: Position and snapshot that decode steps in flight may save; they pass at most one.
      snapshots: Position and snapshot of each saved state, oldest first.
    """

    request: Request
    node: Node | None
    restore_snapshot: int
    fork_position: int
    num_prefilled: int
    draft_kv_incomplete: bool
    draft_kv_gaps: list[tuple[int, int]] = field(default_factory=list)
    saving: dict[int, int] = field(default_factory=dict)
    pending: tuple[int, int] = (0, NO_SNAPSHOT)
    snapshots: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_prefilled(self) -> bool:
        """True if the whole context is known to be prefilled."""
        return self.num_prefilled == self.request.prefill_length

    def add_draft_kv_gap(self, start: int, end: int) -> None:
        """Adds a range of positions without draft KV; it may continue the last one."""
        self.draft_kv_incomplete = True
        if self.draft_kv_gaps and self.draft_kv_gaps[-1][1] >= start:
            self.draft_kv_gaps[-1] = self.draft_kv_gaps[-1][0], end
        else:
            self.draft_kv_gaps.append((start, end))


@dataclass(eq=False)
class TransferLease:
    """Pages, snapshot and locks of an export or import in progress, or of an imported prefix.

    Attributes:
      node: Locked node; None for none.
      pages: Pages of each pool that it owns or shares.
      snapshot: Snapshot that it owns, of an import; 0 for none.
      pinned: Snapshot of the tree that it pins; 0 for none.
    """

    node: Node | None
    pages: tuple[Int32[np.ndarray, " n"], ...]
    snapshot: int = NO_SNAPSHOT
    pinned: int = NO_SNAPSHOT


def snapshots_of(standing: CacheLease) -> Iterator[int]:
    """Yields the snapshots that a request holds."""
    named = [standing.pending, *standing.snapshots, *standing.saving.items()]
    yield from (snapshot for _, snapshot in named if snapshot)


def whole_pages(lease: CacheLease, draft_reads_kv: bool, page_size: int, count: int) -> list[bool]:
    """Returns a flag per page: True if its draft KV has no gap; not used for matched pages.

    Args:
      lease: State of the request.
      draft_reads_kv: See `shared.engine.cache_policy.CachePolicy`.
      page_size: Tokens of a page.
      count: Pages of the request.
    """
    if not lease.draft_kv_incomplete:
        return [True] * count
    if draft_reads_kv:
        first = lease.draft_kv_gaps[0][0] if lease.draft_kv_gaps else 0
        return [(page + 1) * page_size <= first for page in range(count)]
    is_whole = [True] * count
    for start, end in lease.draft_kv_gaps:
        last = min(count, -(-end // page_size))
        for page in range(start // page_size, last):
            is_whole[page] = False
    return is_whole


def last_tracked(chunk: Chunk, unit: int) -> int:
    """Returns the position at which a prompt chunk saves its state; 0 for none.

    The last one of a prompt is before its last token if possible, so that the same prompt can reuse
    it: a request prefills at least one token.
    """
    ends = [chunk.end - 1, chunk.end] if chunk.ends_prompt else [chunk.end]
    return next((at for end in ends if (at := end // unit * unit) > chunk.first), 0)
