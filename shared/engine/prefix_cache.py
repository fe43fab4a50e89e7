"""Prefix cache of the scheduler: prefix matching, page ownership of running requests, state
snapshots.

A request holds its matched pages by a lock on the last of them. It inserts its full pages when a
chunk of its prompt has finished without failure, and when it gives up its slot: at its end, and at
a preemption. Pages of a failed row are not inserted.

A hybrid model can resume after a prefix only where a state snapshot exists. Snapshots are saved
within steps, at tracked positions. In a prompt these are the last one of each chunk, and a chunk
also ends where an earlier request diverged. In an output these are the multiples of the interval; a
request keeps the last two, because a stop string may still truncate the output before the last.

A model with sliding-window layers can resume after a prefix only where each window pool has the
last pages of the prefix, those that the next rows attend to. A slot frees its other pages there
once they are in the tree; the tree evicts them in LRU order when their pool is empty.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import islice

import numpy as np
from jaxtyping import Int32

from shared.boundary.backend import BackendLimits, StepPlan
from shared.boundary.program import StepKind
from shared.engine.allocator import Allocator
from shared.engine.cache_entry import (
    CacheLease,
    PrefixMatch,
    last_tracked,
    snapshots_of,
    whole_pages,
)
from shared.engine.cache_policy import CachePolicy, track_unit
from shared.engine.image_inputs import first_difference
from shared.engine.radix_cache import RadixCache
from shared.engine.radix_node import NO_SNAPSHOT, Node
from shared.engine.request import FinishReason, Request
from shared.engine.rows import Chunk, ScheduledRows
from shared.engine.transfer_leases import TransferLeases

WORTH_WAITING = 64
"""Minimum positions saved for a request to wait until another request has prefilled them."""

KEPT_STATES = 2
"""Snapshots kept of a running request's output."""


class PrefixCache:
    """Prefix cache, as scheduler and engine use it.

    Args:
      capacity: Limits and programs of the backend.
      allocator: Owner of the pages.
      policy: Settings for the model and the drafter.
      overlap: Steps in flight while the next one is planned.

    Attributes:
      num_queried, num_hit: Tokens of the contexts that received a slot for the first time, and
        those of them that were cached.
      policy: The settings.
      transfers: Leases of exports and imports.

    Raises:
      ValueError: See `CachePolicy.check`.
    """

    def __init__(
        self, capacity: BackendLimits, allocator: Allocator, policy: CachePolicy, overlap: int
    ) -> None:
        policy.check(capacity, overlap)
        self.allocator, self.policy = allocator, policy
        self._page_size, self._unit = capacity.page_size, track_unit(capacity.page_size)
        self._counts = any(program.work is StepKind.COUNT for program in capacity.programs)
        self._interval = policy.track_interval if policy.is_on else 0
        self.tree = RadixCache(allocator, policy.key_lookahead)
        self._standing: dict[int, CacheLease] = {}
        self.transfers = TransferLeases(self.tree, allocator)
        self._asked, self._answer = None, PrefixMatch()  # the last lookup
        self.num_queried = self.num_hit = 0

    @property
    def needs_snapshot(self) -> bool:
        """True if a request can start only after a prefix with a state snapshot."""
        return self._interval > 0

    # Pages

    @property
    def num_available(self) -> int:
        """Free pages plus pages that can be evicted at once."""
        return self.allocator.pages.num_free + self.tree.num_evictable

    @property
    def num_pages(self) -> int:
        """Pages in the tree, whether or not requests share them."""
        return self.tree.num_pages

    @property
    def num_states(self) -> int:
        """State snapshots in the tree."""
        return self.tree.snapshots.num_cached

    @property
    def usage(self) -> float:
        """Fraction of the pages that running requests hold, in the pool where it is largest."""
        pools = zip(self.allocator.pools, self.all_available(), strict=True)
        return max(1.0 - available / max(1, pool.size) for pool, available in pools)

    def all_available(self) -> list[int]:
        """Returns `num_available` of each page pool."""
        windows = (each.pool.num_free + each.num_evictable for each in self.tree.windows)
        return [self.num_available, *windows]

    def reserve(self, slot: int, positions: int) -> bool:
        """Same as `Allocator.reserve`, but evicts cached pages if needed."""
        if self.allocator.reserve(slot, positions):
            return True
        missing = [pool.num_missing(slot, positions) for pool in self.allocator.pools]
        if any(map(operator.gt, missing, self.all_available())):
            return False
        self.make_free(missing)
        return self.allocator.reserve(slot, positions)

    def make_free(self, counts: Sequence[int]) -> None:
        """Evicts cached pages until each pool has so many free ones; they must be available."""
        self.tree.evict(counts[0] - self.allocator.pages.num_free)
        for cached, count in zip(self.tree.windows, counts[1:], strict=True):
            cached.evict(count - cached.pool.num_free)

    # A request gets a slot

    def find(self, request: Request) -> PrefixMatch:
        """Returns the longest cached prefix from which a request may start.

        A waiting request looks it up in every step, so the last result is kept until the cache
        changes.
        """
        if self._asked != (asked := self._key(request)):
            self._asked, self._answer = asked, self._look_up(request)
        return self._answer

    def _key(self, request: Request) -> tuple[Request, int, int, int]:
        return request, request.length, request.max_cached_tokens, self.tree.num_changes

    def _look_up(self, request: Request) -> PrefixMatch:
        if not self.policy.is_on or (request.sampling.has_penalties and not self._counts):
            return self._prefix([], 0)
        most = request.max_cached_tokens // self._page_size
        path = self.tree.path(request.namespace, request.tokens(), request.images)[:most]
        longest = self.num_restorable(path)
        return self._prefix(path[:longest], self._fork_of(path))

    def _fork_of(self, path: Sequence[Node]) -> int:
        """Returns the position at which a request leaves the pages of others; 0 if it does not.

        A path that ends at a leaf is continued, as by the next turn of a conversation. A snapshot
        there would replace the one at the end of the prompt, which the turn after next requires.
        """
        if not (self._interval and path and path[-1].children):
            return 0
        return len(path) * self._page_size // self._unit * self._unit

    def num_restorable(self, path: Sequence[Node]) -> int:
        """Returns the pages of the longest prefix of a path from which a request can start."""
        return self.tree.num_restorable(path, needs_snapshot=self.needs_snapshot)

    def _prefix(self, path: Sequence[Node], branch: int) -> PrefixMatch:
        length = len(path) * self._page_size
        broken = (node.num_pages for node in reversed(path) if not node.is_whole)
        return PrefixMatch(
            node=path[-1] if path else None,
            pages=np.array([node.page for node in path], np.int32),
            window_pages=self.tree.window_pages(path),
            length=length,
            draft_from=next(broken, 0) * self._page_size,
            snapshot=path[-1].snapshot if path and self._interval else NO_SNAPSHOT,
            fork_position=branch if branch > length else 0,
        )

    def available_with(self, prefix: PrefixMatch) -> list[int]:
        """Returns the pages of each pool that a request with a prefix may have: available ones,
        and those of the prefix that running requests have too.
        """
        held = zip(self.allocator.pools, (prefix.pages, *prefix.window_pages), strict=True)
        shared = (int(np.count_nonzero(pool.num_owners[pages] > 1)) for pool, pages in held)
        return list(map(operator.add, self.all_available(), shared))

    def acquire(self, request: Request, prefix: PrefixMatch) -> None:
        """Locks a prefix for a request that starts with it."""
        if not self.policy.is_on:
            return
        if prefix.node is not None:
            self.tree.lock(prefix.node, None)
            self.tree.touch_window_pages(prefix.node)
        if prefix.snapshot:
            self.tree.snapshots.pin(prefix.snapshot)
        if request.cached_tokens is None:
            self.num_queried += len(request.prompt)
            self.num_hit += prefix.length
        self._standing[request.request_id] = CacheLease(
            request=request,
            node=prefix.node,
            restore_snapshot=prefix.snapshot,
            fork_position=prefix.fork_position,
            num_prefilled=prefix.length,
            draft_kv_incomplete=prefix.draft_from > 0,
        )

    def will_be_cached_soon(self, request: Request, prefix: PrefixMatch) -> bool:
        """Returns True if a running request is about to prefill more of the same prefix than is
        cached.

        Waiting then costs less than prefilling the same tokens again; this covers several choices
        of a prompt, and prompts with a common prefix that arrive together. A snapshot is saved
        where they diverge.
        """
        for other in self._standing.values():
            if other.request.namespace == request.namespace and not other.is_prefilled:
                common = self._common(request, other)
                if common < max(prefix.length, other.num_prefilled) + WORTH_WAITING:
                    continue
                if not self._interval or common in other.saving:
                    return True
                if common > other.request.prefilled:
                    other.fork_position = common
                    return True
        return False

    def _common(self, request: Request, other: CacheLease) -> int:
        """Returns the positions that a request could take over from another one once those are
        prefilled.
        """
        tokens, context = request.tokens(), other.request.context
        most = min(request.max_cached_tokens, len(context) - self.policy.key_lookahead)
        differs = np.flatnonzero(tokens[:most] != context[:most])
        parted = int(differs[0]) if len(differs) else most + self.policy.key_lookahead
        seen = first_difference(request.images, other.request.images)
        parted = parted if seen is None else min(parted, seen)
        equal = min(most, parted - self.policy.key_lookahead)
        unit = self._unit if self._interval else self._page_size
        return max(0, equal) // unit * unit

    # Steps

    def chunk_end(self, request: Request, end: int) -> int:
        """Returns the end of the next chunk of a prompt, `end` or before.

        A chunk saves one state. One that would save a state past the position where the request
        leaves the pages of others ends there, and the rest of the prompt is a chunk of its own.
        """
        standing = self._standing.get(request.request_id)
        fork = standing.fork_position if standing and self._interval else 0
        chunk = Chunk(request, request.prefilled, end)
        return fork if chunk.first < fork < last_tracked(chunk, self._unit) else end

    def assign_snapshots(self, rows: ScheduledRows, plan: StepPlan) -> None:
        """Writes the snapshots to save into a plan, and unpins those that it restores."""
        if not self._interval:
            return
        standings = [self._standing[request.request_id] for request in rows.requests]
        if rows.work is StepKind.DECODE:
            saves = [self._save_of_decode(standing) for standing in standings]
        else:
            for standing in standings:
                self._unpin(standing)
            pairs = zip(standings, rows.chunks, strict=False)  # a count step has no chunks
            saves = [self._save_of_chunk(standing, chunk) for standing, chunk in pairs]
        if saves:
            count = len(saves)
            plan.snapshots.save_at[:count], plan.snapshots.save[:count] = zip(*saves, strict=True)

    def _unpin(self, standing: CacheLease) -> None:
        if standing.restore_snapshot:
            self.tree.snapshots.unpin(standing.restore_snapshot)
            standing.restore_snapshot = NO_SNAPSHOT

    def _save_of_chunk(self, standing: CacheLease, chunk: Chunk) -> tuple[int, int]:
        at = last_tracked(chunk, self._unit)
        snapshot = self.tree.snapshots.allocate() if at else NO_SNAPSHOT
        if snapshot:
            standing.saving[at] = snapshot
        return at, snapshot

    def _save_of_decode(self, standing: CacheLease) -> tuple[int, int]:
        """Returns the only tracked position that this step and the steps in flight may pass."""
        request, (at, snapshot) = standing.request, standing.pending
        if not self.policy.caches_outputs:
            return standing.pending
        known = self._filled(request, standing, prefilled=request.prefill_length)
        if at <= known or not snapshot:
            # No step that could save the state has passed a position below the known length.
            at = known // self._interval * self._interval + self._interval
            standing.pending = at, snapshot or self.tree.snapshots.allocate()
        return standing.pending

    def on_prefill(self, request: Request, chunk: Chunk, saved: bool) -> None:
        """Records that a chunk of a prompt was prefilled without failure."""
        standing = self._standing.get(request.request_id)
        if standing is None:
            return
        standing.num_prefilled = chunk.end
        before = standing.node
        self._insert(request, standing, request.context, chunk.end, is_running=True)
        if standing.node is not None:
            self.tree.lock(standing.node, before)
        for at in [at for at in standing.saving if chunk.first < at <= chunk.end]:
            snapshot = standing.saving.pop(at)
            if saved:
                self._keep_state(request, standing, at, snapshot)
            else:
                self.tree.snapshots.free(snapshot)

    def _keep_state(self, request: Request, standing: CacheLease, at: int, snapshot: int) -> None:
        """Attaches a prompt's snapshot to its node in the tree, or keeps it until the node
        exists.
        """
        path = self.tree.path(request.namespace, request.context[: at + 1], request.images)
        if len(path) * self._page_size == at:
            self.tree.snapshots.attach(snapshot, path[-1])
        else:
            self._hold_state(standing, at, snapshot)

    def _hold_state(self, standing: CacheLease, at: int, snapshot: int) -> None:
        standing.snapshots.append((at, snapshot))
        if len(standing.snapshots) > KEPT_STATES:
            self.tree.snapshots.free(standing.snapshots.pop(0)[1])

    def skips_draft_kv(self, rows: ScheduledRows) -> bool:
        """Returns True if a step adds tokens without draft extend."""
        return self.policy.may_skip_draft_kv and rows.shape is not None and rows.shape.is_plain

    def on_decode(self, request: Request, num_tokens: int, leaves_hole: bool, saved: bool) -> None:
        """Records a decode step with a gap in the draft KV or a snapshot, after its tokens were
        committed.

        Args:
          request: The request.
          num_tokens: Number of tokens, up to the end of the output.
          leaves_hole: See `skips_draft_kv`.
          saved: True if a snapshot was saved.
        """
        standing = self._standing.get(request.request_id)
        if standing is None:
            return
        if leaves_hole:
            end = request.length - 1
            standing.add_draft_kv_gap(end - num_tokens, end)
        if saved:
            position, snapshot = standing.pending
            self._hold_state(standing, position, snapshot)
            standing.pending = (0, NO_SNAPSHOT)

    # A request gives its slot back

    def release(self, request: Request) -> None:
        """Inserts the full pages and snapshots of a request that is about to lose its slot."""
        standing = self._standing.pop(request.request_id, None)
        if standing is None:
            return
        locked = standing.node
        if request.finish_reason is not FinishReason.ERROR:
            filled = standing.num_prefilled
            if self.policy.caches_outputs:
                filled = self._filled(request, standing, prefilled=filled)
            self._insert(request, standing, request.tokens(), filled, is_running=False)
            while standing.snapshots:
                self._hang(standing.node, *standing.snapshots.pop())
        for snapshot in snapshots_of(standing):
            self.tree.snapshots.free(snapshot)
        self._unpin(standing)
        if locked is not None:
            self.tree.unlock(locked)

    def _filled(self, request: Request, standing: CacheLease, prefilled: int) -> int:
        """Returns the positions with KV, as far as results are known; `prefilled` during the
        prefill.
        """
        is_fed = standing.is_prefilled and bool(request.output)
        return request.length - 1 if is_fed else prefilled

    def _insert(
        self,
        request: Request,
        standing: CacheLease,
        tokens: Int32[np.ndarray, " T"],
        end: int,
        *,
        is_running: bool,
    ) -> None:
        """Inserts the pages of a sequence up to position `end`."""
        count, below = end // self._page_size, standing.node
        if count <= (0 if below is None else below.num_pages):
            return
        pages = self.allocator.pages.page_table[request.slot, :count]
        whole = whole_pages(standing, self.policy.draft_reads_kv, self._page_size, count)
        namespace, images = request.namespace, request.images
        standing.node = self.tree.insert(
            namespace, below, tokens, pages, whole, images, is_running=is_running
        )
        if windows := self.allocator.windows:
            held = [pool.page_table[request.slot, :count] for pool in windows]
            self.tree.attach_window_pages(namespace, below, tokens, held, request.images)

    def _hang(self, node: Node | None, at: int, snapshot: int) -> None:
        """Attaches a snapshot to the node that ends at its position, `node` or an ancestor."""
        up = 0 if node is None else node.num_pages - at // self._page_size
        if node is None or up < 0:
            self.tree.snapshots.free(snapshot)
            return
        self.tree.snapshots.attach(snapshot, next(islice(node.upwards(), up, None)))

    def check(self, running: Sequence[Request]) -> None:
        """Asserts that all pages and snapshots have the right owners.

        Args:
          running: The running requests.

        Raises:
          AssertionError: A page or snapshot is lost, has two owners, or is held for no request.
        """
        nodes = list(self.tree.nodes())
        windows = [each.check(nodes) for each in self.tree.windows]
        pages = [[node.page for node in nodes], *windows]
        for lease in self.transfers.leases:
            for of_pool, held in zip(pages, lease.pages, strict=True):
                of_pool += held.tolist()
        self.allocator.check(pages)
        held = [snapshot for one in self._standing.values() for snapshot in snapshots_of(one)]
        held += [lease.snapshot for lease in self.transfers.leases if lease.snapshot]
        self.tree.snapshots.check(held)
        known = {request.request_id for request in running} if self.policy.is_on else set()
        assert set(self._standing) == known, "cache entries do not match the running requests"
        for one in self._standing.values():
            path = [] if one.node is None else [node.page for node in one.node.upwards()]
            pages = self.allocator.pages.page_table[one.request.slot, : len(path)]
            assert path[::-1] == pages.tolist(), "a request has locked a page that it does not own"
        holders = (*self._standing.values(), *self.transfers.leases)
        locks = sum(node.num_pages for one in holders if (node := one.node))
        assert locks == sum(node.num_locks for node in nodes), "pages are locked without a request"
        assert self.tree.num_pages == len(nodes), "the number of cached pages is wrong"
        free = sum(not node.num_locks for node in nodes)
        assert self.tree.num_evictable == free, "the number of evictable pages is wrong"
        if (asked := self._asked) and asked == self._key(asked[0]):
            assert self._answer == self._look_up(asked[0]), "the stored lookup is outdated"
