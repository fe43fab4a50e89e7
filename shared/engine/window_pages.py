"""Cached pages of one sliding-window pool: attached to nodes of the radix cache, evicted in LRU
order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
from jaxtyping import Int32

from shared.engine.page_pool import PagePool
from shared.engine.radix_node import Node


class WindowPages:
    """Pages of a window pool that the radix cache owns, alone or with slots.

    A node without its page stays in the tree: a request can start after it, but not within a window
    of it. A page is evictable while no slot names it.

    Args:
      pool: The pool.
      index: Its index in `BackendLimits.window_pools`.

    Attributes:
      pool: The pool.
      num_changes: Counter of attached and evicted pages.
    """

    def __init__(self, pool: PagePool, index: int) -> None:
        self.pool, self._index = pool, index
        self._nodes: OrderedDict[int, Node] = OrderedDict()  # by page, the LRU page first
        self._is_cached = np.zeros(pool.size + 1, bool)
        self.num_changes = 0

    @property
    def num_evictable(self) -> int:
        """Pages that no slot names."""
        return int(np.count_nonzero(self._is_cached & (self.pool.num_owners == 1)))

    def attach(self, nodes: Sequence[Node], pages: Int32[np.ndarray, " n"]) -> None:
        """Becomes an owner of the pages of nodes that have none; page 0 is no page."""
        pairs = zip(nodes, pages.tolist(), strict=True)
        new = [(node, page) for node, page in pairs if page and not node.window_pages[self._index]]
        for node, page in new:
            node.window_pages[self._index] = page
            self._nodes[page] = node
        added = np.array([page for _, page in new], np.int32)
        self.pool.share(added)
        self._is_cached[added] = True
        self.num_changes += len(added)

    def touch(self, nodes: Iterable[Node]) -> None:
        """Marks the pages of nodes as used."""
        for node in nodes:
            if page := node.window_pages[self._index]:
                self._nodes.move_to_end(page)

    def evict(self, count: int) -> None:
        """Evicts `count` pages, or all evictable ones if there are fewer."""
        if count > 0:
            owners = self.pool.num_owners
            self._drop(list(islice((p for p in self._nodes if owners[p] == 1), count)))

    def remove(self, node: Node) -> None:
        """Releases the page of a node that leaves the tree."""
        if page := node.window_pages[self._index]:
            self._drop([page])

    def _drop(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._nodes.pop(page).window_pages[self._index] = 0
        dropped = np.array(pages, np.int32)
        self._is_cached[dropped] = False
        self.pool.release(dropped)
        self.num_changes += len(pages)

    def check(self, nodes: Sequence[Node]) -> list[int]:
        """Asserts that the pages are those of the nodes of the tree, and returns them."""
        named = {page: node for node in nodes if (page := node.window_pages[self._index])}
        assert named == dict(self._nodes), "window pages and nodes do not match"
        assert np.flatnonzero(self._is_cached).tolist() == sorted(named), "window pages are lost"
        return list(named)
