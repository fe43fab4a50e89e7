"""Capacities with page pools of sliding windows."""

from __future__ import annotations

from dataclasses import replace

from shared.boundary.backend import BackendLimits
from shared.boundary.window_pools import WindowPool, max_slot_pages
from shared.models.config import ModelConfig


def with_window_pools(capacity: BackendLimits, model: ModelConfig) -> BackendLimits:
    """Adds a pool for each window of the model, with the number of the other pages."""
    windows = sorted({pool.window for pool in model.kv_pools if pool.window is not None})
    pools = tuple(WindowPool(window, capacity.num_pages) for window in windows)
    return replace(capacity, window_pools=pools)


def with_fewer_pages(capacity: BackendLimits, num_pages: int, chunk: int) -> BackendLimits:
    """Reduces all pools: window pools have pages for all slots and one chunk of a prompt."""
    widest = 1 + capacity.overlap * (capacity.max_depth + 1) + capacity.scratch

    def fewer(pool: WindowPool) -> WindowPool:
        running, most = (
            max_slot_pages(pool.window, capacity.page_size, n) for n in (widest, chunk)
        )
        needed = 1 + (capacity.num_slots - 2) * running + most
        return replace(pool, num_pages=min(pool.num_pages, needed))

    return replace(
        capacity, num_pages=num_pages, window_pools=tuple(map(fewer, capacity.window_pools))
    )
