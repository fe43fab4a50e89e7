"""Export and import of cached prefixes: a transferred prefix is a prefix-cache hit of another
server.

An export copies what the prefix cache keeps of a sequence into a `TransferRecord`. An import
allocates pages, writes a record into them, and then inserts them into the radix cache as a request
does at its end. A request with these tokens then starts after them and prefills the rest itself, so
its bits are those of a local hit. Both are jobs, which run in the engine's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Int32

from shared.boundary.backend import BackendLimits
from shared.boundary.kv_transfer import (
    VERSION,
    HeaderArray,
    TransferHeader,
    TransferImage,
    TransferRecord,
    TransferRejected,
    header_arrays,
)
from shared.boundary.program import StepKind
from shared.engine.cache_entry import TransferLease
from shared.engine.image_inputs import CacheKeyImage, overlapping
from shared.engine.page_pool import NO_PAGES, PagePool
from shared.engine.prefix_cache import PrefixCache
from shared.engine.radix_node import NO_SNAPSHOT, Node
from shared.engine.request import CacheNamespace
from shared.engine.transfer_jobs import (
    ExportJob,
    ImportJob,
    TransferContext,
    TransferJob,
    TransferPrograms,
    TransferStep,
    TransferSteps,
    at_end,
    namespace_of,
)

MAX_PARTS = 8
"""Maximum parts of a prefix, each with a header of all its tokens."""

Tokens = Sequence[int] | Int32[np.ndarray, " T"]


def host_memory(num_bytes: int) -> memoryview:
    """Returns new memory for a record."""
    return np.empty(num_bytes, np.uint8).data


class KVTransfer:
    """Exports and imports of an engine.

    Args:
      capacity: Limits of the backend, with the entries of KV transfer.
      cache: Prefix cache.
      fingerprint: Hex digest of everything that two servers must have in common to exchange
        records.
      num_reserved: Returns the pages of each pool that running requests may still need.
    """

    def __init__(
        self,
        capacity: BackendLimits,
        cache: PrefixCache,
        fingerprint: str,
        num_reserved: Callable[[], Sequence[int]],
    ) -> None:
        self._capacity, self._cache = capacity, cache
        self._context = TransferContext(capacity, cache)
        self.fingerprint, self._num_reserved = fingerprint, num_reserved
        self._exports = TransferPrograms.of(capacity, StepKind.EXPORT_KV)
        self._imports = TransferPrograms.of(capacity, StepKind.IMPORT_KV)
        self._jobs: list[TransferJob] = []

    @property
    def num_exported(self) -> int:
        """Tokens of the records of completed exports."""
        return self._context.num_exported

    @property
    def num_imported(self) -> int:
        """Tokens of the records of completed imports, cached ones included."""
        return self._context.num_imported

    @property
    def num_slots(self) -> int:
        """Maximum running requests."""
        return self._capacity.num_slots - 1

    @property
    def busy(self) -> bool:
        """True while a job has steps to submit; an import may wait for its next part."""
        self._jobs = [job for job in self._jobs if job.is_open]
        return any(job.has_step for job in self._jobs)

    def match(
        self, tokens: Tokens, namespace: CacheNamespace, images: Sequence[CacheKeyImage]
    ) -> int:
        """Returns the cached tokens after which a request with these tokens could start now."""
        return len(self._path(tokens, namespace, images)) * self._capacity.page_size

    def begin_export(
        self,
        tokens: Tokens,
        namespace: CacheNamespace,
        images: Sequence[CacheKeyImage],
        allocate: Callable[[int], memoryview] = host_memory,
        *,
        first_page: int = 0,
    ) -> ExportJob | None:
        """Begins to export the longest cached prefix of a prompt after which its request can start.

        Args:
          tokens, namespace, images: The prompt.
          allocate: Returns memory for the bytes of a record; raises its own errors.
          first_page: Pages in earlier parts (`begin_part`).

        Returns:
          The job; None if there is no such prefix.
        """
        path = self._path(tokens, namespace, images)
        if not path:
            return None
        snapshot = path[-1].snapshot if self._cache.needs_snapshot else NO_SNAPSHOT
        windows, first = self._cache.tree.window_pages(path), min(first_page, len(path))
        header = self._header(path, tokens, namespace, images, first, bool(snapshot), is_last=True)
        lease = TransferLease(path[-1], (NO_PAGES, *windows), pinned=snapshot)
        return self._begin_export(path, header, lease, allocate)

    def begin_part(
        self,
        tokens: Tokens,
        namespace: CacheNamespace,
        images: Sequence[CacheKeyImage],
        allocate: Callable[[int], memoryview] = host_memory,
        *,
        first_page: int,
    ) -> ExportJob | None:
        """Begins to export the pages of a prompt that runs, from a page on.

        A part has at least one of `MAX_PARTS` of the pages. The part of `begin_export` is the last.

        Args:
          tokens, namespace, images, allocate: Same as in `begin_export`.
          first_page: Pages in earlier parts.

        Returns:
          The job; None if there are not enough pages yet.
        """
        path = self._cache.tree.path(namespace, np.asarray(tokens, np.int32), images)
        num_pages, path = self.max_pages(len(tokens)), path[: self.max_pages(len(tokens))]
        if len(path) <= first_page or (len(path) - first_page) * MAX_PARTS < num_pages:
            return None
        header = self._header(path, tokens, namespace, images, first_page, False, is_last=False)
        lease = TransferLease(path[-1], self._nothing)
        return self._begin_export(path, header, lease, allocate)

    def _begin_export(
        self,
        path: Sequence[Node],
        header: TransferHeader,
        lease: TransferLease,
        allocate: Callable[[int], memoryview],
    ) -> ExportJob:
        pages, windows = np.array([node.page for node in path], np.int32), lease.pages[1:]
        record = TransferRecord.of(header, allocate(header.num_bytes))
        for pool, of_pool in zip(self._pools, lease.pages, strict=True):
            pool.share(of_pool)  # else window pages could be evicted
        self._cache.transfers.open(lease)
        steps = TransferSteps(self._exports, self._context.plans)
        first = min(header.first_page, header.num_pages - max(map(len, windows), default=0))
        tables = [pages, *(at_end(of_pool, len(path)) for of_pool in windows)]
        steps.add(record, tables, first, lease.pinned)
        job = ExportJob(self._context, record, lease, steps)
        if not steps.num_left:
            job.end()
        self._jobs.append(job)
        return job

    def max_pages(self, num_tokens: int) -> int:
        """Returns the maximum pages of the record of a prompt: its request prefills a token."""
        return (num_tokens - 1) // self._capacity.page_size

    @property
    def num_changes(self) -> int:
        """Changes of the prefix cache; without one `begin_part` returns the same."""
        return self._cache.tree.num_changes

    @property
    def is_holding(self) -> bool:
        """True while an import is open, or its prefix is held for requests without a slot."""
        return bool(self._num_open_imports or self._cache.transfers.num_held)

    def begin_import(
        self, record: TransferRecord, *, holds: bool, num_pages: int | None = None
    ) -> ImportJob:
        """Begins to import a record; pages that are cached already are not written again.

        Args:
          record: The record, or the first part of it; `extend_import` adds the others.
          holds: True to hold the imported prefix until `ImportJob.cancel`, or until requests that
            `assign` names have received slots.
          num_pages: Maximum pages of all parts, which are allocated at once; None without other
            parts.

        Raises:
          TransferRejected: The record does not match this server ("version", "fingerprint",
            "arrays", "tokens"), no request could start after it ("not_restorable"), the prefix
            cache is disabled ("no_cache"), or pages ("no_pages") or snapshots ("no_snapshots") are
            in use.
        """
        header, steps = record.header, TransferSteps(self._imports, self._context.plans)
        self._check(header, first_page=0)
        count = header.num_pages if header.is_last or num_pages is None else num_pages
        if count < header.num_pages:
            raise TransferRejected("tokens", f"the record has more than {count} pages")
        path = self._cache.tree.path(namespace_of(header), header.tokens, header.images)
        if header.is_last and len(path) == header.num_pages == self._cache.num_restorable(path):
            lease = TransferLease(None, self._nothing)
            job = ImportJob(self._context, header, lease, steps, count, holds=holds)
            job.is_done = True
            job.hold()
            return job
        lease = self._allocate(header, path, count)
        job = ImportJob(self._context, header, lease, steps, count, holds=holds)
        job.add(record)
        self._jobs.append(job)
        return job

    def extend_import(self, job: ImportJob, record: TransferRecord) -> None:
        """Adds the next part to an import.

        Raises:
          TransferRejected: It does not follow the part before, or see `begin_import`.
        """
        before, header = job.header, record.header
        self._check(header, first_page=before.num_pages)
        count = min(before.num_tokens, header.num_tokens)
        is_next = np.array_equal(before.tokens[:count], header.tokens[:count])
        is_next &= namespace_of(before) == namespace_of(header)
        if before.is_last or not is_next or header.num_pages > job.max_pages:
            raise TransferRejected("tokens", "the part does not follow the one before")
        job.add(record)

    def assign(self, job: ImportJob, request_ids: Iterable[int]) -> None:
        """Sets the requests that will start from the prefix of a completed import."""
        if job.held is not None:
            self._cache.transfers.assign(job.held, request_ids)

    def next_step(self) -> TransferStep | None:
        """Returns the next step of the oldest job that has one; None if no job has."""
        job = self._next_job()
        return None if job is None else job.next_step()

    @property
    def is_exporting(self) -> bool:
        """True if the next step is one of an export."""
        return isinstance(self._next_job(), ExportJob)

    def _next_job(self) -> TransferJob | None:
        return next((job for job in self._jobs if job.has_step), None)

    def cancel_all(self) -> None:
        """Cancels all jobs, and releases all held prefixes."""
        for job in self._jobs:
            job.cancel()
        self._cache.transfers.release_all()

    @property
    def _num_open_imports(self) -> int:
        return sum(isinstance(job, ImportJob) and job.is_open for job in self._jobs)

    @property
    def _nothing(self) -> tuple[Int32[np.ndarray, " n"], ...]:
        """No pages in any pool."""
        return tuple(NO_PAGES for _ in self._pools)

    @property
    def _pools(self) -> tuple[PagePool, ...]:
        return self._cache.allocator.pools

    def _path(
        self, tokens: Tokens, namespace: CacheNamespace, images: Sequence[CacheKeyImage]
    ) -> list[Node]:
        """Returns the longest cached prefix after which a request with these tokens can start."""
        path = self._cache.tree.path(namespace, np.asarray(tokens, np.int32), images)
        path = path[: (len(tokens) - 1) // self._capacity.page_size]  # it prefills a token or more
        return path[: self._cache.num_restorable(path)]

    def _header(
        self,
        path: Sequence[Node],
        tokens: Tokens,
        namespace: CacheNamespace,
        images: Sequence[CacheKeyImage],
        first_page: int,
        has_snapshot: bool,
        *,
        is_last: bool,
    ) -> TransferHeader:
        page_size, count = self._capacity.page_size, len(path)
        end = count * page_size + self._cache.policy.key_lookahead
        named = overlapping(images, 0, end)
        return TransferHeader(
            version=VERSION,
            fingerprint=self.fingerprint,
            tenant=namespace.tenant,
            adapter=namespace.adapter,
            adapter_version=namespace.version,
            tokens=np.array(tokens[:end], np.int32),
            images=tuple(TransferImage(x.first, x.end - x.first, x.digest) for x in named),
            page_size=page_size,
            num_pages=count,
            first_page=first_page,
            is_last=is_last,
            is_whole=tuple(node.is_whole for node in path),
            has_snapshot=has_snapshot,
            arrays=self._arrays(count, first_page, has_snapshot, is_last=is_last),
        )

    def _arrays(
        self, num_pages: int, first_page: int, has_snapshot: bool, *, is_last: bool
    ) -> tuple[HeaderArray, ...]:
        windows = [pool.num_restored(num_pages) if is_last else 0 for pool in self._pools[1:]]
        own = num_pages - first_page
        return header_arrays(self._context.spec, own, windows, has_snapshot=has_snapshot)

    def _check(self, header: TransferHeader, first_page: int) -> None:
        """Checks that a record is one of this server's model, and that it can be used."""
        if header.version != VERSION:
            raise TransferRejected(
                "version", f"version {VERSION} is required, got {header.version}"
            )
        if header.fingerprint != self.fingerprint:
            raise TransferRejected(
                "fingerprint",
                "the record is of a server with another model, drafter, dtype or page size; start "
                "both with the same files and flags",
            )
        if not self._cache.policy.is_on:
            raise TransferRejected("no_cache", "an import requires the prefix cache")
        if header.first_page != min(first_page, header.num_pages):
            message = f"the record begins at page {header.first_page}, not {first_page}"
            raise TransferRejected("tokens", message)
        arrays = self._arrays(
            header.num_pages, header.first_page, header.has_snapshot, is_last=header.is_last
        )
        if (header.page_size, header.arrays) != (self._capacity.page_size, arrays):
            raise TransferRejected("arrays", "the record has other arrays than this server")
        wanted = header.num_tokens + self._cache.policy.key_lookahead
        if len(header.tokens) != wanted or header.tokens.max() >= self._capacity.vocab:
            raise TransferRejected("tokens", f"the record must have {wanted} tokens of the model")
        if header.has_snapshot and not header.is_last:
            raise TransferRejected("arrays", "only the last part has a state snapshot")
        if self._cache.needs_snapshot and header.is_last and not header.has_snapshot:
            raise TransferRejected("not_restorable", "the record has no state snapshot")

    def _allocate(
        self, header: TransferHeader, path: Sequence[Node], num_pages: int
    ) -> TransferLease:
        """Locks the cached pages of a prefix, and allocates the others and a snapshot."""
        needs_snapshot = header.has_snapshot if header.is_last else self._cache.needs_snapshot
        lease = TransferLease(path[-1] if path else None, self._nothing)
        self._cache.transfers.open(lease)
        try:
            lease.pages = self._take_pages(num_pages, len(path))
            lease.snapshot = self._take_snapshot() if needs_snapshot else NO_SNAPSHOT
        except TransferRejected:
            self._cache.transfers.close(lease)
            raise
        return lease

    def _take_pages(self, num_pages: int, num_cached: int) -> tuple[Int32[np.ndarray, " n"], ...]:
        counts = [num_pages - num_cached]
        counts += [pool.num_restored(num_pages) for pool in self._pools[1:]]
        spare = np.array(self._cache.all_available()) - self._num_reserved()
        if (spare < counts).any():
            raise TransferRejected(
                "no_pages", f"{counts} pages are required, and {spare.tolist()} are available"
            )
        self._cache.make_free(counts)
        return tuple(pool.take(count) for pool, count in zip(self._pools, counts, strict=True))

    def _take_snapshot(self) -> int:
        # Running requests save most snapshots of the pool, so imports have one for each slot.
        num_used = self._num_open_imports + self._cache.transfers.num_held
        has_room = num_used < self.num_slots
        if has_room and (snapshot := self._cache.tree.snapshots.allocate()):
            return snapshot
        raise TransferRejected("no_snapshots", "all state snapshots are in use")
