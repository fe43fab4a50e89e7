"""Pool of KV pages: page table of each slot, reference counts, and free pages.

A page has reference-counted owners: the slots that name it, and the prefix cache. It is free when
the last owner releases it.

In the pool of a sliding window a slot has only the last of its pages: those that its next steps
attend to, and one before them. With that one the prefix cache can restore two prefixes of a
finished request, because a stop string can still truncate the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from shared.boundary.backend import BackendLimits
from shared.boundary.window_pools import WindowPool, max_visible_pages

NO_PAGES = np.zeros(0, np.int32)


class PagePool:
    """Pages of one pool, without the reserved page 0.

    Steps take effect in the order of submission. Freed pages may therefore be reused at once, even
    while a step in flight still names them: the next owner writes after that step has read.

    Args:
      capacity: Limits of the backend.
      window: Sliding window of the layers; None for the pages of all other layers.

    Attributes:
      page_table: Pages of each slot in the order of positions; 0 where it has none.
      num_freed, num_pages: First page of each slot that it still has, and the end of its pages.
      num_owners: Reference count of each page: slots that name it, plus the prefix cache.
      num_free: Number of pages without an owner.
      num_visible: Maximum visible pages before the page of a request's length; None for all.
    """

    page_table: Int32[np.ndarray, "slots P"]
    num_freed: Int32[np.ndarray, " slots"]
    num_pages: Int32[np.ndarray, " slots"]
    num_owners: Int32[np.ndarray, " pages"]
    num_visible: int | None

    def __init__(self, capacity: BackendLimits, window: WindowPool | None) -> None:
        num_slots, self._page_size = capacity.num_slots, capacity.page_size
        size = capacity.num_pages if window is None else window.num_pages
        columns = capacity.num_pages_for(capacity.max_positions)
        self.page_table = np.zeros((num_slots, columns), np.int32)
        self.num_freed, self.num_pages = (np.zeros(num_slots, np.int32) for _ in range(2))
        self.num_owners = np.zeros(size, np.int32)
        self.num_free = size - 1
        self.num_visible = window and max_visible_pages(window.window, self._page_size)
        self._free = np.arange(size - 1, 0, -1, dtype=np.int32)

    @property
    def size(self) -> int:
        """Number of pages, without page 0."""
        return len(self.num_owners) - 1

    def num_missing(self, slot: int, positions: int) -> int:
        """Returns the number of pages that the slot lacks for `positions` tokens."""
        return max(0, -(-positions // self._page_size) - self.num_pages.item(slot))

    def num_needed(self, length: int, positions: int) -> int:
        """Returns the pages of a request of `length` tokens that may write up to `positions`."""
        return -(-positions // self._page_size) - self._first_kept(length)

    def num_held(self, slot: int) -> int:
        """Returns the number of pages that the slot has."""
        return self.num_pages.item(slot) - self.num_freed.item(slot)

    def num_restored(self, count: int) -> int:
        """Returns how many pages at the end of a prefix of `count` pages a request needs."""
        return count if self.num_visible is None else min(count, self.num_visible)

    def extend(self, slot: int, positions: int) -> None:
        """Allocates the slot's missing pages for `positions` tokens; the pool must have them."""
        if missing := self.num_missing(slot, positions):
            start = self.num_pages[slot]
            self.page_table[slot, start : start + missing] = self.take(missing)
            self.num_pages[slot] += missing

    def take(self, count: int) -> Int32[np.ndarray, " count"]:
        """Allocates pages with one owner, the caller; the pool must have them."""
        left = self.num_free - count
        pages = self._free[left : self.num_free][::-1].copy()
        self.num_owners[pages] = 1
        self.num_free = left
        return pages

    def start_with(self, slot: int, count: int, pages: Int32[np.ndarray, " n"]) -> None:
        """Sets the last pages of a prefix of `count` pages of an empty slot, and adds an owner to
        each of them.

        Raises:
          ValueError: There are fewer than the slot needs, or a page has no owner, so another
            request could receive it.
        """
        first = count - len(pages)
        if len(pages) < self.num_restored(count):
            raise ValueError(f"a prefix of {count} pages has only {len(pages)} in a pool")
        self.share(pages)
        self.page_table[slot, first:count] = pages
        self.num_freed[slot], self.num_pages[slot] = first, count

    def free_outside_window(self, slot: int, length: int) -> None:
        """Releases the slot's pages before those to keep at `length` tokens.

        Args:
          slot: The slot.
          length: Tokens with KV that results have confirmed; steps in flight can only add to them.
        """
        first = self.num_freed.item(slot)
        end = min(self._first_kept(length), self.num_pages.item(slot))
        if first < end:
            self.release(self.page_table[slot, first:end])
            self.page_table[slot, first:end] = 0
            self.num_freed[slot] = end

    def _first_kept(self, length: int) -> int:
        """Returns the first page that a slot of `length` tokens keeps."""
        if self.num_visible is None:
            return 0
        return max(0, length // self._page_size - self.num_visible - 1)

    def clear(self, slot: int) -> None:
        """Releases the slot's share in its pages."""
        first, end = self.num_freed.item(slot), self.num_pages.item(slot)
        self.release(self.page_table[slot, first:end])
        self.page_table[slot, first:end] = 0
        self.num_freed[slot] = self.num_pages[slot] = 0

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
        is_owned = (columns >= self.num_freed[:, None]) & (columns < self.num_pages[:, None])
        named = np.concatenate([self.page_table[is_owned], np.array(cached, np.int32)])
        shares = np.bincount(named, minlength=len(self.num_owners))
        free = np.sort(self._free[: self.num_free])
        owners = set(np.flatnonzero(self.num_pages).tolist())
        assert np.array_equal(shares, self.num_owners), "reference counts of pages are wrong"
        assert np.array_equal(free, 1 + np.flatnonzero(shares[1:] == 0)), "pages lost or shared"
        assert shares[0] == 0, "page 0 has an owner"
        assert owners <= taken_slots, "a free slot owns pages"
        assert not self.page_table[~is_owned].any(), "a page table has entries outside its pages"
        assert self.num_visible is not None or not self.num_freed.any(), "a visible page is freed"
