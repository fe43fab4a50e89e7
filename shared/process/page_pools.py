"""Page pools in the memory plan: their bytes, and the sizes of those of sliding-window layers."""

from collections.abc import Iterator

from shared.boundary.backend import BackendLimits, BackendSpec
from shared.boundary.program import StepKind
from shared.boundary.window_pools import WindowPool, max_slot_pages, max_visible_pages
from shared.models.cache_spec import CacheUnit
from shared.models.config import ModelConfig
from shared.models.groups import pool_bytes, pools_with
from shared.process.memory_plan_entry import MemoryPlanEntry

POSITIONS_PER_CACHED_WINDOW = 4096
"""Positions of the other pages for each window that the prefix cache can keep. A cached sequence of
this length can be resumed at one position if all pages are in use."""

CACHED_SHARE = 4
"""At most one page for the prefix cache for this number of the other pages, so that wide windows
save memory too."""


def window_pools(
    capacity: BackendLimits, model: ModelConfig, *, has_cache: bool
) -> tuple[WindowPool, ...]:
    """Returns a page pool for each sliding window of a model that saves memory.

    A pool has pages for the widest step of each running request, with all steps in flight; for the
    prompt chunks in flight; and, for the prefix cache, of one window for every
    `POSITIONS_PER_CACHED_WINDOW` positions of the other pages, at most one of `CACHED_SHARE` pages.
    Layers with a window for which this is no less than the other pages have no pool: they use the
    other pages.

    Args:
      capacity: Limits without window pools.
      model: Config of the target.
      has_cache: True if the prefix cache is enabled.
    """
    windows = sorted({pool.window for pool in model.kv_pools if pool.window is not None})
    pools = (WindowPool(window, _num_pages(capacity, window, has_cache)) for window in windows)
    return tuple(pool for pool in pools if pool.num_pages < capacity.num_pages)


def _num_pages(capacity: BackendLimits, window: int, has_cache: bool) -> int:
    """Returns the pages of a pool, including page 0."""
    page_size, steps = capacity.page_size, capacity.overlap + 1
    growth = 1 + capacity.overlap * (capacity.max_depth + 1) + capacity.scratch
    running = (capacity.num_slots - 1) * max_slot_pages(window, page_size, growth)
    prefills = [p for p in capacity.programs if p.work is StepKind.PREFILL]
    chunk = max(capacity.num_pages_for(p.tokens) + p.batch for p in prefills)
    others = capacity.num_pages - 1
    visible = max_visible_pages(window, page_size)
    cached = others * page_size * visible // POSITIONS_PER_CACHED_WINDOW
    return 1 + running + steps * chunk + min(cached, others // CACHED_SHARE) * has_cache


def page_lines(blueprint: BackendSpec) -> Iterator[MemoryPlanEntry]:
    """Yields the lines of the KV of one rank; `blueprint` is of its shard."""
    capacity, item, drafter = blueprint.capacity, blueprint.item_bytes, blueprint.drafts.sizes
    positions = capacity.num_pages * capacity.page_size
    windows = {each.window: each for each in capacity.window_pools}
    pages = f"{capacity.num_pages - 1} pages of {capacity.page_size} tokens, and a scratch page"
    pools = [pool for pool in blueprint.config.kv_pools if pool.window not in windows]
    yield MemoryPlanEntry("KV", pages, positions * pool_bytes(pools, CacheUnit.POSITION, item))
    for window, each in windows.items():
        pools = [pool for pool in blueprint.config.kv_pools if pool.window == window]
        position_bytes = pool_bytes(pools, CacheUnit.POSITION, item)
        num_bytes = each.num_pages * capacity.page_size * position_bytes
        detail = f"{each.num_pages - 1} pages, {sum(map(len, pools))} layers, and a scratch page"
        yield MemoryPlanEntry(f"KV of window {window}", detail, num_bytes)
    if drafter is not None and not drafter.reads_target_kv:
        layers = sum(map(len, pools_with(drafter.pools, CacheUnit.POSITION)))
        detail = f"the same pages, {layers} layer{'s' * (layers > 1)}"
        num_bytes = positions * pool_bytes(drafter.pools, CacheUnit.POSITION, item)
        yield MemoryPlanEntry("draft KV", detail, num_bytes)
