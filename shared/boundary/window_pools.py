"""Page pools of sliding-window layers.

A row at position p of a layer with a window of w tokens attends to positions p - w + 1 to p. Pages
before these are freed, so a slot has few pages in such a pool, however long its request is.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class WindowPool:
    """Page pool of the target's layers with one sliding window.

    Attributes:
      window: Sliding window in tokens, including the token itself.
      num_pages: Pages of the pool, including the reserved page 0.
    """

    window: int
    num_pages: int


def max_visible_pages(window: int, page_size: int) -> int:
    """Returns the maximum visible pages before the page of a request's length."""
    return -(-(window - 1) // page_size)


def max_slot_pages(window: int, page_size: int, positions: int) -> int:
    """Returns the maximum pages of a slot while steps write `positions` positions past its known
    length.

    One page before the visible ones is kept too, see `shared.engine.page_pool`.
    """
    return 1 + max_visible_pages(window, page_size) - (-(positions + page_size - 1) // page_size)


def check_ascending(pools: tuple[WindowPool, ...]) -> None:
    """Checks that the windows of the pools differ and ascend.

    Raises:
      ValueError: They do not.
    """
    windows = [pool.window for pool in pools]
    if windows != sorted(set(windows)) or min(windows, default=1) < 1:
        raise ValueError(f"window_pools must have ascending windows of at least 1, got {windows}")
