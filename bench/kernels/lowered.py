"""Lowers programs of three models for an H200, with a JAX without CUDA.

    python -m bench.kernels.lowered

A kernel that Pallas cannot lower ends the startup of a server on a GPU, which no CPU test detects.
This needs only jax 0.11: `make lowered` installs it, and CI runs it. A lowered program may still
fail to compile; `bench.kernels.aot` compiles it, for all models.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.kernels.starts import ADAPTERS, DEMO, SHAPES, Start
from bench.kernels.workers import format_error
from shared.boundary.program import Program, ProgramFeature, StepKind

STARTS = (
    Start(DEMO / "target", "NEXTN"),
    Start(DEMO / "target", "EAGLE3"),
    Start(DEMO / "target", flags=ADAPTERS),
    Start(SHAPES / "qwen3-8b", "DFLASH"),
    Start(SHAPES / "gemma-4-31b", "ASSISTANT"),
)


def described_gpu() -> Any:
    """A GPU as `absent_gpu.AbsentGpu` describes it; a device of the CPU holds its place."""
    compiling, jax = map(import_module, ("bench.kernels.aot_target", "jax"))

    class DescribedGpu(compiling.AbsentGpu):
        def __init__(self, target: str) -> None:
            self.devices = jax.devices("cpu")[:1]
            self._describe(target)

    return DescribedGpu(compiling.DESCRIPTION.read_text(encoding="utf-8"))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Stacks weights on a CPU device in the same way as on a GPU."""
    mesh, weights = map(import_module, ("jax_impl.mesh", "jax_impl.weights"))
    whole = patch.object(mesh, "_leaf", lambda path, array, device: array)
    stacked = patch.object(weights, "are_read_in_stacks", lambda loaded, device: True)
    with whole, stacked:
        yield


def programs_of(programs: Sequence[Program], drafts: str) -> list[Program]:
    """Decoding by one request and a short prompt, or by the most and the longest prompt."""
    plain = [program for program in programs if not program.has(ProgramFeature.LOGPROBS)]
    decode = [program for program in plain if program.work is StepKind.DECODE]
    prefill = [program for program in plain if program.work is StepKind.PREFILL]
    which = 0 if drafts == "NEXTN" else -1
    return [decode[which], prefill[which]]


def main() -> int:
    """Prints a line for each program; the exit code is 1 where one cannot be lowered."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    compiling, faults, began = import_module("bench.kernels.aot_target"), 0, time.monotonic()
    gpu = described_gpu()
    with tempfile.TemporaryDirectory() as folder, as_on_a_gpu():
        for start in STARTS:
            made = compiling.AbsentStart(gpu, start.all_flags(Path(folder)))
            for program in programs_of(made.programs, start.drafts):
                try:
                    text = made.lowered(program).as_text()
                    found = f"{sum(text.count(f'@{name}') for name in compiling.CALLS)} kernels"
                except Exception as error:  # of whatever kind: the others are still to be lowered
                    faults, found = faults + 1, f"FAULT: {format_error(error)}"
                print(f"{start}, {program}: {found}", flush=True)
    print(f"lowered in {time.monotonic() - began:.0f} s, {faults} faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
