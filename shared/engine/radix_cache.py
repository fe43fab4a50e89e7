"""Radix cache: full KV pages by their tokens, with recurrent state snapshots.

A radix tree with one node per full page, whose edge is the tokens of the page. The cache is one
more owner of each of its pages, in addition to the slots that name it. A state snapshot is attached
to the node that ends at its position; it can be evicted while the page stays. So can the pages of
the node in window pools (`WindowPages`).

A node is locked while a running request uses it or a descendant; its page is also a page of that
request. (If two requests compute the same page at the same time, the second one does not lock the
node of the first: it would lock a page that it does not own.) Unlocked nodes can be evicted, leaves
first, in LRU order. Candidates are in a heap whose entries are validated when popped, so eviction
does not scan the tree.

Source: RadixAttention, Zheng et al. 2024, arXiv:2312.07104.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice

import numpy as np
from jaxtyping import Int32

from shared.engine.allocator import Allocator
from shared.engine.image_inputs import CacheKeyImage, cache_key
from shared.engine.radix_node import Node
from shared.engine.snapshot_pool import SnapshotPool
from shared.engine.window_pages import WindowPages

MOST_STALE = 4
"""Heap entries per node at which the heap is rebuilt."""


class RadixCache:
    """Radix tree of cached pages.

    Args:
      allocator: Counts the owners of the pages.
      key_reach: Tokens after a page that its draft KV depends on, 0 or 1. A row of an EAGLE-like
        head combines a token's hidden state with the next token.

    Attributes:
      snapshots: State snapshots in the tree, and free ones.
      windows: Cached pages of each window pool.
    """

    def __init__(self, allocator: Allocator, key_reach: int) -> None:
        self._allocator, self._key_reach = allocator, key_reach
        self._page_size = allocator.capacity.page_size
        self.roots: dict[Hashable, Node] = {}
        self._salts: dict[Node, Hashable] = {}
        self._clock = 0
        self._num_nodes = self._num_locked = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._pushed = self._num_changes = 0
        self.snapshots = SnapshotPool(allocator.capacity.num_snapshots)
        self.windows = [WindowPages(pool, i) for i, pool in enumerate(allocator.windows)]

    @property
    def num_pages(self) -> int:
        """Pages that the cache owns, alone or with slots."""
        return self._num_nodes

    @property
    def num_changes(self) -> int:
        """Counter that grows whenever cached pages or snapshots may have changed."""
        attached = sum(each.num_changes for each in self.windows)
        return self._num_changes + self.snapshots.num_changes + attached

    @property
    def num_evictable(self) -> int:
        """Pages that no slot holds and that can be evicted at once."""
        return self._num_nodes - self._num_locked

    # Reading

    def path(
        self, salt: Hashable, tokens: Int32[np.ndarray, " T"], images: Sequence[CacheKeyImage] = ()
    ) -> list[Node]:
        """Returns the nodes of the longest cached prefix of a sequence, first to last.

        Args:
          salt: Cache namespace; sequences of other namespaces do not match.
          tokens: The sequence; it determines which pages are full, including the lookahead.
          images: Images of the sequence.
        """
        node, nodes = self.roots.get(salt), []
        if node is None:
            return nodes
        for key in self._keys(tokens, images, 0):
            node = node.children.get(key)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def num_restorable(self, path: Sequence[Node], needs_snapshot: bool) -> int:
        """Returns the pages of the longest prefix of a path from which a request can start.

        Args:
          path: Nodes from the first page on.
          needs_snapshot: True if a prefix must end at a state snapshot.
        """
        if not self.windows:
            whole = range(len(path), 0, -1)
            return next((i for i in whole if path[i - 1].snapshot or not needs_snapshot), 0)
        longest, runs = 0, [0] * len(self.windows)  # pages without a gap, up to this node
        for count, node in enumerate(path, start=1):
            steps = zip(runs, node.window_pages, strict=True)
            runs = [run + 1 if page else 0 for run, page in steps]
            needed = (each.pool.num_restored(count) for each in self.windows)
            if (node.snapshot or not needs_snapshot) and all(map(operator.ge, runs, needed)):
                longest = count
        return longest

    def _keys(
        self, tokens: Int32[np.ndarray, " T"], images: Sequence[CacheKeyImage], first: int
    ) -> Iterator[bytes]:
        """Yields the keys of a sequence's full pages from page `first` on."""
        raw, size = tokens.astype(np.int32, copy=False).tobytes(), 4 * self._page_size
        reach = 4 * self._key_reach
        for start in range(first * size, len(raw) - size - reach + 1, size):
            key = raw[start : start + size + reach]
            if images:
                key += cache_key(images, start // 4, (start + size + reach) // 4)
            yield key

    # Running requests

    def lock(self, node: Node, above: Node | None) -> None:
        """Locks `node` and its ancestors below `above` against eviction."""
        self._clock += 1
        for each in node.upwards():
            if each is above:
                return
            self._num_locked += not each.num_locks
            each.num_locks += 1
            each.used = self._clock

    def unlock(self, node: Node) -> None:
        """Removes one lock from a node and all its ancestors."""
        for each in node.upwards():
            each.num_locks -= 1
            self._num_locked -= not each.num_locks
        self._offer(node)

    # Writing

    def insert(
        self,
        salt: Hashable,
        below: Node | None,
        tokens: Int32[np.ndarray, " T"],
        pages: Int32[np.ndarray, " n"],
        is_whole: Sequence[bool],
        images: Sequence[CacheKeyImage] = (),
        *,
        is_running: bool,
    ) -> Node | None:
        """Inserts pages of a sequence that are not cached yet, and becomes an owner of them.

        Args:
          salt: Cache namespace.
          below: Node of the sequence that is known to be cached, or None.
          tokens: The sequence from its start.
          pages: Its pages from its start, each with an owner.
          is_whole: Flag per page, see `Node`.
          images: Images of the sequence.
          is_running: True if the pages stay in a slot too, so that none is inserted below another
            request's page.

        Returns:
          The node of the last page that is cached now; None if none is.
        """
        node = self._root(salt) if below is None else below
        self._clock += 1
        added = []
        for place, key in enumerate(
            self._keys(tokens, images, node.num_pages), start=node.num_pages
        ):
            if place == len(pages):
                break
            child = node.children.get(key)
            if child is None:
                child = Node(node, key, int(pages[place]), place + 1, bool(is_whole[place]))
                child.window_pages = [0] * len(self.windows)
                node.children[key] = child
                added.append(child.page)
            elif is_running and child.page != pages[place]:
                break
            child.used = self._clock
            node = child
        self._num_nodes += len(added)
        self._num_changes += len(added)
        self._allocator.pages.share(np.array(added, np.int32))
        if node.parent is None:
            self._drop_if_empty(node)
            return None
        self._offer(node)
        return node

    def attach_window_pages(
        self,
        salt: Hashable,
        below: Node | None,
        tokens: Int32[np.ndarray, " T"],
        pages: Sequence[Int32[np.ndarray, " n"]],
        images: Sequence[CacheKeyImage] = (),
    ) -> None:
        """Attaches window pages of a sequence to the nodes below `below` that have none.

        These include nodes with a page of another request: without its window pages a prefix would
        be computed again for each request until it is evicted.

        Args:
          salt, below, tokens, images: See `insert`.
          pages: Pages of the sequence from its start in each window pool; 0 for freed ones.
        """
        node, nodes = self.roots.get(salt) if below is None else below, []
        if node is None:
            return
        first = node.num_pages
        for key, _ in zip(self._keys(tokens, images, first), pages[0][first:], strict=False):
            node = node.children.get(key)
            if node is None:
                break
            nodes.append(node)
        for cached, held in zip(self.windows, pages, strict=True):
            cached.attach(nodes, held[first : first + len(nodes)])

    def touch_window_pages(self, node: Node) -> None:
        """Marks the window pages of a prefix as used; `node` is its last."""
        for cached in self.windows:
            visible = cached.pool.num_restored(node.num_pages)
            cached.touch(reversed([*islice(node.upwards(), visible)]))

    def window_pages(self, path: Sequence[Node]) -> tuple[Int32[np.ndarray, " m"], ...]:
        """Returns the pages at the end of a prefix that a request needs, in each window pool."""
        pools, first = [each.pool for each in self.windows], len(path)
        seen = (path[first - pool.num_restored(first) :] for pool in pools)
        return tuple(
            np.array([node.window_pages[i] for node in nodes], np.int32)
            for i, nodes in enumerate(seen)
        )

    def _root(self, salt: Hashable) -> Node:
        if salt not in self.roots:
            self.roots[salt] = root = Node(None, b"", 0, 0, True)
            self._salts[root] = salt
        return self.roots[salt]

    def _drop_if_empty(self, root: Node) -> None:
        if not root.children:
            del self.roots[self._salts.pop(root)]

    def evict(self, count: int) -> None:
        """Evicts `count` pages, or all unlocked ones if there are fewer."""
        pages = []
        while len(pages) < count and self._heap:
            used, _, node = heapq.heappop(self._heap)
            if used == node.used and self._is_offered(node):
                pages.append(node.page)
                self._remove(node)
        if pages:
            self._allocator.pages.release(np.array(pages, np.int32))

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None  # a root has no page
        if node.snapshot:
            self.snapshots.free(node.snapshot)
        for cached in self.windows:
            cached.remove(node)
        del parent.children[node.key]
        node.page = 0
        self._num_nodes -= 1
        self._num_changes += 1
        if parent.parent is not None:
            parent.used = max(parent.used, node.used)
            self._offer(parent)
        else:
            self._drop_if_empty(parent)

    def _offer(self, node: Node) -> None:
        """Pushes an unlocked leaf to the heap."""
        if not self._is_offered(node):
            return
        if len(self._heap) > MOST_STALE * (self._num_nodes + 1):
            fresh = {id(each): each for used, _, each in self._heap if used == each.used}
            self._heap = [self._entry(each) for each in fresh.values() if self._is_offered(each)]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, self._entry(node))

    def _entry(self, node: Node) -> tuple[int, int, Node]:
        self._pushed += 1
        return node.used, self._pushed, node

    def _is_offered(self, node: Node) -> bool:
        return bool(node.page) and not node.num_locks and not node.children

    def nodes(self) -> Iterator[Node]:
        """Yields all nodes except the roots, in no order; the tree must not change meanwhile."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()
