"""Operations on vocabulary shards, on several ranks in one process.

Ranks of torch are threads with a shared-memory all-gather, those of JAX a mapped axis of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from kernels.rooms import module_in
from shared.boundary.shm_allgather import ShmAllGather
from shared.boundary.tp_group import TPGroup
from shared.models.sharded_range import vocab_section
from tests.support.implementations import to_jax, to_numpy, to_torch
from tests.support.op_records import leaves, mapped
from tests.support.ranks import WAIT_S

Ops = Callable[[str], ModuleType]
Work = Callable[..., Any]
"""`work(ops, vocabulary, parts, given)` with a framework's arrays."""


def shares(rows: np.ndarray, count: int) -> np.ndarray:
    """The part of each rank, [count, ..., share], filled up as weights of no token would."""
    section = vocab_section(rows.shape[-1])
    parts = np.zeros((count, *rows.shape[:-1], section.share(count)), rows.dtype)
    for rank in range(count):
        first, end = section.run(rank, count)
        parts[rank, ..., : end - first] = rows[..., first:end]
    return parts


def alone_and_on_ranks(
    framework: str, count: int, work: Work, size: int, rows: Sequence[np.ndarray], given: dict
) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Returns the arrays of `work` for whole rows, and for each rank with a shard of them.

    Args:
      size: Of the vocabulary that the last axis of the rows is.
    """

    def ops(name: str) -> ModuleType:
        return module_in(f"{framework}_impl.ops", name)

    vocabulary = ops("vocab_parallel").Vocabulary
    run = {"torch": _threads, "jax": _mapped}[framework]
    return run(work, ops, vocabulary, size, count, rows, given)


def _arrays(result: Any) -> list[np.ndarray]:
    return list(leaves(np.ndarray, mapped(result, leaf=to_numpy, module=np)))


def _threads(
    work: Work, ops: Ops, vocabulary: Any, size: int, count: int, rows: Sequence, given: dict
) -> tuple:
    placed = {name: mapped(x, to_torch, ops("sampling")) for name, x in given.items()}
    alone = work(ops, ops("vocab_parallel").ALL, [*map(to_torch, rows)], placed)
    parts = [shares(row, count) for row in rows]
    shm_all_gather = ShmAllGather.create(count, wait_s=WAIT_S)

    def of_rank(rank: int) -> list[np.ndarray]:
        own = [to_torch(part[rank]) for part in parts]
        return _arrays(
            work(ops, vocabulary(size, TPGroup(rank, count, shm_all_gather)), own, placed)
        )

    with ThreadPoolExecutor(count) as pool:
        every = list(pool.map(of_rank, range(count)))
    shm_all_gather.remove()
    return _arrays(alone), every


def _mapped(
    work: Work, ops: Ops, vocabulary: Any, size: int, count: int, rows: Sequence, given: dict
) -> tuple:
    jax, names = import_module("jax"), ops("all_gather")
    backend = import_module("jax_impl.backend")
    quick = {"compiler_options": backend.compiler_options(jax.devices("cpu")[0], True)}
    placed = {name: mapped(x, to_jax, ops("sampling")) for name, x in given.items()}

    def alone(rows: list, placed: Any) -> Any:
        return work(ops, ops("vocab_parallel").ALL, rows, placed)

    def of_rank(parts: list, placed: Any) -> Any:
        return work(ops, vocabulary(size, TPGroup(0, count, None)), parts, placed)

    want = jax.jit(alone, **quick)([*map(to_jax, rows)], placed)
    ranked = jax.vmap(of_rank, in_axes=(0, None), axis_name=names.AXIS)
    on_ranks = jax.jit(ranked, **quick)
    got = _arrays(on_ranks([to_jax(shares(row, count)) for row in rows], placed))
    return _arrays(want), [[array[rank] for array in got] for rank in range(count)]
