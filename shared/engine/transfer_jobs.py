"""Jobs of KV transfer: an export or an import of one prefix, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Int32

from shared.boundary.backend import BackendLimits, StepPlan, StepResult
from shared.boundary.buffers import empty_plan
from shared.boundary.kv_transfer import TransferHeader, TransferRecord, copy_later, copy_words
from shared.boundary.program import Program, StepKind
from shared.boundary.transfer_spec import ImportKV
from shared.engine.cache_entry import TransferLease
from shared.engine.prefix_cache import PrefixCache
from shared.engine.radix_node import NO_SNAPSHOT
from shared.engine.request import CacheNamespace

CANCELLED = "cancelled"
"""Failure of a job that was cancelled."""

MAX_COPIES = 16
"""Maximum copies of exported words in threads; a further one waits for the oldest."""


@dataclass(frozen=True)
class TransferStep:
    """A step to submit.

    Attributes:
      plan: Its plan.
      end: Function to call with its result.
    """

    plan: StepPlan
    end: Callable[[StepResult], None]


@dataclass(frozen=True)
class TransferPrograms:
    """Programs of one of the two kinds.

    Attributes:
      pages: Program of pages.
      layers: Programs of the layers of a snapshot, in order.
    """

    pages: Program
    layers: tuple[Program, ...]

    @classmethod
    def of(cls, capacity: BackendLimits, work: StepKind) -> TransferPrograms:
        """Returns the programs of a kind."""
        found = [program for program in capacity.programs if program.work is work]
        layers = sorted((p for p in found if p.blocks), key=lambda p: p.blocks.start)
        return cls(next(p for p in found if not p.blocks), tuple(layers))


Tables = Sequence[Int32[np.ndarray, " P"]]
"""Pages of a prefix in each page pool, by page of the sequence; 0 where the pool has none."""


class TransferSteps:
    """Steps of a job: pages, and then the layers of a snapshot, of each record.

    Args:
      programs: Programs of the kind.
      plans: Plans of completed steps, also of other jobs. They are reused, since those of imports
        have megabytes of words.
    """

    def __init__(self, programs: TransferPrograms, plans: dict[Program, list[StepPlan]]) -> None:
        self._programs, self._plans = programs, plans
        self._left = deque[tuple[Program, range, Tables, int, TransferRecord]]()
        self._num_flying = 0

    def add(self, record: TransferRecord, tables: Tables, first: int, snapshot: int) -> None:
        """Adds the steps of a record.

        Args:
          record: Source or destination of the words.
          tables: See `Tables`.
          first: First page of the sequence to transfer.
          snapshot: Snapshot to transfer; 0 for none.
        """
        program, end = self._programs.pages, record.header.num_pages
        for start in range(first, end, program.pages):
            pages = range(start, min(start + program.pages, end))
            self._left.append((program, pages, tables, snapshot, record))
        for program in self._programs.layers if snapshot else ():
            self._left.append((program, range(0), tables, snapshot, record))

    @property
    def num_left(self) -> int:
        """Steps to submit."""
        return len(self._left)

    def clear(self) -> None:
        """Removes the steps that are not submitted, and the references to their records."""
        self._left.clear()

    @property
    def are_done(self) -> bool:
        """True once the results of all steps are known."""
        return not (self._left or self._num_flying)

    def next_plan(self, capacity: BackendLimits) -> tuple[StepPlan, range, TransferRecord]:
        """Returns the next plan without its words, its pages, empty for layers, and the record."""
        program, pages, tables, snapshot, record = self._left.popleft()
        self._num_flying += 1
        unused = self._plans.get(program)
        plan = unused.pop() if unused else empty_plan(program, capacity)
        for row, table in zip(plan.page_tables, tables, strict=True):
            row[0, : len(pages)] = table[pages.start : pages.stop]
            row[0, len(pages) :] = 0
        if program.blocks:
            is_import = isinstance(plan.work, ImportKV)
            (plan.snapshots.save if is_import else plan.snapshots.restore)[0] = snapshot
        return plan, pages, record

    def end(self, plan: StepPlan) -> None:
        """Records that the result of a step is known."""
        self._num_flying -= 1
        self._plans.setdefault(plan.program, []).append(plan)


class TransferContext:
    """Shared context of the jobs of an engine.

    Args:
      capacity: Limits of the backend, with the entries of KV transfer.
      cache: Prefix cache.

    Attributes:
      plans: See `TransferSteps`; a program has no more than the maximum of steps in flight.
      num_exported, num_imported: Tokens of the records of completed jobs.
    """

    def __init__(self, capacity: BackendLimits, cache: PrefixCache) -> None:
        self.plans: dict[Program, list[StepPlan]] = {}
        assert capacity.transfer is not None  # otherwise there are no programs
        self.capacity, self.cache, self.spec = capacity, cache, capacity.transfer
        self.num_exported = self.num_imported = 0


def namespace_of(header: TransferHeader) -> CacheNamespace:
    """Returns the cache namespace of a record."""
    return CacheNamespace(header.tenant, header.adapter, header.adapter_version)


class TransferJob:
    """An export or import in progress.

    Attributes:
      header: Header of its record, of the last one so far.
      is_done: True once all its steps have ended.
      failed: Reason if it ended before; else None.
    """

    def __init__(
        self,
        context: TransferContext,
        header: TransferHeader,
        lease: TransferLease,
        steps: TransferSteps,
    ) -> None:
        self.header, self.is_done = header, False
        self.failed: str | None = None
        self._context, self._lease, self._steps = context, lease, steps

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix."""
        return self.header.num_tokens

    @property
    def is_open(self) -> bool:
        """True while it holds pages or snapshots."""
        return not self.is_done and self.failed is None

    @property
    def has_step(self) -> bool:
        """True if a step can be submitted."""
        return self.is_open and self._steps.num_left > 0

    def cancel(self) -> None:
        """Ends the job and releases what it holds; does nothing once it has ended.

        Steps take effect in the order of submission, so its pages may be reused at once.
        """
        if self.is_open:
            self.failed = CANCELLED
            self._steps.clear()
            self._context.cache.transfers.close(self._lease)

    def next_step(self) -> TransferStep:
        """Returns its next step."""
        plan, pages, record = self._steps.next_plan(self._context.capacity)
        self._fill(plan, pages, record)
        return TransferStep(plan, partial(self._end_step, plan, pages))

    def _end_step(self, plan: StepPlan, pages: range, result: StepResult) -> None:
        self._steps.end(plan)
        if not self.is_open:
            return
        self._take(plan.program, pages, result)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._steps.are_done and self.header.is_last:
            self.end()

    def end(self) -> None:
        """Completes the job after its last step."""
        self._finish()
        self.is_done = True
        self._context.cache.transfers.close(self._lease)

    def _fill(self, plan: StepPlan, pages: range, record: TransferRecord) -> None:
        """Writes the words of a step's pages, or of its layers."""

    def _take(self, program: Program, pages: range, result: StepResult) -> None:
        """Reads the words of a step's pages, or of its layers."""

    def _finish(self) -> None:
        """Completes the job while it still holds its pages."""


class ExportJob(TransferJob):
    """An export; it locks its pages and pins its snapshot until its record is complete.

    Words are copied in threads, so that the next step is not delayed.
    """

    def __init__(
        self,
        context: TransferContext,
        record: TransferRecord,
        lease: TransferLease,
        steps: TransferSteps,
    ) -> None:
        super().__init__(context, record.header, lease, steps)
        self._record: TransferRecord | None = record
        self._copies = deque[Future[None]]()

    @property
    def record(self) -> TransferRecord | None:
        """The record in its memory, complete once the job is done; None after `take_record`."""
        while self._copies:
            self._copies.popleft().result()
        return self._record

    def take_record(self) -> TransferRecord:
        """Returns the record of a job that is done, and no longer holds it; any thread may call."""
        record, self._record = self.record, None
        assert record is not None
        return record

    def _take(self, program: Program, pages: range, result: StepResult) -> None:
        words, spec, record = result.words, self._context.spec, self._record
        assert words is not None  # those of an export
        assert record is not None  # until it is done
        if words.layers is not None:
            section, local = spec.section_of(program.blocks), spec.local_layers(program.blocks)
            self._copy(record.arrays[section][local], words.layers)
            return
        for section, held in enumerate(words.all_pages):
            entries, places = span_of(self.header, section, pages)
            self._copy(record.arrays[section][entries], held[places])

    def _copy(self, into: np.ndarray, words: np.ndarray) -> None:
        while len(self._copies) >= MAX_COPIES:
            self._copies.popleft().result()
        self._copies.append(copy_later(into, words))

    def _end_if_done(self) -> None:
        if self._steps.are_done:
            self.end()

    def _finish(self) -> None:
        num_pages = self.header.num_pages - self.header.first_page
        self._context.num_exported += num_pages * self.header.page_size


class ImportJob(TransferJob):
    """An import; its pages enter the radix cache after its last step.

    Args:
      context: Context of the engine's jobs.
      header: Header of the first record.
      lease: Pages for the whole prefix, except cached ones, and its snapshot.
      steps: Its steps.
      num_pages: Maximum pages of the prefix.
      holds: True to hold the prefix afterwards.

    Attributes:
      held: Lease of the imported prefix (`TransferLeases.hold`); None if it is not held.
    """

    def __init__(
        self,
        context: TransferContext,
        header: TransferHeader,
        lease: TransferLease,
        steps: TransferSteps,
        num_pages: int,
        *,
        holds: bool,
    ) -> None:
        super().__init__(context, header, lease, steps)
        self._num_pages, self._holds = num_pages, holds
        self._tables: Tables = ()
        self.held: TransferLease | None = None

    @property
    def max_pages(self) -> int:
        """Maximum pages of the prefix."""
        return self._num_pages

    def add(self, record: TransferRecord) -> None:
        """Adds the steps of a record, which follows those before it."""
        header, (pages, *windows) = record.header, self._lease.pages
        count = header.num_pages
        table = at_end(pages, self._num_pages)[:count]
        # The record may end before the maximum; the last window pages then stay unused.
        num_windows = [header.sections[1 + i][0] for i in range(len(windows))]
        held = [of[:size] for of, size in zip(windows, num_windows, strict=True)]
        ends = [at_end(of, count) for of in held]
        self.header, self._tables = header, [table, *ends]
        first = max(header.first_page, self._num_pages - len(pages))
        first = min(first, count - max(num_windows, default=0))
        snapshot = self._lease.snapshot if header.has_snapshot else NO_SNAPSHOT
        own = at_end(table[header.first_page :], count)  # steps of window pages write no others
        self._steps.add(record, [own, *ends], first, snapshot)
        self._end_if_done()

    def cancel(self) -> None:
        """Same as `TransferJob.cancel`, and releases the prefix of an import that has ended."""
        super().cancel()
        if self.held is not None:
            self._context.cache.transfers.release(self.held)

    def hold(self) -> None:
        """Holds the imported prefix, if this was requested."""
        if self._holds:
            header, cache = self.header, self._context.cache
            namespace = namespace_of(header)
            path = cache.tree.path(namespace, header.tokens, header.images)
            self.held = cache.transfers.hold(path[: header.num_pages])

    def _fill(self, plan: StepPlan, pages: range, record: TransferRecord) -> None:
        assert isinstance(plan.work, ImportKV)
        words, spec, layers = plan.work.words, self._context.spec, plan.program.blocks
        if words.layers is not None:
            section, local = spec.section_of(layers), spec.local_layers(layers)
            copy_words(words.layers, record.arrays[section][local])
            return
        for section, held in enumerate(words.all_pages):
            entries, places = span_of(record.header, section, pages)
            copy_words(held[places], record.arrays[section][entries])

    def _finish(self) -> None:
        header, tree = self.header, self._context.cache.tree
        salt, tokens, images = namespace_of(header), header.tokens, header.images
        pages, *windows = self._tables
        node = tree.insert(salt, None, tokens, pages, header.is_whole, images, is_running=False)
        if windows:
            tree.attach_window_pages(salt, None, tokens, windows, images)
        if self._lease.snapshot:
            assert node is not None  # of the last page
            tree.snapshots.attach(self._lease.snapshot, node)
            self._lease.snapshot = NO_SNAPSHOT
        self.hold()
        self._context.num_imported += self.num_tokens


def at_end(pages: Int32[np.ndarray, " n"], count: int) -> Int32[np.ndarray, " count"]:
    """Returns a page table of `count` pages that ends with these; 0 before them."""
    table = np.zeros(count, np.int32)
    table[count - len(pages) :] = pages
    return table


def span_of(header: TransferHeader, section: int, pages: range) -> tuple[slice, slice]:
    """Returns the entries of a section for some pages of the sequence, and their places among
    these.

    A part has no pages before its first one, and a window pool has the last pages only.
    """
    start = header.num_pages - header.sections[section][0]
    first = min(max(pages.start, start), pages.stop)
    entries = slice(max(0, first - start), max(0, pages.stop - start))
    return entries, slice(first - pages.start, pages.stop - pages.start)
