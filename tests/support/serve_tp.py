"""`python -m tests.support.serve_tp --tp-size N ...` serves the reference backend on N ranks.

Each rank runs the whole model, and after every step they give each other what it gave: a rank that
was fed another plan, or in another order, ends the server. `RANK_FAULT` names a rank, a place and
what goes wrong there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from shared.boundary.backend import Backend, BackendSpec, StepPlan, StepResult
from shared.boundary.program import LaunchMode, Program
from shared.boundary.tp_group import TPGroup
from shared.process.device import Device
from shared.process.launch import launch
from tests.support import serve_reference

FAULT = "RANK_FAULT"
LACKS, RENAMED, GIB = "lacks", "renamed", 1 << 30
ELSEWHERE, DIFFERS = "elsewhere", "differs"
FAULT_STEP = 30


def fault_at(rank: int, place: str) -> None:
    """Applies the planted fault of a rank at its place."""
    whose, where, what = os.environ.get(FAULT, "0:nowhere:nothing").split(":")
    if (int(whose), where) != (rank, place):
        return
    if what in (LACKS, RENAMED):
        return
    if what == DIFFERS:
        sys.modules["__main__"].digest_of = lambda start: "another"
        return
    if what == ELSEWHERE:
        sys.modules["__main__"].boot = lambda: "another host"
        return
    if what == "raises":
        raise MemoryError("there is no room for the weights")
    if what == "refuses":
        raise ValueError("the folder is not there")
    if what == "sleeps":
        time.sleep(3600)
    os.kill(os.getpid(), getattr(signal, what))


def rank_of_process() -> int:
    """Returns the rank by the command line, as ranks are not informed yet."""
    return int(sys.argv[2]) if len(sys.argv) > 2 and sys.argv[1] == __spec__.name else 0


class MirroredBackend:
    """A backend with the results of all ranks."""

    def __init__(self, own: Backend, ranks: TPGroup) -> None:
        self.capacity, self.workspace, self._own, self._ranks = (
            own.capacity,
            own.workspace,
            own,
            ranks,
        )
        self._thread, self._count = ThreadPoolExecutor(max_workers=1), 0

    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        fault_at(self._ranks.rank, "preparing")
        self._own.prepare(programs, progress)

    def launch(self, program: Program) -> LaunchMode:
        return self._own.launch(program)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        return self._thread.submit(self._compared, self._own.submit(plan))

    def close(self) -> None:
        self._thread.shutdown()
        if self._ranks.shm_all_gather is not None:  # as ranks that give back memory of each other's
            self._ranks.shm_all_gather.all_gather(self._ranks.rank, np.zeros(1, np.uint8))
        self._own.close()

    def _compared(self, flight: Any) -> StepResult:
        result = flight.result()
        self._count += 1
        if self._count >= FAULT_STEP:  # a device that fails once does not come back
            fault_at(self._ranks.rank, "step")
        if self._ranks.shm_all_gather is not None:
            said = np.concatenate([result.tokens.ravel(), result.counts, result.num_nodes])
            of_all = self._ranks.shm_all_gather.all_gather(self._ranks.rank, said.view(np.uint8))
            assert (of_all == of_all[0]).all(), "ranks have different results"
        return result


def load(blueprint: BackendSpec, *rest: Any) -> MirroredBackend:
    fault_at(blueprint.ranks.rank, "loading")
    return MirroredBackend(serve_reference.load(blueprint, *rest), blueprint.ranks)


def find_device() -> Device:
    rank = rank_of_process()
    fault_at(rank, "planning")
    device = Device.cpu()
    has_fault = os.environ.get(FAULT, "").removeprefix(f"{rank}:planning:")
    name = "GPU" if has_fault == RENAMED else device.name
    return replace(device, name=name, free_bytes=GIB if has_fault == LACKS else 8 * GIB)


PLATFORM = replace(
    serve_reference.PLATFORM,
    find_device=find_device,
    load=load,
)

if __name__ == "__main__":
    raise SystemExit(launch(sys.argv[1:], lambda: PLATFORM, "tests.support.serve_tp"))
