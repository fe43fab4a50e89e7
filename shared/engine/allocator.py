"""Allocator of KV pages (with reference counts) and request slots.

A slot belongs to one running request. A page has reference-counted owners: the slots that name it,
and the prefix cache. It is free when the last owner releases it. Slots with a common prefix may
share full pages, because a step writes only past its slot's length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from shared.boundary.backend import BackendLimits

NO_PAGES = np.zeros(0, np.int32)


class Allocator:
    """Pools of pages and slots, without the reserved entries 0.

    Steps take effect in the order of submission. Freed pages may therefore be reused at once, even
    while a step in flight still names them: the next owner writes after that step has read.

    Attributes:
      page_table: Pages of each slot in the order of positions; 0 past the last.
      num_pages: Number of pages of each slot.
      num_owners: Reference count of each page: slots that name it, plus the prefix cache.
      capacity: Sizes of the pools.
    """

    page_table: Int32[np.ndarray, "slots P"]
    num_pages: Int32[np.ndarray, " slots"]
    num_owners: Int32[np.ndarray, " pages"]

    def __init__(self, capacity: BackendLimits) -> None:
        self.capacity = capacity
        columns = capacity.num_pages_for(capacity.max_positions)
        self.page_table = np.zeros((capacity.num_slots, columns), np.int32)
        self.num_pages = np.zeros(capacity.num_slots, np.int32)
        self.num_owners = np.zeros(capacity.num_pages, np.int32)
        self._free_pages = np.arange(capacity.num_pages - 1, 0, -1, dtype=np.int32)
        self._num_free_pages = capacity.num_pages - 1
        self._free_slots = list(range(capacity.num_slots - 1, 0, -1))
        self._taken_slots: set[int] = set()

    @property
    def num_free_pages(self) -> int:
        """Number of pages without an owner."""
        return self._num_free_pages

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
          ValueError: A page of `prefix` has no owner, so another request could receive it.
        """
        if (self.num_owners[prefix] == 0).any():
            raise ValueError("a page of the prefix has no owner")
        slot, count = self._free_slots.pop(), len(prefix)
        self._taken_slots.add(slot)
        self.page_table[slot, :count] = prefix
        self.num_pages[slot] = count
        self.num_owners[prefix] += 1
        return slot

    def num_missing(self, slot: int, positions: int) -> int:
        """Returns the number of pages that the slot lacks for `positions` tokens."""
        return max(0, self.capacity.num_pages_for(positions) - self.num_pages.item(slot))

    def reserve(self, slot: int, positions: int) -> bool:
        """Allocates the slot's missing pages for `positions` tokens, all of them or none.

        Returns:
          True if the slot can hold the tokens now.
        """
        missing = self.num_missing(slot, positions)
        if missing > self._num_free_pages:
            return False
        if missing:
            start, left = self.num_pages[slot], self._num_free_pages - missing
            pages = self._free_pages[left : self._num_free_pages]
            self.page_table[slot, start : start + missing] = pages[::-1]
            self.num_pages[slot] += missing
            self.num_owners[pages] = 1
            self._num_free_pages = left
        return True

    def free(self, slot: int) -> None:
        """Releases a slot and its share in its pages.

        Raises:
          KeyError: The slot is not allocated.
        """
        self._taken_slots.remove(slot)
        self._free_slots.append(slot)
        count = int(self.num_pages[slot])
        self.release(self.page_table[slot, :count])
        self.page_table[slot, :count] = 0
        self.num_pages[slot] = 0

    def share(self, pages: Int32[np.ndarray, " n"]) -> None:
        """Adds an owner to each page; no page may occur twice.

        Raises:
          ValueError: A page has no owner, so another request could receive it.
        """
        if (self.num_owners[pages] == 0).any():
            raise ValueError("a page to share has no owner")
        self.num_owners[pages] += 1

    def release(self, pages: Int32[np.ndarray, " n"]) -> None:
        """Removes an owner from each page; no page may occur twice. Pages return to the pool only
        here.
        """
        self.num_owners[pages] -= 1
        free = pages[self.num_owners[pages] == 0][::-1]
        end = self._num_free_pages
        self._free_pages[end : end + len(free)] = free
        self._num_free_pages += len(free)

    def check(self, kept: Sequence[int] = ()) -> None:
        """Asserts that no page or slot is lost, and that reference counts are consistent.

        Args:
          kept: Pages with an owner besides slots.

        Raises:
          AssertionError: A page or a slot is lost, free while it has an owner, or owned by a free
            slot.
        """
        columns = np.arange(self.page_table.shape[1])
        is_owned = columns < self.num_pages[:, None]
        named = np.concatenate([self.page_table[is_owned], np.array(kept, np.int32)])
        shares = np.bincount(named, minlength=self.capacity.num_pages)
        free = np.sort(self._free_pages[: self._num_free_pages])
        slots = sorted([*self._taken_slots, *self._free_slots])
        owners = set(np.flatnonzero(self.num_pages).tolist())
        assert np.array_equal(shares, self.num_owners), "reference counts of pages are wrong"
        assert np.array_equal(free, 1 + np.flatnonzero(shares[1:] == 0)), "pages lost or shared"
        assert shares[0] == 0, "page 0 has an owner"
        assert slots == list(range(1, self.capacity.num_slots)), "slots lost or shared"
        assert owners <= self._taken_slots, "a free slot owns pages"
        assert not self.page_table[~is_owned].any(), "a page table has entries past the last page"
