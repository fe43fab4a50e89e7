"""Allocator of KV pages and request slots.

A slot belongs to one running request. Slots with a common prefix may share full pages, because a
step writes only past its slot's length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from shared.boundary.backend import BackendLimits
from shared.engine.page_pool import NO_PAGES, PagePool


class Allocator:
    """Page pool and slots, without the reserved slot 0.

    Attributes:
      pages: Page pool.
      capacity: Sizes of the pools.
    """

    def __init__(self, capacity: BackendLimits) -> None:
        self.capacity = capacity
        self.pages = PagePool(capacity, capacity.num_pages)
        self._free_slots = list(range(capacity.num_slots - 1, 0, -1))
        self._taken_slots: set[int] = set()

    @property
    def num_free_slots(self) -> int:
        """Number of free slots, without the reserved slot 0."""
        return len(self._free_slots)

    def take_slot(self, prefix: Int32[np.ndarray, " n"] = NO_PAGES) -> int:
        """Allocates a slot that starts with the pages of `prefix`, and adds an owner to each of
        them.

        Args:
          prefix: Full pages with an owner, in the order of positions.

        Raises:
          IndexError: No slot is free.
          ValueError: See `PagePool.start_with`.
        """
        slot = self._free_slots[-1]
        self.pages.start_with(slot, prefix)
        self._taken_slots.add(self._free_slots.pop())
        return slot

    def reserve(self, slot: int, positions: int) -> bool:
        """Allocates the slot's missing pages for `positions` tokens, all of them or none.

        Returns:
          True if the slot can hold the tokens now.
        """
        if self.pages.num_missing(slot, positions) > self.pages.num_free:
            return False
        self.pages.extend(slot, positions)
        return True

    def free(self, slot: int) -> None:
        """Releases a slot and its share in its pages.

        Raises:
          KeyError: The slot is not allocated.
        """
        self._taken_slots.remove(slot)
        self._free_slots.append(slot)
        self.pages.clear(slot)

    def check(self, cached: Sequence[int] = ()) -> None:
        """Asserts that no page or slot is lost; see `PagePool.check`.

        Args:
          cached: Pages of the prefix cache.

        Raises:
          AssertionError: A page or a slot is lost or shared.
        """
        slots = sorted([*self._taken_slots, *self._free_slots])
        assert slots == list(range(1, self.capacity.num_slots)), "slots lost or shared"
        self.pages.check(self._taken_slots, cached)
