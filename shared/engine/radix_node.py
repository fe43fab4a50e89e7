"""Node of the radix cache: one full page of a sequence, and what is attached to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

NO_SNAPSHOT = 0


@dataclass(eq=False, slots=True)
class Node:
    """One full page of a sequence.

    Attributes:
      parent: Node of the page before it; None for a root, which has no page.
      key: Its tokens as bytes, plus the next token if draft KV depends on it. For each image that
        overlaps these, its digest and the offset of the page in the image follow.
      page: Its page.
      num_pages: Pages from the root to it, its own included.
      is_whole: True if its draft KV is complete.
      children: Nodes of the following pages.
      num_locks: Running requests that use it or a descendant.
      used: Time of its last use, by the cache's own clock.
      snapshot: State snapshot at its end; 0 for none.
      window_pages: Its page in each window pool; 0 for none.
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
    window_pages: list[int] = field(default_factory=list)

    def upwards(self) -> Iterator[Node]:
        """Yields the nodes from this one up to the first page."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent
