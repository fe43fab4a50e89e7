"""Pool of recurrent-state snapshots of the prefix cache and of running requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from shared.engine.radix_node import NO_SNAPSHOT, Node


class SnapshotPool:
    """Owners of state snapshots, without the reserved snapshot 0: the tree, a running request, or
    none.

    Steps take effect in the order of submission, so a snapshot that a submitted step restores may
    be reused at once. A snapshot that a future step restores is pinned.

    Args:
      num_snapshots: Size of the pool, including snapshot 0.

    Attributes:
      num_changes: Counter of attached and removed snapshots, except removals by eviction of their
        node.
    """

    def __init__(self, num_snapshots: int) -> None:
        self._free = list(range(num_snapshots - 1, 0, -1))
        self._size = num_snapshots - 1
        self._cached: OrderedDict[int, Node] = OrderedDict()
        self._pins: dict[int, int] = {}
        self.num_changes = 0

    @property
    def num_free(self) -> int:
        """Snapshots without an owner."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Snapshots in the tree."""
        return len(self._cached)

    def allocate(self) -> int:
        """Allocates a snapshot for a request; evicts the LRU snapshot if needed. Returns 0 if there
        is none.
        """
        if self._free:
            return self._free.pop()
        for snapshot, node in self._cached.items():
            if snapshot not in self._pins:
                del self._cached[snapshot]
                node.snapshot = NO_SNAPSHOT
                self.num_changes += 1
                return snapshot
        return NO_SNAPSHOT

    def free(self, snapshot: int) -> None:
        """Releases a snapshot of the tree or of a request."""
        self._cached.pop(snapshot, None)
        self._free.append(snapshot)

    def attach(self, snapshot: int, node: Node) -> None:
        """Attaches a request's snapshot to a node; if the node has one already, releases the new
        one.
        """
        if node.snapshot:
            self.free(snapshot)
        else:
            node.snapshot = snapshot
            self._cached[snapshot] = node
            self.num_changes += 1
        self._cached.move_to_end(node.snapshot)

    def pin(self, snapshot: int) -> None:
        """Pins a cached snapshot until a step that restores it is submitted."""
        self._cached.move_to_end(snapshot)
        self._pins[snapshot] = self._pins.get(snapshot, 0) + 1

    def unpin(self, snapshot: int) -> None:
        """Removes one pin."""
        self._pins[snapshot] -= 1
        if not self._pins[snapshot]:
            del self._pins[snapshot]

    def check(self, held: Sequence[int]) -> None:
        """Asserts that no snapshot is lost or has two owners.

        Args:
          held: Snapshots of running requests.
        """
        everyone = sorted([*self._free, *self._cached, *held])
        assert everyone == list(range(1, self._size + 1)), "snapshots lost or shared"
        for snapshot, node in self._cached.items():
            assert node.snapshot == snapshot, "a node and its snapshot do not match"
            assert node.page, "a snapshot is attached to an evicted node"
