"""Compilation of `bench.kernels.items` in JAX, several in one process."""

import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from jax.stages import Lowered

from bench.kernels.aot_calls import Call, calls_of, compile_calls
from bench.kernels.aot_ranks import lowered_layer
from bench.kernels.aot_target import (
    DESCRIPTION,
    AbsentGpu,
    AbsentStart,
    compiled_case,
    lowered_step,
)
from bench.kernels.compiled import (
    KERNELS_IN_BUFFER,
    copied_by_xla,
    faults_of_copies,
    faults_of_memory,
    faults_of_operations,
    faults_of_order,
)
from bench.kernels.items import RANKS, STEP_HEADER, Found, Item, Step, case_of
from bench.kernels.starts import Start, chosen
from bench.kernels.workers import format_error
from shared.options.flags import ConfigError

BRIEF = 1
"""Most ranks of a start of which more than the largest programs are lowered."""


def examined(item: Item, *, compiles: bool = True, is_brief: bool = False) -> Found:
    """Compiles an item, and looks at what came of it.

    Args:
      compiles: The kernels of a start too; else its programs are lowered alone.
      is_brief: Of a start the largest programs alone.
    """
    match item.what:
        case Step():
            return _step(item.name, item.what, item.scratch)
        case Start():
            return _start(item.what, item.scratch, compiles, is_brief or item.what.ranks > BRIEF)
    return _case(item) if item.kind == "case" else _layer(item.name)


@cache
def gpus(count: int) -> AbsentGpu:
    """Returns the given number of absent GPUs."""
    return AbsentGpu(DESCRIPTION, count)


def _case(item: Item) -> Found:
    found = compiled_case(gpus(1), case_of(item))
    return Found() if found is None else Found(kernels=tuple(found.kernels))


def _layer(name: str) -> Found:
    found = gpus(1).compiled(lowered_layer(*RANKS[name]))
    return Found(kernels=tuple(found.kernels), faults=tuple(faults_of_order(found.thunks, name)))


def _step(name: str, step: Step, scratch: Path) -> Found:
    """Examines the thunks, copies, memory and kernels of a step."""
    gpu, began = gpus(step.ranks), time.monotonic()
    flags = step.start.all_flags(scratch)
    lowered, planned = lowered_step(gpu, flags, step.batch, step.tokens, step.scores)
    if faults := tuple(faults_of_operations(lowered.as_text(), name)):
        return Found(faults=faults)  # it is not compiled: a sort would take minutes
    found = gpu.compiled(lowered)
    count = sum(thunk.kind in KERNELS_IN_BUFFER for thunk in found.thunks)
    copied = max(copied_by_xla(found.text).values(), default=0)
    sizes = f"{found.temp_bytes / 1024:10.0f}{planned / 1024:10.0f}{copied / 1024:12.1f}"
    line = f"{STEP_HEADER}\n{name:66}{count:8}{sizes}{time.monotonic() - began:7.1f}"
    faults = (
        *faults_of_order(found.thunks, name),
        *faults_of_copies(found.text, step.max_copied, name),
        *faults_of_memory(found.temp_bytes, planned, name),
    )
    return Found(kernels=tuple(found.kernels), faults=faults, line=line)


def _start(start: Start, scratch: Path, compiles: bool, is_brief: bool) -> Found:
    """Lowers programs of a start, and compiles the kernels that no start before had."""
    began, gpu = time.monotonic(), gpus(start.ranks)
    try:
        made = AbsentStart(gpu, start.all_flags(scratch))
    except ConfigError as error:
        if start.ranks > 1:  # not every model can be sharded over that number of ranks
            return Found(line=f"{start}: {error}")
        raise
    faults, programs, calls = list[str](), chosen(made.programs, is_brief), 0
    for program in programs:
        name = f"{start}, {program}"
        try:
            lowered = made.lowered(program)
            fresh = list(_fresh(lowered, scratch)) if compiles else []
            calls += len(fresh)
            faults += _faults_of_calls(gpu, fresh, name)
        except Exception as error:  # of whatever kind: the other programs are still to be lowered
            faults.append(f"{name} cannot be lowered: {format_error(error)}")
    seconds = time.monotonic() - began
    line = f"{start}: {len(programs)} programs, {calls} new kernels, {seconds:.1f} s"
    return Found(faults=tuple(faults), line=line, programs=len(programs), calls=calls)


def _faults_of_calls(gpu: AbsentGpu, calls: list[Call], name: str) -> Iterator[str]:
    """Returns faults of kernels: compiled all at once, or one by one where that fails."""
    if not calls:
        return
    try:
        compile_calls(gpu, calls)
    except Exception as error:  # of whatever kind
        if len(calls) == 1:
            yield f"a kernel of {name} cannot be compiled: {format_error(error)}"
            return
        for call in calls:
            yield from _faults_of_calls(gpu, [call], f"{name} ({call.name})")


def _fresh(lowered: Lowered, scratch: Path) -> Iterator[Call]:
    """The kernels of a program that no process had before."""
    folder = scratch / "kernels"
    folder.mkdir(exist_ok=True)
    for call in calls_of(lowered.as_text()):
        try:
            os.close(os.open(folder / call.digest, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        yield call
