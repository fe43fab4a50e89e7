"""Tensor-parallel ranks whose every step must be bitwise equal to that of one rank.

The torch ranks are threads of one process. They use the same shared-memory all-gather as processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.boundary.backend import Backend, StepFuture, StepPlan, StepResult
from shared.boundary.buffers import plan_in
from shared.boundary.program import LaunchMode, Program
from shared.boundary.shm_allgather import ShmAllGather
from shared.boundary.tp_group import TPGroup

WAIT_S = 60.0
"""Steps of ranks are far shorter; a test that waits longer is about to fail."""


def assert_same_bits(got: StepResult, want: StepResult, what: str) -> None:
    """Every array of two results, NaN for NaN."""
    pairs = zip(arrays_of(got), arrays_of(want), strict=True)
    for (name, mine), (other_name, other) in pairs:
        assert name == other_name, what
        np.testing.assert_array_equal(
            mine.view(np.int32), other.view(np.int32), err_msg=f"{what}: {name}"
        )


def arrays_of(result: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a result, and of the records in it, with their names."""
    if isinstance(result, tuple):
        named = result._asdict() if hasattr(result, "_asdict") else dict(enumerate(result))
    else:
        named = vars(result)
    for name, value in named.items():
        if isinstance(value, np.ndarray):
            yield name, value
        elif value is not None and not isinstance(value, float):  # the time is none
            yield from ((f"{name}.{inner}", array) for inner, array in arrays_of(value))


@dataclass
class _Together:
    """A step on one rank alone, and the same on each of the others."""

    futures: Sequence[StepFuture]
    program: Program

    def result(self) -> StepResult:
        want, *others = [future.result() for future in self.futures]
        for rank, got in enumerate(others):
            assert_same_bits(got, want, f"rank {rank} of {len(others)}, {self.program}")
        return want


class SideBySide:
    """A backend of one rank, and those of several ranks that run the same steps.

    What a test reaches for beyond the boundary is that of the one rank.
    """

    def __init__(self, alone: Backend, ranks: Sequence[Backend], close: Callable[[], None]) -> None:
        self._backends, self._close = (alone, *ranks), close
        self.capacity = alone.capacity

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backends[0], name)

    def workspace(self, program: Program) -> int:
        return self._backends[0].workspace(program)

    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        for backend in self._backends:
            backend.prepare(programs, progress)

    def launch(self, program: Program) -> LaunchMode:
        return self._backends[0].launch(program)

    def submit(self, plan: StepPlan) -> StepFuture:
        # A plan of each one's own: the host may fill a buffer anew when the first has read it.
        plans = [plan_in(plan.buffer.copy(), plan.program, self.capacity) for _ in self._backends]
        futures = [
            backend.submit(each) for backend, each in zip(self._backends, plans, strict=True)
        ]
        return _Together(futures, plan.program)

    def close(self) -> None:
        for backend in self._backends:
            backend.close()
        self._close()


def torch_ranks(made_from: tuple, count: int, **more: Any) -> SideBySide:
    """One rank and `count` of them, in float32 on the CPU; the arguments are a backend's."""
    from torch_impl.backend import TorchBackend

    how = {"dtype": "float32", "device": "cpu", "captured": (), **more}
    shm_all_gather = ShmAllGather.create(count, wait_s=WAIT_S)
    ranks = [
        TorchBackend(*made_from, **how, group=TPGroup(rank, count, shm_all_gather))
        for rank in range(count)
    ]
    return SideBySide(TorchBackend(*made_from, **how), ranks, shm_all_gather.remove)


Plan = tuple[Program, np.ndarray]
"""A program and the words of its plan, which processes can hand each other."""


def steps_of_rank(
    made_from: tuple, plans: Sequence[Plan], group: TPGroup
) -> list[dict[str, np.ndarray]]:
    """The results of plans on a rank of torch, in this process."""
    from torch_impl.backend import TorchBackend

    how = {"dtype": "float32", "device": "cpu", "captured": (), "group": group}
    backend = TorchBackend(*made_from, **how)
    backend.prepare([program for program, _ in plans], lambda program: None)
    given = [plan_in(words.copy(), program, backend.capacity) for program, words in plans]
    results = [future.result() for future in [backend.submit(plan) for plan in given]]
    backend.close()
    return [dict(arrays_of(result)) for result in results]


MAKERS: dict[str, tuple[Callable[..., SideBySide], int]] = {
    "torch ranks 2": (torch_ranks, 2),
    "torch ranks 4": (torch_ranks, 4),
}
"""Several ranks compared with one, by the names of frameworks."""


def side_by_side(framework: str, made_from: tuple, **more: Any) -> SideBySide:
    """Several ranks compared with one; the arguments are a backend's."""
    make, count = MAKERS[framework]
    return make(made_from, count, **more)
