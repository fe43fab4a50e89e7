"""The texts of a start with some flags, on each backend; `--tp-size` runs its ranks.

`python -m tests.support.texts FLAGS` prints those of JAX as JSON; see `texts_on_devices`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shared.boundary.backend import Backend
from shared.boundary.shm_allgather import ShmAllGather
from shared.boundary.tp_group import TPGroup
from shared.engine.request import Request, SamplingParams
from shared.options.command_line import parse
from shared.process import engines, start
from shared.process.device import Device
from tests.support.in_process_engine import one_bucket
from tests.support.ranks import WAIT_S, SideBySide
from tests.support.run_engine import Outcome, drive
from tests.support.serve_reference import platform_of

ROOT = Path(__file__).parents[2]
PROMPTS = ((5, 9, 5, 9, 11, 5, 9), (3, 200, 4))


@contextmanager
def packed_weights() -> Iterator[list[Any]]:
    """Keeps weights packed as on a GPU; ops without kernels dequantise them in each call.

    Yields:
      The formats that each start chooses.
    """
    choose, found = start.choose_formats, []

    def as_on_gpu(parameters: Any, stored: Any, context: Any) -> Any:
        found.append(choose(parameters, stored, replace(context, on_gpu=True)))
        return found[-1]

    with patch.object(start, "choose_formats", as_on_gpu):
        yield found


def outcomes(backend: str, line: Sequence[str]) -> list[Outcome]:
    """Greedy outputs of both prompts, on a CPU; loading reads the bytes that the start names.

    The torch ranks are threads, and every step has the same bits on each.
    """
    platform = replace(platform_of(backend), find_device=lambda: Device("cpu", "CPU", 1 << 31))
    begun = start.prepare(parse(line), platform)
    blueprint = replace(begun.memory.blueprint, capacity=one_bucket(begun.memory.capacity))
    begun = replace(begun, memory=replace(begun.memory, blueprint=blueprint))
    made = _loaded(begun, platform)
    made.prepare(made.capacity.programs, lambda program: None)
    engine = engines.make_engine(made, begun.memory)
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    asked = [
        Request(request_id=number, prompt=prompt, sampling=sampling)
        for number, prompt in enumerate(PROMPTS)
    ]
    try:
        return [*drive(engine, asked).values()]
    finally:
        engine.close()


def texts(backend: str, line: Sequence[str]) -> list[list[int]]:
    """The tokens of `outcomes`."""
    return [outcome.tokens for outcome in outcomes(backend, line)]


def _loaded(begun: start.ValidatedStartup, platform: start.Platform) -> Backend:
    count, read = begun.memory.blueprint.ranks.count, []
    if count > 1 and platform.costs.has_shm_all_gather:
        shared = ShmAllGather.create(count, wait_s=WAIT_S)
        ranks = [begun.of_rank(TPGroup(rank, count, shared)) for rank in range(count)]
        first, *others = (each.load(platform, read.append) for each in ranks)
        return SideBySide(first, others, shared.remove)
    made = begun.load(platform, read.append)
    assert count > 1 or sum(read) == begun.num_bytes
    return made


def texts_on_devices(count: int, line: Sequence[str]) -> list[list[int]]:
    """Texts of JAX on virtual CPU devices, in a process of its own, with packed weights."""
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
    command = [sys.executable, "-m", "tests.support.texts", *line, "--tp-size", str(count)]
    done = subprocess.run(
        command, env=os.environ | flags, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    with packed_weights():
        print(json.dumps(texts("jax", sys.argv[1:])))
