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
    namespace_of,
)

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
        """True while a job is open."""
        self._jobs = [job for job in self._jobs if job.is_open]
        return bool(self._jobs)

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
    ) -> ExportJob | None:
        """Begins to export the longest cached prefix of a prompt after which its request can start.

        Args:
          tokens, namespace, images: The prompt.
          allocate: Returns memory for the bytes of a record; raises its own errors.

        Returns:
          The job; None if there is no such prefix.
        """
        path = self._path(tokens, namespace, images)
        if not path:
            return None
        snapshot = path[-1].snapshot if self._cache.needs_snapshot else NO_SNAPSHOT
        header = self._header(path, tokens, namespace, images, has_snapshot=bool(snapshot))
        windows = self._cache.tree.window_pages(path)
        tables = [np.array([node.page for node in path], np.int32)]
        tables += [_at_end(pages, len(path)) for pages in windows]
        body = allocate(header.num_bytes)
        lease = TransferLease(path[-1], (NO_PAGES, *windows), pinned=snapshot)
        for pool, pages in zip(self._pools, lease.pages, strict=True):
            pool.share(pages)  # else window pages could be evicted
        self._cache.transfers.open(lease)
        steps = TransferSteps(self._exports, tables, 0, snapshot)
        job = ExportJob(self._context, header, lease, steps, body)
        self._jobs.append(job)
        return job

    @property
    def is_holding(self) -> bool:
        """True while an import is open, or its prefix is held for requests without a slot."""
        return bool(self._num_open_imports or self._cache.transfers.num_held)

    def begin_import(self, record: TransferRecord, *, holds: bool) -> ImportJob:
        """Begins to import a record; pages that are cached already are not written again.

        Args:
          record: The record.
          holds: True to hold the imported prefix until `ImportJob.cancel`, or until requests that
            `assign` names have received slots.

        Raises:
          TransferRejected: The record does not match this server ("version", "fingerprint",
            "arrays", "tokens"), no request could start after it ("not_restorable"), the prefix
            cache is disabled ("no_cache"), or pages ("no_pages") or snapshots ("no_snapshots") are
            in use.
        """
        header = record.header
        self._check(header)
        path = self._cache.tree.path(namespace_of(header), header.tokens, header.images)
        if len(path) == header.num_pages == self._cache.num_restorable(path):
            tables = self._nothing
            steps = TransferSteps(self._imports, tables, 0, NO_SNAPSHOT)
            lease = TransferLease(None, tables)
            job = ImportJob(self._context, record, lease, steps, tables, holds=holds)
            job.is_done = True
            job.hold()
            return job
        lease = self._allocate(header, path)
        tables = [_at_end(pages, header.num_pages) for pages in lease.pages]
        first = header.num_pages - max(map(len, lease.pages))
        steps = TransferSteps(self._imports, tables, first, lease.snapshot)
        job = ImportJob(self._context, record, lease, steps, tables, holds=holds)
        self._jobs.append(job)
        return job

    def assign(self, job: ImportJob, request_ids: Iterable[int]) -> None:
        """Sets the requests that will start from the prefix of a completed import."""
        if job.held is not None:
            self._cache.transfers.assign(job.held, request_ids)

    def next_step(self) -> TransferStep | None:
        """Returns the next step of the oldest job that has one; None if no job has."""
        job = next((job for job in self._jobs if job.has_step), None)
        return None if job is None else job.next_step()

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
        *,
        has_snapshot: bool,
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
            is_whole=tuple(node.is_whole for node in path),
            has_snapshot=has_snapshot,
            arrays=self._arrays(count, has_snapshot=has_snapshot),
        )

    def _arrays(self, num_pages: int, *, has_snapshot: bool) -> tuple[HeaderArray, ...]:
        windows = [pool.num_restored(num_pages) for pool in self._pools[1:]]
        return header_arrays(self._context.spec, num_pages, windows, has_snapshot=has_snapshot)

    def _check(self, header: TransferHeader) -> None:
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
        arrays = self._arrays(header.num_pages, has_snapshot=header.has_snapshot)
        if (header.page_size, header.arrays) != (self._capacity.page_size, arrays):
            raise TransferRejected("arrays", "the record has other arrays than this server")
        wanted = header.num_tokens + self._cache.policy.key_lookahead
        if len(header.tokens) != wanted or header.tokens.max() >= self._capacity.vocab:
            raise TransferRejected("tokens", f"the record must have {wanted} tokens of the model")
        if self._cache.needs_snapshot and not header.has_snapshot:
            raise TransferRejected("not_restorable", "the record has no state snapshot")

    def _allocate(self, header: TransferHeader, path: Sequence[Node]) -> TransferLease:
        """Locks the cached part of a record, and allocates pages and a snapshot for the rest."""
        lease = TransferLease(path[-1] if path else None, self._nothing)
        self._cache.transfers.open(lease)
        try:
            lease.pages = self._take_pages(header.num_pages, len(path))
            lease.snapshot = self._take_snapshot() if header.has_snapshot else NO_SNAPSHOT
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


def _at_end(pages: Int32[np.ndarray, " n"], count: int) -> Int32[np.ndarray, " count"]:
    """Returns a page table of `count` pages that ends with these; 0 before them."""
    table = np.zeros(count, np.int32)
    table[count - len(pages) :] = pages
    return table
