"""Compiles the torch kernels for an H200 without a GPU, with the installed Triton.

    python -m bench.kernels.aot_torch
    python -m bench.kernels.aot_torch --only mix linear --whole

Covers every kernel in the large cases of the operations' tests and in the starts of
`bench.kernels.aot`, with the tile configs of an H200. Without `--whole` only Triton's IR is made,
in a tenth of a second, which finds errors of the language. With it the kernel is compiled, and
spills, shared memory and misaligned accesses are checked as in `bench.kernels.aot`. Nothing is
timed.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from bench.kernels.aot import HEADER, add_bounds, line_of
from bench.kernels.aot_cuda import AbsentStart, Compiler, absent_cuda
from bench.kernels.compiled import excuse, faults_of_excuses, faults_of_kernel
from bench.kernels.items import Found, Item, case_of, items_of
from bench.kernels.known_spills import TRITON, Excuse
from bench.kernels.starts import Start, chosen
from bench.kernels.workers import Bounded, Done, format_error, shared_out
from shared.options.flags import ConfigError
from tests.support.op_case import OpCase

KINDS = ("case", "start")
_ABSENT = ExitStack()
"""Patches of the process, which pretends to have a GPU until it ends."""


class Zeros:
    """Generator that returns zeros for normal numbers, to save time, and draws others."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def standard_normal(self, size: Any = None, dtype: Any = np.float64) -> np.ndarray:
        """Returns zeros of the requested shape and type."""
        return np.zeros(() if size is None else size, dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rng, name)


@cache
def compiler_of(is_whole: bool) -> Compiler:
    """Returns the compiler of this process."""
    return _ABSENT.enter_context(absent_cuda(is_whole))


@cache
def _side() -> Any:
    """Returns the ops of torch, on arrays without memory."""
    side = import_module("tests.support.op_sides").TorchSide()

    def placed(value: Any, dtype: str) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        own = torch.from_numpy(value[:0].copy() if value.ndim else value).dtype
        kind = getattr(torch, dtype) if own.is_floating_point else own
        return torch.empty(value.shape, dtype=kind, device="cuda")

    side._array = placed
    return side


def run(case: OpCase) -> None:
    """Calls an operation, which compiles its kernels and launches none."""
    side, draw = _side(), np.random.default_rng
    made: Callable[..., Any] = lambda *seed: Zeros(draw(*seed))  # noqa: E731
    with patch.object(np.random, "default_rng", made):
        arguments = case.make(0)
    with side.with_tiles(case, {}):
        side.operation(case)(*side.placed(case, arguments))


def examined(item: Item, *, is_whole: bool, is_brief: bool = False) -> tuple[Found, list[str]]:
    """Returns the result of an item, with its kernels that are new in this process."""
    compiler = compiler_of(is_whole)
    before, compiler.kernels = len(compiler.names), []
    if item.kind == "case":
        run(case_of(item))
        kernels = tuple(dict.fromkeys(compiler.kernels))
        faults = tuple(fault for each in kernels for fault in faults_of_kernel(each, item.case))
        found = Found(kernels, faults)
    else:
        found = _start(item.what, item.scratch, is_brief or item.what.ranks > 1)
        found = replace(found, kernels=tuple(dict.fromkeys(compiler.kernels)))
    return found, compiler.names[before:]


def found_of(item: Item, *, is_whole: bool, is_brief: bool) -> Found:
    """Same as `examined`, with the number of new kernels."""
    found, new = examined(item, is_whole=is_whole, is_brief=is_brief)
    return replace(found, calls=len(new))


def _start(start: Start, scratch: Path, is_brief: bool) -> Found:
    try:
        made = AbsentStart(start.all_flags(scratch))
    except ConfigError as error:
        if start.ranks > 1:  # not every model can be sharded over that number of ranks
            return Found(line=f"{start}: {error}")
        raise
    programs, faults = chosen(made.programs, is_brief), list[str]()
    for program in programs:
        try:
            made.step(program)
        except Exception as error:  # of whatever kind: the other programs are still to be read
            faults.append(f"{start}, {program}: {format_error(error)}")
    return Found(faults=tuple(faults), programs=len(programs))


def results(options: argparse.Namespace, scratch: Path) -> Iterator[Done]:
    """The items as they are done: in this process, or in several."""
    kinds = [item for item in items_of(options.only, scratch) if item.kind in KINDS]
    items = Bounded(kinds, options.total_s)
    work = partial(examined, is_whole=options.whole)
    if options.jobs > 1:
        yield from shared_out(work, items, options.jobs, options.limit_s)
    for item in items if options.jobs == 1 else ():
        try:
            yield Done(item, work(item), None, 0.0)
        except Exception as error:  # of whatever kind: the others are still to be compiled
            yield Done(item, None, format_error(error), 0.0)
    if items.left:
        raise TimeoutError(f"{items.left} items were not begun within {options.total_s:.0f} s")


def main() -> int:
    """Prints what is compiled; the exit code is 1 where something cannot be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="same as in `bench.kernels.aot`"
    )
    parser.add_argument("--whole", action="store_true", help="compile to machine code")
    add_bounds(parser)
    options = parser.parse_args()
    names, faults, programs, needed = list[str](), 0, 0, set[tuple[Excuse, str]]()
    if options.whole:
        print(HEADER)
    with tempfile.TemporaryDirectory() as scratch:
        for done in results(options, Path(scratch)):
            found, new = done.value or (Found(faults=(f"{done.item.name}: {done.error}",)), [])
            names, programs, faults = (
                names + new,
                programs + found.programs,
                faults + len(found.faults),
            )
            for kernel in found.kernels:
                print(line_of(kernel, done.item.case, None), flush=True)
                if known := excuse(kernel, done.item.case):
                    needed.add((known, done.item.case))
            print(f"{done.item.name}: {len(new)} kernels, {done.seconds:.1f} s", flush=True)
            for fault in found.faults:
                print(f"FAULT: {fault}", flush=True)
    if options.whole and not options.only:
        for fault in faults_of_excuses(TRITON, needed):
            print(f"FAULT: {fault}")
            faults += 1
    kinds, started = len(set(names)), f", {programs} programs of starts" * (programs > 0)
    print(f"aot of torch: {kinds} kernels, {len(names)} compiled, {faults} faults{started}")
    return int(faults > 0)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main())
