"""The prefix cache: full KV pages by the text that they hold, and recurrent states between them.

A radix tree whose digit is a page: a node is one full page, reached by the tokens of all pages
before it and its own. The cache is one more owner of each of its pages, beside the slots that name
it. A recurrent state (a snapshot) hangs at the node that ends where the state stands; it may go
while the page stays.

A node is locked while a running request stands on it or below it; its page is that request's too.
(Where two requests made the same page at the same time, one of them stays behind it until it ends:
a page that it locked without having it would be lost to both.) What nobody has locked may be
evicted, leaves first, those that were used longest ago before the others. Nobody looks through the
tree for them: they wait in a heap, whose entries are checked when they come up.

Source: RadixAttention, Zheng et al. 2024, arXiv:2312.07104.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from shared.engine.allocator import Allocator
from shared.engine.pictures import Picture, key_of

NO_SNAPSHOT = 0
MOST_STALE = 4
"""Entries of the heap for each node before it is made anew."""


@dataclass(eq=False, slots=True)
class Node:
    """One full page of some text.

    Attributes:
      parent: The page before it; None of a root, which is no page.
      key: Its tokens, as bytes; with the one after them where draft KV depends on that. Behind
        them, of each picture that these touch, its digest and where in it the page begins.
      page: Its page.
      num_pages: Pages from the root to it, its own included.
      is_whole: Whether each row of its draft KV was written.
      children: The pages that follow it.
      num_locks: Running requests that stand on it or below it.
      used: When it was used last, by the cache's own clock.
      snapshot: State at its end; 0: none.
    """

    parent: Node | None
    key: bytes
    page: int
    num_pages: int
    is_whole: bool
    children: dict[bytes, Node] = field(default_factory=dict)
    num_locks: int = 0
    used: int = 0
    snapshot: int = NO_SNAPSHOT

    def upwards(self) -> Iterator[Node]:
        """The pages from this one to the first."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class RadixCache:
    """Which pages hold which text.

    Args:
      allocator: The pages' owners are counted there.
      key_reach: Tokens behind a page that its draft KV depends on, 0 or 1. A row of an EAGLE-kind
        head is made of a token's hidden state and the token after it.

    Attributes:
      snapshots: The states that hang in the tree, and those that nobody has.
    """

    def __init__(self, allocator: Allocator, key_reach: int) -> None:
        self._allocator, self._key_reach = allocator, key_reach
        self._page_size = allocator.capacity.page_size
        self.roots: dict[str, Node] = {}
        self._salts: dict[Node, str] = {}
        self._clock = 0
        self._num_nodes = self._num_locked = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._pushed = self._num_changes = 0
        self.snapshots = SnapshotPool(allocator.capacity.num_snapshots)

    @property
    def num_pages(self) -> int:
        """Pages that the cache owns, alone or with slots."""
        return self._num_nodes

    @property
    def num_changes(self) -> int:
        """Grows whenever what is there of some text may have changed, pages or states."""
        return self._num_changes + self.snapshots.num_changes

    @property
    def num_evictable(self) -> int:
        """Pages that no slot has and that can be had at once."""
        return self._num_nodes - self._num_locked

    # Reading

    def path(
        self, salt: str, tokens: Int32[np.ndarray, " T"], pictures: Sequence[Picture] = ()
    ) -> list[Node]:
        """The nodes of the longest beginning of a text that is there, first to last.

        Args:
          salt: Texts of another salt are not seen.
          tokens: The text; whether a page is full and known to its last row follows from it.
          pictures: Those of the text.
        """
        node, nodes = self.roots.get(salt), []
        if node is None:
            return nodes
        for key in self._keys(tokens, pictures, 0):
            node = node.children.get(key)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def _keys(
        self, tokens: Int32[np.ndarray, " T"], pictures: Sequence[Picture], first: int
    ) -> Iterator[bytes]:
        """The keys of a text's full pages from page `first` on."""
        raw, size = tokens.astype(np.int32, copy=False).tobytes(), 4 * self._page_size
        reach = 4 * self._key_reach
        for start in range(first * size, len(raw) - size - reach + 1, size):
            key = raw[start : start + size + reach]
            if pictures:
                key += key_of(pictures, start // 4, (start + size + reach) // 4)
            yield key

    # Running requests

    def lock(self, node: Node, above: Node | None) -> None:
        """Keeps `node`, and all above it up to what hangs from `above`, from being evicted."""
        self._clock += 1
        for each in node.upwards():
            if each is above:
                return
            self._num_locked += not each.num_locks
            each.num_locks += 1
            each.used = self._clock

    def unlock(self, node: Node) -> None:
        """Takes back one lock of a node and of all above it."""
        for each in node.upwards():
            each.num_locks -= 1
            self._num_locked -= not each.num_locks
        self._offer(node)

    # Writing

    def insert(
        self,
        salt: str,
        below: Node | None,
        tokens: Int32[np.ndarray, " T"],
        pages: Int32[np.ndarray, " n"],
        is_whole: Sequence[bool],
        pictures: Sequence[Picture] = (),
        *,
        is_running: bool,
    ) -> Node | None:
        """Becomes an owner of pages of a text that are not there yet.

        Args:
          below: Node of the text that is known to be there; None: none is.
          tokens: The text from its beginning.
          pages: Its pages from its beginning, each of which has an owner.
          is_whole: Of each of them, see `Node`.
          pictures: Those of the text.
          is_running: They stay pages of a slot too, so none is put behind another's page.

        Returns:
          The node of the last page that is there now; None where none is.
        """
        node = self._root(salt) if below is None else below
        self._clock += 1
        added = []
        for place, key in enumerate(
            self._keys(tokens, pictures, node.num_pages), start=node.num_pages
        ):
            if place == len(pages):
                break
            child = node.children.get(key)
            if child is None:
                child = Node(node, key, int(pages[place]), place + 1, bool(is_whole[place]))
                node.children[key] = child
                added.append(child.page)
            elif is_running and child.page != pages[place]:
                break
            child.used = self._clock
            node = child
        self._num_nodes += len(added)
        self._num_changes += len(added)
        self._allocator.add_owner(np.array(added, np.int32))
        if node.parent is None:
            self._drop_if_empty(node)
            return None
        self._offer(node)
        return node

    def _root(self, salt: str) -> Node:
        if salt not in self.roots:
            self.roots[salt] = root = Node(None, b"", 0, 0, True)
            self._salts[root] = salt
        return self.roots[salt]

    def _drop_if_empty(self, root: Node) -> None:
        if not root.children:
            del self.roots[self._salts.pop(root)]

    def evict(self, count: int) -> None:
        """Gives back `count` pages, or all that nobody has locked where they are fewer."""
        pages = []
        while len(pages) < count and self._heap:
            used, _, node = heapq.heappop(self._heap)
            if used == node.used and self._is_offered(node):
                pages.append(node.page)
                self._remove(node)
        if pages:
            self._allocator.disown(np.array(pages, np.int32))

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None  # a root is no page
        if node.snapshot:
            self.snapshots.give(node.snapshot)
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
        """Enters a leaf that nobody has locked into the heap."""
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
        """Every node but the roots, in no order; the tree must not change meanwhile."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()


class SnapshotPool:
    """Who has which snapshot, without the sink 0: the tree, a running request, or nobody.

    Steps take effect in the order of submission, so a snapshot that a submitted step restores may
    be handed on at once; one that a step is yet to restore is pinned.

    Args:
      num_snapshots: Size of the pool with the sink.

    Attributes:
      num_changes: How often a node got or lost a state, its own eviction apart.
    """

    def __init__(self, num_snapshots: int) -> None:
        self._free = list(range(num_snapshots - 1, 0, -1))
        self._size = num_snapshots - 1
        self._cached: OrderedDict[int, Node] = OrderedDict()
        self._pins: dict[int, int] = {}
        self.num_changes = 0

    @property
    def num_free(self) -> int:
        """Snapshots that neither the tree nor a running request has."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Snapshots that hang in the tree."""
        return len(self._cached)

    def take(self) -> int:
        """A snapshot for a request, if need be of the state used longest ago; 0: there is none."""
        if self._free:
            return self._free.pop()
        for snapshot, node in self._cached.items():
            if snapshot not in self._pins:
                del self._cached[snapshot]
                node.snapshot = NO_SNAPSHOT
                self.num_changes += 1
                return snapshot
        return NO_SNAPSHOT

    def give(self, snapshot: int) -> None:
        """Gives back a snapshot, of the tree or of a request."""
        self._cached.pop(snapshot, None)
        self._free.append(snapshot)

    def hang(self, snapshot: int, node: Node) -> None:
        """Leaves a request's snapshot to the tree, which keeps the one that it has already."""
        if node.snapshot:
            self.give(snapshot)
        else:
            node.snapshot = snapshot
            self._cached[snapshot] = node
            self.num_changes += 1
        self._cached.move_to_end(node.snapshot)

    def pin(self, snapshot: int) -> None:
        """Keeps a cached snapshot until a step that restores it is submitted."""
        self._cached.move_to_end(snapshot)
        self._pins[snapshot] = self._pins.get(snapshot, 0) + 1

    def unpin(self, snapshot: int) -> None:
        """Takes back one pin."""
        self._pins[snapshot] -= 1
        if not self._pins[snapshot]:
            del self._pins[snapshot]

    def check(self, held: Sequence[int]) -> None:
        """Asserts that no snapshot is lost or has two owners.

        Args:
          held: Those of running requests.
        """
        everyone = sorted([*self._free, *self._cached, *held])
        assert everyone == list(range(1, self._size + 1)), "snapshots lost or shared"
        for snapshot, node in self._cached.items():
            assert node.snapshot == snapshot, "a node does not know its snapshot"
            assert node.page, "a snapshot hangs at a node that was evicted"
