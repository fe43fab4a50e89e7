"""Allocator of KV pages and request slots.

A slot belongs to one running request. Slots with a common prefix may share full pages, because a
step writes only past its slot's length. A model with sliding-window layers has a page pool for each
window beside that of all other layers; all pools have a page for the newest positions of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from shared.boundary.backend import BackendLimits
from shared.engine.page_pool import NO_PAGES, PagePool


class Allocator:
    """Page pools and slots, without the reserved slot 0.

    Attributes:
      pages: Page pool of all layers without a window pool.
      windows: Page pools of sliding windows, in the order of `BackendLimits.window_pools`.
      pools: All page pools; `pages` is the first.
      capacity: Sizes of the pools.
    """

    def __init__(self, capacity: BackendLimits) -> None:
        self.capacity = capacity
        self.pages = PagePool(capacity, None)
        self.windows = tuple(PagePool(capacity, each) for each in capacity.window_pools)
        self.pools = (self.pages, *self.windows)
        self._free_slots = list(range(capacity.num_slots - 1, 0, -1))
        self._taken_slots: set[int] = set()

    @property
    def num_free_slots(self) -> int:
        """Number of free slots, without the reserved slot 0."""
        return len(self._free_slots)

    def take_slot(
        self,
        prefix: Int32[np.ndarray, " n"] = NO_PAGES,
        window_pages: Sequence[Int32[np.ndarray, " m"]] = (),
    ) -> int:
        """Allocates a slot that starts with the pages of `prefix`, and adds an owner to each of
        them.

        Args:
          prefix: Full pages with an owner, in the order of positions.
          window_pages: The last pages of the prefix in each window pool; optional without a prefix.

        Raises:
          IndexError: No slot is free.
          ValueError: See `PagePool.start_with`.
        """
        slot = self._free_slots[-1]
        parts = (prefix, *(window_pages or [NO_PAGES] * len(self.windows)))
        for pool, pages in zip(self.pools, parts, strict=True):
            pool.start_with(slot, len(prefix), pages)
        self._taken_slots.add(self._free_slots.pop())
        return slot

    def reserve(self, slot: int, positions: int) -> bool:
        """Allocates the slot's missing pages for `positions` tokens in all pools, all of them or
        none.

        Returns:
          True if the slot can hold the tokens now.
        """
        if any(pool.num_missing(slot, positions) > pool.num_free for pool in self.pools):
            return False
        for pool in self.pools:
            pool.extend(slot, positions)
        return True

    def free_outside_window(self, slot: int, length: int) -> None:
        """Releases pages outside the sliding windows; see `PagePool.free_outside_window`."""
        for pool in self.windows:
            pool.free_outside_window(slot, length)

    def free(self, slot: int) -> None:
        """Releases a slot and its share in its pages.

        Raises:
          KeyError: The slot is not allocated.
        """
        self._taken_slots.remove(slot)
        self._free_slots.append(slot)
        for pool in self.pools:
            pool.clear(slot)

    def check(self, cached: Sequence[Sequence[int]] = ()) -> None:
        """Asserts that no page or slot is lost; see `PagePool.check`.

        Args:
          cached: Pages of the prefix cache in each pool; optional if there are none.

        Raises:
          AssertionError: A page or a slot is lost or shared.
        """
        slots = sorted([*self._taken_slots, *self._free_slots])
        assert slots == list(range(1, self.capacity.num_slots)), "slots lost or shared"
        ends = {tuple(pool.num_pages.tolist()) for pool in self.pools}
        assert len(ends) == 1, "the pools have pages for different positions"
        for pool, pages in zip(self.pools, cached or [()] * len(self.pools), strict=True):
            pool.check(self._taken_slots, pages)
