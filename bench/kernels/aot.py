"""Compiles what JAX runs on an H200 where there is none, and says what would be wrong with it.

    python -m bench.kernels.aot
    python -m bench.kernels.aot --only delta_mix EAGLE3

First come the kernels, in the cases of a real model's size that the tests of their operations have:
none may spill registers or want more shared memory than a block can have. Then come whole steps of
decoding and of prompts, as a server with default flags would prepare them: each must be one command
buffer in which XLA itself copies nothing of size, must sort nothing, and may work on no more memory
than the plan has for it. Nothing is timed: without a device nothing can be.

This is for an environment of its own, which `make aot` makes.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.ground.drafting import Draft
from bench.kernels.compiled import (
    KERNELS_IN_BUFFER,
    Kernel,
    copied_by_xla,
    excuse,
    faults_of_copies,
    faults_of_kernel,
    faults_of_memory,
    faults_of_operations,
    faults_of_order,
    kernel_names,
)
from bench.kernels.known_spills import EXCUSES, Excuse
from tests.support.op_case import OpCase, table, tables

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels" / "pallas_gpu"
HEADER = f"{'kernel':22}{'case':48}{'registers':>10}{'spilled':>9}{'shared':>9}{'s':>7}"
STEP_HEADER = f"{'step':66}{'kernels':>8}{'temp KiB':>10}{'plan KiB':>10}{'copied KiB':>12}{'s':>7}"


@dataclass(frozen=True)
class Step:
    """A step of a server: of decoding, or of a prompt.

    Attributes:
      model: A folder of `bench/shapes`.
      drafts: What drafts, as `bench.ground.drafting` reads it.
      batch: Requests at once.
      most_copied: Bytes that XLA may take out of weights, pools and states at once. The embeddings
        of some rows are fewer; a weight of a layer has more, and so has the state of a slot.
      tokens: Of a prompt; 0: it decodes.
      scores: The prompt's tokens are all scored.
      flags: More of the server's.
      ranks: How many GPUs run it.
    """

    model: str
    drafts: str
    batch: int
    most_copied: int
    tokens: int = 0
    scores: bool = False
    flags: tuple[str, ...] = ()
    ranks: int = 1

    def __str__(self) -> str:
        work = f"prompt of {self.tokens}" if self.tokens else f"batch {self.batch}"
        work += " with scores" * self.scores
        work += f", {self.ranks} ranks" * (self.ranks > 1)
        return f"{self.model}, {Draft.parse(self.drafts)}, {work}"


ON_DEVICE = ("--speculative-ngram-index", "table")
STEPS = (
    Step("qwen3-8b", "none", 1, 2**20),
    Step("qwen3-8b", "EAGLE3:S=3,k=1,N=4", 1, 2**20),
    Step("qwen3-8b", "EAGLE3:S=3,L=2.5", 8, 2**20),
    # The rule takes the scores of 15 drafts in one array, which is 9 MiB.
    Step("qwen3-8b", "DFLASH:rule=rejection", 1, 10 * 2**20),
    # Its bias of a step is as large as the scores: 7 drafts of 8 requests.
    Step("qwen3-8b", "DSPARK", 8, 2**20),
    Step("qwen3-8b", "DFLASH2", 8, 2**20),
    # Of 100 MB of n-grams nothing is copied.
    Step("qwen3-8b", "NGRAM:N=8", 8, 2**20, flags=ON_DEVICE),
    Step("qwen3-8b", "NGRAM:N=8", 1, 2**24, tokens=2048, flags=ON_DEVICE),
    Step("qwen3.5-9b", "NEXTN:S=5,k=4,N=16", 8, 2**20),
    Step("qwen3.5-35b-a3b-fp8", "NEXTN:S=3,k=1,N=4", 8, 2**20),
    # The embeddings of 2,048 rows are 16 MiB.
    Step("qwen3-8b", "none", 1, 2**24, tokens=2048),
    Step("qwen3.5-9b", "NEXTN:S=3,k=1,N=4", 1, 2**24, tokens=2048),
    Step("qwen3-8b", "none", 8, 2**24, tokens=2048, scores=True),
    Step("qwen3.5-35b-a3b-fp8", "none", 1, 2**24, tokens=2048),
    Step("qwen3-8b-fp8", "none", 8, 2**20, flags=("--fp8-activations",)),
    Step("qwen3-8b-fp8", "none", 1, 2**24, tokens=2048, flags=("--fp8-activations",)),
    Step("qwen3-8b", "EAGLE3:S=3,k=1,N=4", 8, 2**20, ranks=2),
    Step("qwen3.5-35b-a3b-fp8", "NEXTN:S=3,k=1,N=4", 8, 2**20, ranks=2),
    Step("qwen3.5-122b-a10b-fp8", "NEXTN:S=3,k=1,N=4", 8, 2**20, ranks=4),
)
RANKS = {f"{ranks} ranks, {rows} rows": (ranks, rows) for ranks in (2, 8) for rows in (8, 512)}
"""Of a layer's products whose results ranks gather: few rows within them, many behind them."""


class Report:
    """What is found, printed as it comes.

    Attributes:
      faults: What is wrong, a sentence each.
      compiled: The names of the kernels so far.
      needed: The excuses that something needed, and what.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.compiled: set[str] = set()
        self.needed: set[tuple[Excuse, str]] = set()
        self._began = time.monotonic()

    def add_kernels(self, kernels: list[Kernel], case: str, seconds: float | None) -> None:
        """Takes over the kernels of a case or a step; XLA's own are told where one is wrong."""
        ours = kernel_names(KERNELS)
        for kernel in kernels:
            faults = list(faults_of_kernel(kernel, case))
            if kernel.source in ours or faults:
                print(line_of(kernel, case, seconds), flush=True)
            self.compiled |= {kernel.source} & ours
            self.needed |= {(known, case)} if (known := excuse(kernel, case)) else set()
            self.fail(*faults)

    def fail(self, *faults: str) -> None:
        """Takes over what is wrong."""
        self.faults += faults
        for fault in faults:
            print(f"FAULT: {fault}", flush=True)

    def check_completeness(self) -> None:
        """After everything: no kernel may have been left out, and no excuse be left over."""
        for name in sorted(kernel_names(KERNELS) - self.compiled):
            self.fail(f"the kernel {name} is compiled by no case and no step")
        for known in EXCUSES:
            for case in (case for case in known.cases if (known, case) not in self.needed):
                self.fail(f"{known.kernel} of {case} is excused and spills nothing")

    @property
    def summary(self) -> str:
        """One line."""
        count = len(self.faults)
        found = "no fault" if not count else "1 fault" if count == 1 else f"{count} faults"
        seconds = time.monotonic() - self._began
        excused = f", {len(self.needed)} spills excused" if self.needed else ""
        return f"aot: {len(self.compiled)} kernels, {found}{excused}, {seconds:.0f} s"


def line_of(kernel: Kernel, case: str, seconds: float | None) -> str:
    """A line for a terminal, under `HEADER`; a step's seconds stand in the step's own line."""
    line = f"{kernel.name:22}{case:48}{kernel.registers:10}{kernel.spilled_bytes:9}"
    line += f"{kernel.shared_bytes:9}" + ("" if seconds is None else f"{seconds:7.1f}")
    line += f"  serialised: {kernel.serialised}" if kernel.serialised else ""
    known = excuse(kernel, case)
    return f"{line}  excused: {known.reason}" if known else line


def compile_cases(report: Report, gpu: Any, cases: list[OpCase]) -> None:
    """Compiles each case, and looks at its kernels."""
    compiling = import_module("bench.kernels.absent_gpu")
    print(HEADER)
    for case in cases:
        began = time.monotonic()
        try:
            found = compiling.compiled_case(gpu, case)
        except Exception as error:  # of whatever kind: the others are still to be compiled
            report.fail(_told(case, error))
            continue
        if found is not None:  # else it is no kernel
            report.add_kernels(found.kernels, case.name, time.monotonic() - began)


def compile_step(report: Report, step: Step) -> None:
    """Compiles a step, and looks at its thunks, its copies, its memory and its kernels."""
    compiling = import_module("bench.kernels.absent_gpu")
    began, name = time.monotonic(), str(step)
    gpu = compiling.AbsentGpu(compiling.DESCRIPTION, step.ranks)
    try:
        lowered, planned = compiling.lowered_step(
            gpu, step.model, step.drafts, step.batch, step.tokens, step.scores, step.flags
        )
        if faults := list(faults_of_operations(lowered.as_text(), name)):
            report.fail(*faults)  # it is not compiled: a sort would take minutes
            return
        found = gpu.compiled(lowered)
    except Exception as error:  # as above
        report.fail(_told(name, error))
        return
    seconds = time.monotonic() - began
    report.add_kernels(found.kernels, name, None)
    count = sum(thunk.kind in KERNELS_IN_BUFFER for thunk in found.thunks)
    copied = max(copied_by_xla(found.text).values(), default=0)
    sizes = f"{found.temp_bytes / 1024:10.0f}{planned / 1024:10.0f}{copied / 1024:12.1f}"
    print(f"{STEP_HEADER}\n{name:66}{count:8}{sizes}{seconds:7.1f}", flush=True)
    report.fail(
        *faults_of_order(found.thunks, name),
        *faults_of_copies(found.text, step.most_copied, name),
        *faults_of_memory(found.temp_bytes, planned, name),
    )


def compile_ranks(report: Report, gpu: Any, name: str) -> None:
    """Compiles a layer of several ranks, and looks at its thunks and its kernels."""
    layers = import_module("bench.kernels.absent_ranks")
    try:
        found = gpu.compiled(layers.lowered_layer(*RANKS[name]))
    except Exception as error:  # as above
        report.fail(_told(name, error))
        return
    report.add_kernels(found.kernels, name, None)
    report.fail(*faults_of_order(found.thunks, name))


def _told(name: object, error: Exception) -> str:
    first, *_ = str(error).splitlines() or [""]
    return f"{name} cannot be compiled: {type(error).__name__}: {first}"


def cases_of(only: list[str]) -> Iterator[OpCase]:
    """The large cases whose operation's module or name has one of the texts; all without any."""
    for op in tables():
        for case in table(op):
            if case.is_large and _is_wanted(f"{op}: {case}", only):
                yield case


def _is_wanted(name: str, only: list[str]) -> bool:
    return not only or any(text in name for text in only)


def options() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    told = "texts that the names of the cases and steps have: a module of ops, a model, a drafter"
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=told)
    return parser


def main() -> int:
    """Prints all that was compiled; the exit code is 1 where anything is wrong."""
    only = options().parse_args().only
    # Before jax is imported: it shall look for no device, and not ask the CUDA driver's tools.
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    compiling, report = import_module("bench.kernels.absent_gpu"), Report()
    gpu = compiling.AbsentGpu(compiling.DESCRIPTION, 1)
    compile_cases(report, gpu, list(cases_of(only)))
    for step in (step for step in STEPS if _is_wanted(str(step), only)):
        compile_step(report, step)
    for name in (name for name in RANKS if _is_wanted(name, only)):
        compile_ranks(report, gpu, name)
    if not only:
        report.check_completeness()
    print(report.summary)
    return 1 if report.faults or not report.compiled else 0


if __name__ == "__main__":
    sys.exit(main())
