"""Compiles the JAX kernels, steps and starts for an H200 without a GPU, and reports faults.

    python -m bench.kernels.aot
    python -m bench.kernels.aot --only delta_mix EAGLE3

Kernels come first, in the large cases of their operations' tests. A kernel may not spill registers
or exceed the shared memory of a block, and one by Mosaic GPU may have no misaligned vector access.
Whole decode and prefill steps follow, as a server with default flags prepares them. Each must be
one command buffer without large copies by XLA, without a sort, and within the memory of its plan.
Last are the starts of all shipped models with their drafters on 1, 2, 4 and 8 ranks: their programs
are lowered, and each kernel is compiled once. Only the first layers of a model are used, since the
others are equal. Nothing is timed.

The environment is a separate one, made by `make aot`.
"""

import argparse
import os
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

from bench.kernels.compiled import (
    Kernel,
    excuse,
    faults_of_excuses,
    faults_of_kernel,
    kernel_names,
)
from bench.kernels.items import Found, items_of
from bench.kernels.known_spills import PALLAS, Excuse
from bench.kernels.workers import Bounded, Done, shared_out

KERNELS = Path(__file__).parents[2] / "kernels" / "pallas_gpu"
HEADER = f"{'kernel':22}{'case':48}{'registers':>10}{'spilled':>9}{'shared':>9}{'s':>7}"


class Report:
    """Results, printed as they come.

    Attributes:
      faults: Faults, one sentence each.
      compiled: Names of the kernels so far.
      needed: Known spills that occurred, with their cases.
      items, programs, calls: Number of items, and of programs and different kernels of startups.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.compiled: set[str] = set()
        self.needed: set[tuple[Excuse, str]] = set()
        self.items = self.programs = self.calls = 0
        self._began = time.monotonic()

    def add(self, done: Done, place: str) -> None:
        """Adds the result of an item.

        Args:
          done: Result of the item.
          place: Number of the item and of all items.
        """
        self.items += 1
        name = done.item.name
        if done.error is not None:
            self.fail(f"{name} cannot be compiled: {done.error}")
            return
        found: Found = done.value
        seconds = done.seconds if done.item.kind == "case" else None
        self.add_kernels(list(found.kernels), done.item.case, seconds)
        self.programs, self.calls = self.programs + found.programs, self.calls + found.calls
        if found.line:
            print(f"{place} {found.line}", flush=True)
        self.fail(*found.faults)

    def add_kernels(self, kernels: list[Kernel], case: str, seconds: float | None) -> None:
        """Adds the kernels of a case or a step; prints XLA's own kernels only with faults."""
        ours = kernel_names(KERNELS)
        for kernel in kernels:
            faults = list(faults_of_kernel(kernel, case))
            if kernel.source in ours or faults:
                print(line_of(kernel, case, seconds), flush=True)
            self.compiled |= {kernel.source} & ours
            self.needed |= {(known, case)} if (known := excuse(kernel, case)) else set()
            self.fail(*faults)

    def fail(self, *faults: str) -> None:
        """Adds and prints faults."""
        self.faults += faults
        for fault in faults:
            print(f"FAULT: {fault}", flush=True)

    def check_completeness(self) -> None:
        """Adds faults for kernels that were not compiled, and known spills that do not occur."""
        for name in sorted(kernel_names(KERNELS) - self.compiled):
            self.fail(f"the kernel {name} is compiled by no case and no step")
        self.fail(*faults_of_excuses(PALLAS, self.needed))

    @property
    def summary(self) -> str:
        """One line."""
        count = len(self.faults)
        found = "no fault" if not count else "1 fault" if count == 1 else f"{count} faults"
        seconds = time.monotonic() - self._began
        excused = f", {len(self.needed)} spills excused" if self.needed else ""
        started = f", {self.programs} programs with {self.calls} kernels in starts"
        made = f"{len(self.compiled)} kernels{started * (self.programs > 0)}"
        return f"aot: {made}, {found}{excused}, {seconds:.0f} s"


def line_of(kernel: Kernel, case: str, seconds: float | None) -> str:
    """Returns a line for a terminal, under `HEADER`; the seconds of a step are in its own line."""
    line = f"{kernel.name:22}{case:48}{kernel.registers:10}{kernel.spilled_bytes:9}"
    line += f"{kernel.shared_bytes:9}" + ("" if seconds is None else f"{seconds:7.1f}")
    line += f"  serialised: {kernel.serialised}" if kernel.serialised else ""
    known = excuse(kernel, case)
    return f"{line}  excused: {known.reason}" if known else line


def options() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = "text in the names of items: a module of ops, a model, a drafter, `start`"
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=names)
    add_bounds(parser)
    return parser


def add_bounds(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that limit a run."""
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help="processes that compile at once")
    parser.add_argument(
        "--limit-s", type=float, default=1200.0, help="time limit of one item in seconds"
    )
    parser.add_argument(
        "--total-s", type=float, default=7200.0, help="seconds after which no item starts"
    )


def main() -> int:
    """Compiles and prints all items; the exit code is 1 if there are faults."""
    args = options().parse_args()
    # Before jax is imported, so that it does not search for devices or query the CUDA driver.
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    work, report = import_module("bench.kernels.aot_items").examined, Report()
    with tempfile.TemporaryDirectory() as scratch:
        items = items_of(args.only, Path(scratch))
        bounded = Bounded(items, args.total_s)
        print(HEADER)
        for number, done in enumerate(shared_out(work, bounded, args.jobs, args.limit_s), 1):
            report.add(done, f"{number}/{len(items)}")
        if bounded.left:
            report.fail(f"{bounded.left} items were not begun within {args.total_s:.0f} s")
    if not args.only:
        report.check_completeness()
    print(report.summary)
    return 1 if report.faults or not report.items else 0


if __name__ == "__main__":
    sys.exit(main())
