"""Leases of exports and imports, and imported prefixes that wait for their requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from shared.engine.allocator import Allocator
from shared.engine.cache_entry import TransferLease
from shared.engine.radix_cache import RadixCache
from shared.engine.radix_node import Node


class TransferLeases:
    """Pages and snapshots that KV transfer holds.

    An import ends before its requests have slots. Its prefix is held until then, so that later
    imports do not evict it. A request ahead that lacks pages releases held prefixes, the youngest
    first, if no running request will return pages.

    Args:
      tree: Radix cache.
      allocator: Its pages.

    Attributes:
      leases: All leases.
    """

    def __init__(self, tree: RadixCache, allocator: Allocator) -> None:
        self._tree, self._pools = tree, allocator.pools
        self.leases: list[TransferLease] = []
        self._held: dict[TransferLease, set[int] | None] = {}

    @property
    def num_held(self) -> int:
        """Number of held prefixes."""
        return len(self._held)

    def open(self, lease: TransferLease) -> None:
        """Locks the path of a lease, and pins its snapshot of the tree."""
        if lease.node is not None:
            self._tree.lock(lease.node, None)
        if lease.pinned:
            self._tree.snapshots.pin(lease.pinned)
        self.leases.append(lease)

    def close(self, lease: TransferLease) -> None:
        """Releases everything that a lease holds."""
        self.leases.remove(lease)
        for pool, pages in zip(self._pools, lease.pages, strict=True):
            pool.release(pages)
        if lease.snapshot:
            self._tree.snapshots.free(lease.snapshot)
        if lease.pinned:
            self._tree.snapshots.unpin(lease.pinned)
        if lease.node is not None:
            self._tree.unlock(lease.node)

    def hold(self, path: Sequence[Node]) -> TransferLease:
        """Holds an imported prefix; `assign` or `release` must follow."""
        pages = np.array([node.page for node in path], np.int32), *self._tree.window_pages(path)
        for pool, of_pool in zip(self._pools, pages, strict=True):
            pool.share(of_pool)
        lease = TransferLease(path[-1], pages, pinned=path[-1].snapshot)
        self.open(lease)
        self._held[lease] = None
        return lease

    def assign(self, lease: TransferLease, request_ids: Iterable[int]) -> None:
        """Sets the requests that will start from a held prefix; does nothing if it is released."""
        if lease in self._held:
            self._held[lease] = set(request_ids)

    def leave(self, request_id: int) -> None:
        """Releases the prefix of a request that has a slot or has ended, if no other waits."""
        for lease, waiting in tuple(self._held.items()):
            if waiting is not None and request_id in waiting:
                waiting.remove(request_id)
                if not waiting:
                    self.release(lease)

    def release(self, lease: TransferLease) -> None:
        """Releases a held prefix; does nothing if it is released."""
        if lease in self._held:
            del self._held[lease]
            self.close(lease)

    def release_youngest(self, besides: int) -> bool:
        """Releases the youngest held prefix of other requests than `besides`.

        Returns:
          False if there is none.
        """
        for lease, waiting in reversed(self._held.items()):
            if waiting is None or besides not in waiting:
                self.release(lease)
                return True
        return False

    def release_all(self) -> None:
        """Releases all held prefixes."""
        for lease in tuple(self._held):
            self.release(lease)
