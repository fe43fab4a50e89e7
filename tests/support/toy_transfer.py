"""KV transfer of the toy backend: its pages store tokens, and its state is one number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shared.boundary.backend import BackendLimits, StepPlan
from shared.boundary.transfer_spec import (
    ImportKV,
    StatePool,
    TransferArray,
    TransferSpec,
    TransferWords,
)
from shared.models.cache_spec import CacheArraySpec, CacheUnit


def with_transfer(capacity: BackendLimits, step_bytes: int) -> BackendLimits:
    """Returns a toy's capacity with export and import programs."""
    page = capacity.page_size

    def array(pool: str, unit: CacheUnit, *shape: int) -> TransferArray:
        entry = CacheArraySpec("tokens", unit, shape, heads=None)
        return TransferArray("tokens", pool, "int32", (), entry, False, 0)

    states = StatePool((array("states", CacheUnit.SLOT, 2),), range(1))
    spec = TransferSpec(
        pages=(array("pages", CacheUnit.POSITION, 2, page),),
        windows=tuple(
            (array(f"window {pool.window}", CacheUnit.POSITION, page),)
            for pool in capacity.window_pools
        ),
        states=(states,) if capacity.num_snapshots > 1 else (),
        step_bytes=step_bytes,
    )
    return replace(capacity, transfer=spec, programs=(*capacity.programs, *spec.programs()))


def run(
    plan: StepPlan, memory: list[list[np.ndarray]], snapshots: np.ndarray
) -> TransferWords | None:
    """Runs an export or import step.

    Args:
      plan: The plan.
      memory: Arrays of the pages, and of the pages of each window pool.
      snapshots: State of each snapshot.
    """
    tables = [table[0] for table in plan.page_tables]
    if not isinstance(plan.work, ImportKV):
        if plan.program.blocks:
            at = plan.snapshots.restore[:1]
            return TransferWords(None, (), snapshots[at].view(np.int32).reshape(1, 2))
        found = [
            np.concatenate([pages[table] for pages in arrays], axis=1)
            for arrays, table in zip(memory, tables, strict=True)
        ]
        return TransferWords(found[0], tuple(found[1:]), None)
    words = plan.work.words
    if words.layers is not None:
        snapshots[plan.snapshots.save[0]] = words.layers.copy().view(np.int64)[0, 0]
        return None
    each = zip(memory, tables, (words.pages, *words.windows), strict=True)
    for arrays, table, entries in each:
        for pages, part in zip(arrays, np.split(entries, len(arrays), axis=1), strict=True):
            pages[table] = part
    return None
