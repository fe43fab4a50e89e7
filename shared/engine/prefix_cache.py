"""What running requests find in the prefix cache, and what they leave to it.

A request holds the pages that it found by a lock on the last of them. It leaves its full pages to
the cache whenever a chunk of its prompt is known to be sound, and when it gives its slot back: when
it ends, and when it is preempted. What a row that failed has written is left to nobody.

A hybrid model can begin behind a prefix only where there is a recurrent state. States are saved
within steps, at tracked positions: of a prompt at the last one of each chunk, and where an earlier
request's text went another way; of an output at every multiple of the interval, of which a request
keeps the last two, as a stop string may still cut the text before the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
from jaxtyping import Int32

from shared.boundary.backend import Capacity, StepPlan
from shared.boundary.program import Work
from shared.engine.allocator import Allocator
from shared.engine.cache_policy import CachePolicy, track_unit
from shared.engine.pictures import parting
from shared.engine.radix_cache import NO_SNAPSHOT, Node, RadixCache
from shared.engine.request import FinishReason, Request
from shared.engine.rows import Chunk, Rows
from shared.engine.standing import Prefix, Standing, snapshots_of

WORTH_WAITING = 64
"""Positions that a request must be spared for it to wait until another one has fed them."""

KEPT_STATES = 2
"""Of a running request's output."""


class PrefixCache:
    """The prefix cache as scheduler and engine use it.

    Args:
      capacity: The backend's.
      allocator: Owns the pages.
      policy: Of the model and what drafts.
      overlap: Steps in flight while the next one is planned.

    Attributes:
      num_queried, num_hit: Tokens of the contexts that got a slot for the first time, and those of
        them that were there.

    Raises:
      ValueError: See `CachePolicy.check`.
    """

    def __init__(
        self, capacity: Capacity, allocator: Allocator, policy: CachePolicy, overlap: int
    ) -> None:
        policy.check(capacity, overlap)
        self.allocator, self._policy = allocator, policy
        self._page_size, self._unit = capacity.page_size, track_unit(capacity.page_size)
        self._counts = any(program.work is Work.COUNT for program in capacity.programs)
        self._interval = policy.track_interval if policy.is_on else 0
        self.tree = RadixCache(allocator, policy.key_reach)
        self._standing: dict[int, Standing] = {}
        self._asked, self._answer = None, Prefix()  # the last lookup
        self.num_queried = self.num_hit = 0

    # Pages

    @property
    def num_available(self) -> int:
        """Pages that are free, and those that can be evicted at once."""
        return self.allocator.num_free_pages + self.tree.num_evictable

    @property
    def num_pages(self) -> int:
        """Pages that hang in the tree, whether or not requests share them."""
        return self.tree.num_pages

    @property
    def num_states(self) -> int:
        """Snapshots of recurrent states that hang in the tree."""
        return self.tree.snapshots.num_cached

    @property
    def usage(self) -> float:
        """Share of the pages that running requests have."""
        total = self.allocator.capacity.num_pages - 1
        return 1.0 - self.num_available / max(1, total)

    def reserve(self, slot: int, positions: int) -> bool:
        """As `Allocator.reserve`; what is cached gives way."""
        missing = self.allocator.num_missing(slot, positions)
        lacking = missing - self.allocator.num_free_pages
        if lacking > self.tree.num_evictable:
            return False
        if lacking > 0:
            self.tree.evict(lacking)
        return self.allocator.reserve(slot, positions)

    # A request gets a slot

    def find(self, request: Request) -> Prefix:
        """The longest prefix of a request's context with which it may begin.

        Who waits for room asks in every step: what was found is kept until the cache changes.
        """
        if self._asked != (asked := self._key(request)):
            self._asked, self._answer = asked, self._look_up(request)
        return self._answer

    def _key(self, request: Request) -> tuple[Request, int, int, int]:
        return request, request.length, request.most_found, self.tree.num_changes

    def _look_up(self, request: Request) -> Prefix:
        if not self._policy.is_on or (request.sampling.has_penalties and not self._counts):
            return Prefix()
        most = request.most_found // self._page_size
        path = self.tree.path(request.tenant, request.tokens(), request.pictures)[:most]
        if not self._interval:
            return self._prefix(path, 0)
        deepest = next((i for i in range(len(path), 0, -1) if path[i - 1].snapshot), 0)
        branch = len(path) * self._page_size // self._unit * self._unit
        return self._prefix(path[:deepest], branch)

    def _prefix(self, path: Sequence[Node], branch: int) -> Prefix:
        length = len(path) * self._page_size
        branch = branch if branch > length else 0
        if not path:
            return Prefix(branch=branch)
        broken = (node.num_pages for node in reversed(path) if not node.is_whole)
        return Prefix(
            node=path[-1],
            pages=np.array([node.page for node in path], np.int32),
            length=length,
            draft_from=next(broken, 0) * self._page_size,
            snapshot=path[-1].snapshot if self._interval else NO_SNAPSHOT,
            branch=branch,
        )

    def num_available_beside(self, prefix: Prefix) -> int:
        """Pages that are available to a request beside those of its prefix."""
        if prefix.node is None:
            return self.num_available
        return self.num_available - sum(not node.num_locks for node in prefix.node.upwards())

    def hold(self, request: Request, prefix: Prefix) -> None:
        """Keeps a prefix for a request that begins with it."""
        if not self._policy.is_on:
            return
        if prefix.node is not None:
            self.tree.lock(prefix.node, None)
        if prefix.snapshot:
            self.tree.snapshots.pin(prefix.snapshot)
        if request.cached_tokens is None:
            self.num_queried += len(request.prompt)
            self.num_hit += prefix.length
        self._standing[request.request_id] = Standing(
            request=request,
            node=prefix.node,
            pinned=prefix.snapshot,
            branch=prefix.branch,
            fed=prefix.length,
            is_broken=prefix.draft_from > 0,
        )

    def is_under_way(self, request: Request, prefix: Prefix) -> bool:
        """Whether a running request is about to feed more of the same text than is there.

        Then to wait for it is less work than to feed the same once more: for the choices of a
        prompt, and for prompts that begin alike and come together. Where they part a state is
        taken for those that wait.
        """
        for other in self._standing.values():
            if other.request.tenant == request.tenant and not self._is_fed(other):
                common = self._common(request, other)
                if common < max(prefix.length, other.fed) + WORTH_WAITING:
                    continue
                if not self._interval or common in other.saving:
                    return True
                if common > other.request.prefilled:
                    other.branch = common
                    return True
        return False

    def _common(self, request: Request, other: Standing) -> int:
        """Positions that a request could take over from another one, once that has been fed."""
        tokens, context = request.tokens(), other.request.context
        most = min(request.most_found, len(context) - self._policy.key_reach)
        differs = np.flatnonzero(tokens[:most] != context[:most])
        parted = int(differs[0]) if len(differs) else most + self._policy.key_reach
        seen = parting(request.pictures, other.request.pictures)
        parted = parted if seen is None else min(parted, seen)
        equal = min(most, parted - self._policy.key_reach)
        unit = self._unit if self._interval else self._page_size
        return max(0, equal) // unit * unit

    @staticmethod
    def _is_fed(standing: Standing) -> bool:
        return standing.fed == standing.request.prefill_length

    # Steps

    def name_saves(self, rows: Rows, plan: StepPlan) -> None:
        """Names in a plan where its rows leave their states, and lets go of what it restores."""
        if not self._interval:
            return
        standings = [self._standing[request.request_id] for request in rows.requests]
        if rows.work is Work.DECODE:
            saves = [self._save_of_decode(standing) for standing in standings]
        else:
            for standing in standings:
                self._unpin(standing)
            pairs = zip(standings, rows.chunks, strict=False)  # a count has no chunk
            saves = [self._save_of_chunk(standing, chunk) for standing, chunk in pairs]
        if saves:
            count = len(saves)
            plan.snapshots.save_at[:count], plan.snapshots.save[:count] = zip(*saves, strict=True)

    def _unpin(self, standing: Standing) -> None:
        if standing.pinned:
            self.tree.snapshots.unpin(standing.pinned)
            standing.pinned = NO_SNAPSHOT

    def _save_of_chunk(self, standing: Standing, chunk: Chunk) -> tuple[int, int]:
        at = _last_tracked(chunk, standing.branch, self._unit)
        snapshot = self.tree.snapshots.take() if at else NO_SNAPSHOT
        if snapshot:
            standing.saving[at] = snapshot
        return at, snapshot

    def _save_of_decode(self, standing: Standing) -> tuple[int, int]:
        """The tracked position that the steps in flight, and this one, may pass; there is one."""
        request, (at, snapshot) = standing.request, standing.pending
        known = self._filled(request, standing, prefilled=request.prefill_length)
        if at <= known or not snapshot:
            # A position behind what is known was passed by nobody who could take it.
            at = known // self._interval * self._interval + self._interval
            standing.pending = at, snapshot or self.tree.snapshots.take()
        return standing.pending

    def fed(self, request: Request, chunk: Chunk, saved: bool) -> None:
        """A chunk of a prompt was fed and is sound."""
        standing = self._standing.get(request.request_id)
        if standing is None:
            return
        standing.fed = chunk.end
        before = standing.node
        self._insert(request, standing, request.context, chunk.end, is_running=True)
        if standing.node is not None:
            self.tree.lock(standing.node, before)
        for at in [at for at in standing.saving if chunk.first < at <= chunk.end]:
            snapshot = standing.saving.pop(at)
            if saved:
                self._keep_state(request, standing, at, snapshot)
            else:
                self.tree.snapshots.give(snapshot)

    def _keep_state(self, request: Request, standing: Standing, at: int, snapshot: int) -> None:
        """Hangs a prompt's state where its text is in the tree, or keeps it until it is."""
        path = self.tree.path(request.tenant, request.context[: at + 1], request.pictures)
        if len(path) * self._page_size == at:
            self.tree.snapshots.hang(snapshot, path[-1])
        else:
            self._hold_state(standing, at, snapshot)

    def _hold_state(self, standing: Standing, at: int, snapshot: int) -> None:
        standing.kept.append((at, snapshot))
        if len(standing.kept) > KEPT_STATES:
            self.tree.snapshots.give(standing.kept.pop(0)[1])

    def leaves_hole(self, rows: Rows) -> bool:
        """Whether a step feeds a drafter nothing of what it adds."""
        return self._policy.leaves_holes and rows.shape is not None and rows.shape.is_plain

    def decoded(self, request: Request, num_tokens: int, leaves_hole: bool, saved: bool) -> None:
        """A decode step that is of interest here added tokens, which the request has committed.

        Args:
          num_tokens: How many, up to its text's end.
          leaves_hole: See `leaves_hole`.
          saved: Whether it took a state.
        """
        standing = self._standing.get(request.request_id)
        if standing is None:
            return
        if leaves_hole:
            end = request.length - 1
            self._note_hole(standing, end - num_tokens, end)
        if saved:
            self._hold_state(standing, *standing.pending)
            standing.pending = (0, NO_SNAPSHOT)

    def _note_hole(self, standing: Standing, start: int, end: int) -> None:
        standing.is_broken = True
        if standing.holes and standing.holes[-1][1] >= start:
            standing.holes[-1] = standing.holes[-1][0], end
        else:
            standing.holes.append((start, end))

    # A request gives its slot back

    def let_go(self, request: Request) -> None:
        """Keeps the full pages of a request that is about to lose its slot, and its states."""
        standing = self._standing.pop(request.request_id, None)
        if standing is None:
            return
        locked = standing.node
        if request.finish_reason is not FinishReason.ERROR:
            filled = self._filled(request, standing, prefilled=standing.fed)
            self._insert(request, standing, request.tokens(), filled, is_running=False)
            while standing.kept:
                self._hang(standing.node, *standing.kept.pop())
        for snapshot in snapshots_of(standing):
            self.tree.snapshots.give(snapshot)
        self._unpin(standing)
        if locked is not None:
            self.tree.unlock(locked)

    def _filled(self, request: Request, standing: Standing, prefilled: int) -> int:
        """Positions with KV, as far as results are known; `prefilled` while its prompt is fed."""
        is_fed = self._is_fed(standing) and bool(request.output)
        return request.length - 1 if is_fed else prefilled

    def _insert(
        self,
        request: Request,
        standing: Standing,
        tokens: Int32[np.ndarray, " T"],
        end: int,
        *,
        is_running: bool,
    ) -> None:
        """Leaves the pages of a text up to position `end` to the cache."""
        count = end // self._page_size
        if count <= (0 if standing.node is None else standing.node.num_pages):
            return
        pages = self.allocator.page_table[request.slot, :count]
        whole = self._whole_pages(standing, count)
        known = (request.tenant, standing.node, tokens, pages, whole, request.pictures)
        standing.node = self.tree.insert(*known, is_running=is_running)

    def _whole_pages(self, standing: Standing, count: int) -> list[bool]:
        """Which pages have no hole in their draft KV; those that were found are not asked for."""
        if not standing.is_broken:
            return [True] * count
        if self._policy.reads_past:
            first = standing.holes[0][0] if standing.holes else 0
            return [(page + 1) * self._page_size <= first for page in range(count)]
        is_whole = [True] * count
        for start, end in standing.holes:
            last = min(count, -(-end // self._page_size))
            for page in range(start // self._page_size, last):
                is_whole[page] = False
        return is_whole

    def _hang(self, node: Node | None, at: int, snapshot: int) -> None:
        """Leaves a state to the node that ends where it stands, `node` or one above it."""
        up = 0 if node is None else node.num_pages - at // self._page_size
        if node is None or up < 0:
            self.tree.snapshots.give(snapshot)
            return
        self.tree.snapshots.hang(snapshot, next(islice(node.upwards(), up, None)))

    def check(self, running: Sequence[Request]) -> None:
        """Asserts that pages and snapshots have the owners that they should have.

        Raises:
          AssertionError: Something is lost, or has two owners, or is kept for nobody.
        """
        nodes = list(self.tree.nodes())
        self.allocator.check([node.page for node in nodes])
        held = [snapshot for one in self._standing.values() for snapshot in snapshots_of(one)]
        self.tree.snapshots.check(held)
        known = {request.request_id for request in running} if self._policy.is_on else set()
        assert set(self._standing) == known, "the cache stands by requests that do not run"
        for one in self._standing.values():
            path = [] if one.node is None else [node.page for node in one.node.upwards()]
            pages = self.allocator.page_table[one.request.slot, : len(path)]
            assert path[::-1] == pages.tolist(), "a request has locked a page that is not its own"
        locks = sum(node.num_pages for one in self._standing.values() if (node := one.node))
        assert locks == sum(node.num_locks for node in nodes), "pages are locked for nobody"
        assert self.tree.num_pages == len(nodes), "pages of the cache are lost"
        free = sum(not node.num_locks for node in nodes)
        assert self.tree.num_evictable == free, "evictable pages are miscounted"
        if (asked := self._asked) and asked == self._key(asked[0]):
            assert self._answer == self._look_up(asked[0]), "a lookup that is kept is not there"


def _last_tracked(chunk: Chunk, branch: int, unit: int) -> int:
    """Where a chunk of a prompt leaves its state; 0: nowhere.

    That of a whole prompt stands before its last token if it can, so that the same prompt can use
    it: a request feeds one token at least.
    """
    if chunk.first < branch <= chunk.end:
        return branch
    ends = [chunk.end - 1, chunk.end] if chunk.ends_prompt else [chunk.end]
    return next((at for end in ends if (at := end // unit * unit) > chunk.first), 0)
