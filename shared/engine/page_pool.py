"""Pool of KV pages: page table of each slot, reference counts, and free pages.

A page has reference-counted owners: the slots that name it, and the prefix cache. It is free when
the last owner releases it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from shared.boundary.backend import BackendLimits

NO_PAGES = np.zeros(0, np.int32)


class PagePool:
    """Pages of one pool, without the reserved page 0.

    Steps take effect in the order of submission. Freed pages may therefore be reused at once, even
    while a step in flight still names them: the next owner writes after that step has read.

    Args:
      capacity: Limits of the backend.
      size: Number of pages, including page 0.

    Attributes:
      page_table: Pages of each slot in the order of positions; 0 past the last.
      num_pages: Number of pages of each slot.
      num_owners: Reference count of each page: slots that name it, plus the prefix cache.
      num_free: Number of pages without an owner.
    """

    page_table: Int32[np.ndarray, "slots P"]
    num_pages: Int32[np.ndarray, " slots"]
    num_owners: Int32[np.ndarray, " pages"]

    def __init__(self, capacity: BackendLimits, size: int) -> None:
        columns = capacity.num_pages_for(capacity.max_positions)
        self.page_table = np.zeros((capacity.num_slots, columns), np.int32)
        self.num_pages = np.zeros(capacity.num_slots, np.int32)
        self.num_owners = np.zeros(size, np.int32)
        self.num_free = size - 1
        self._capacity = capacity
        self._free = np.arange(size - 1, 0, -1, dtype=np.int32)

    @property
    def size(self) -> int:
        """Number of pages, without page 0."""
        return len(self.num_owners) - 1

    def num_missing(self, slot: int, positions: int) -> int:
        """Returns the number of pages that the slot lacks for `positions` tokens."""
        return max(0, self._capacity.num_pages_for(positions) - self.num_pages.item(slot))

    def extend(self, slot: int, positions: int) -> None:
        """Allocates the slot's missing pages for `positions` tokens; the pool must have them."""
        if missing := self.num_missing(slot, positions):
            start, left = self.num_pages[slot], self.num_free - missing
            pages = self._free[left : self.num_free]
            self.page_table[slot, start : start + missing] = pages[::-1]
            self.num_pages[slot] += missing
            self.num_owners[pages] = 1
            self.num_free = left

    def start_with(self, slot: int, prefix: Int32[np.ndarray, " n"]) -> None:
        """Sets the first pages of an empty slot, and adds an owner to each of them.

        Raises:
          ValueError: A page has no owner, so another request could receive it.
        """
        self.share(prefix)
        self.page_table[slot, : len(prefix)] = prefix
        self.num_pages[slot] = len(prefix)

    def clear(self, slot: int) -> None:
        """Releases the slot's share in its pages."""
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
        self._free[self.num_free : self.num_free + len(free)] = free
        self.num_free += len(free)

    def check(self, taken_slots: set[int], cached: Sequence[int]) -> None:
        """Asserts that no page is lost, and that reference counts are consistent.

        Args:
          taken_slots: Slots of running requests.
          cached: Pages of the prefix cache.

        Raises:
          AssertionError: A page is lost, free while it has an owner, or owned by a free slot.
        """
        columns = np.arange(self.page_table.shape[1])
        is_owned = columns < self.num_pages[:, None]
        named = np.concatenate([self.page_table[is_owned], np.array(cached, np.int32)])
        shares = np.bincount(named, minlength=len(self.num_owners))
        free = np.sort(self._free[: self.num_free])
        owners = set(np.flatnonzero(self.num_pages).tolist())
        assert np.array_equal(shares, self.num_owners), "reference counts of pages are wrong"
        assert np.array_equal(free, 1 + np.flatnonzero(shares[1:] == 0)), "pages lost or shared"
        assert shares[0] == 0, "page 0 has an owner"
        assert owners <= taken_slots, "a free slot owns pages"
        assert not self.page_table[~is_owned].any(), "a page table has entries past the last page"
