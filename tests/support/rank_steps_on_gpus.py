"""`python -m tests.support.rank_steps_on_gpus`: whole steps of several GPUs have the bits of one.

In bfloat16 with the kernels, on both backends. One GPU serves prompts and texts first, and its
plans and results are kept. Ranks then make all their programs ready, so that none waits for one
that still compiles, and are given the same plans. Every part is a process of its own, which is
ended where it takes too long; a part that fails leaves the others as they are. Without a GPU ranks
are on the processor, in float32: that shows that this program works.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.tile_tables import Line, Table
from kernels.tiles import LmHeadEpilogueTiles
from shared.boundary.backend import Backend, StepFuture, StepPlan
from shared.boundary.buffers import plan_in
from shared.boundary.program import CAPTURED, Program
from shared.boundary.shm_allgather import ShmAllGather
from shared.boundary.tp_group import TPGroup
from shared.models.families import config_from_dict
from tests.support.backends import PreparedOnUse, drafts_of
from tests.support.contract_host import (
    CHAIN,
    GREEDY,
    PLAIN,
    SAMPLED,
    Host,
    contract_capacity,
    prompt,
)
from tests.support.gpu_ranks import Rank, in_processes
from tests.support.ranks import arrays_of
from tests.support.tiny_heads import tiny_block_head, tiny_head
from tests.support.tiny_models import DIVIDED, tiny_config, tiny_weights

PATIENCE_S = 240.0
"""Time limit of a part, most of which is compilation."""
TEXT = 10
"""Tokens of each text."""
WARM = {"temperature": 0.9, "seed32": 5}
"""A row with noise and no filter."""
_WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
_WIDE_EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
MODELS = {
    "dense": ("qwen3", _WIDE, "none"),
    "fed by EAGLE3": ("llama", _WIDE, "EAGLE3"),
    "fed by DFLASH": ("qwen3", {}, "DFLASH"),
    "hybrid": (DIVIDED["qwen3_5"], {}, "NEXTN"),
    "experts": (DIVIDED["qwen3_5_moe"], {"hidden_size": 256} | _WIDE_EXPERTS, "NEXTN"),
}
"""Families, changed fields and drafters: squares of whole chunks on a rank, or not."""
_OF_DRAFTER = {"intermediate_size": 64}
"""Fields of a drafter's layers: a rank's columns are whole words of memory, with eight ranks too.
"""
_OF_EIGHT = {"num_attention_heads": 8, "linear_num_key_heads": 8, "linear_num_value_heads": 16}
"""Fields that eight ranks divide."""
BACKENDS = ("torch", "jax")
ROOT = Path(__file__).resolve().parents[2]
DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"


class Step(NamedTuple):
    """Arguments and results of a step."""

    program: Program
    words: np.ndarray
    arrays: dict[str, np.ndarray]


class _Recorder:
    """A backend that records its plans."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.begun: list[tuple[Program, np.ndarray, StepFuture]] = []

    def submit(self, plan: StepPlan) -> StepFuture:
        words, future = plan.buffer.copy(), self._backend.submit(plan)
        self.begun.append((plan.program, words, future))
        return future

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def made_from(name: str, count: int) -> tuple[Any, ...]:
    """Returns the constructor arguments of a backend for a model of `MODELS` on `count` ranks."""
    family, changed, drafter = MODELS[name]
    of_family = tiny_config(family, nested=False, with_mtp=True, tied=False)
    if count == 8:
        of_family |= {each: size for each, size in _OF_EIGHT.items() if each in of_family}
    config = config_from_dict(of_family | changed)
    weights = tiny_weights(config, 3)
    given: Any = drafter
    if drafter == "EAGLE3":
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
        given = tiny_head(config, weights, "EAGLE3", 5, **heads, **_OF_DRAFTER)
    if drafter == "DFLASH":
        given = tiny_block_head(config, 4, **_OF_DRAFTER)
    capacity = contract_capacity(config)
    if drafter == "none":
        programs = tuple(p for p in capacity.programs if not p.drafts_on_device)
        capacity = replace(capacity, programs=programs)
    return config, weights, capacity, *drafts_of(given, config)


def of_one_gpu(backend: Backend, name: str) -> list[Step]:
    """The steps of prompts and outputs: one greedy, one sampled, one with many options."""
    recorder = _Recorder(backend)
    host = Host(PreparedOnUse(recorder), {})  # type: ignore[arg-type]
    for number, sampling in enumerate((GREEDY, WARM, SAMPLED)):
        request = host.request(prompt(number, 20 + 9 * number), **sampling)
        result = host.prefill(request)
        assert result.counts[0] == 1
        host.go_on(request, TEXT, PLAIN if MODELS[name][2] == "none" else CHAIN)
    steps = [Step(p, words, dict(arrays_of(f.result()))) for p, words, f in recorder.begun]
    backend.close()
    return steps


def compare(backend: Backend, steps: Sequence[Step]) -> None:
    """Runs the same plans on ranks.

    Raises:
      AssertionError: A field has other bits; the message names field and step.
    """
    backend.prepare(list(dict.fromkeys(step.program for step in steps)), lambda program: None)
    for number, (program, words, want) in enumerate(steps):
        future = backend.submit(plan_in(words.copy(), program, backend.capacity))
        for field, got in arrays_of(future.result()):
            is_same = np.array_equal(got.view(np.int32), want[field].view(np.int32))
            assert is_same, (
                f"step {number} ({program.work.name}): other {field}: {got} not {want[field]}"
            )
    backend.close()


@contextmanager
def choosing(backend: str, is_joined: bool) -> Iterator[None]:
    """Within it few tokens are chosen from in parts, as many are, and a table joins heads if asked.

    Tokens are few for the rest of the process, which is a test's own.
    """
    ops: Any = import_module(f"{backend}_impl.ops")
    vocabulary: Any = import_module(f"{backend}_impl.ops.sampling.vocab_parallel")
    before, vocabulary.MOST_WHOLE_WORDS = ops.KERNELS, 0
    if is_joined and before is not None:
        table = Table((Line(at_most={}, tiles=LmHeadEpilogueTiles(joined=True, ranked=True)),))
        ops.KERNELS = replace(before, tiles=replace(before.tiles, leaves=table))
    yield
    ops.KERNELS = before


def _on_torch(rank: Rank, name: str, is_joined: bool) -> int:
    with choosing("torch", is_joined):
        return _run_torch(rank, name)


def _run_torch(rank: Rank, name: str) -> int:
    from torch_impl.backend import TorchBackend

    where, ways = torch.device("cpu"), [()]
    if torch.cuda.is_available():
        where, ways = torch.device("cuda", rank.rank % torch.cuda.device_count()), [(), CAPTURED]
        torch.cuda.set_device(where)
    made, how = made_from(name, rank.count), {"dtype": DTYPE, "device": where}
    shm_all_gather = steps = None
    if rank.rank == 0:
        shm_all_gather = ShmAllGather.create(rank.count, wait_s=PATIENCE_S)
        steps = of_one_gpu(TorchBackend(*made, **how), name)
    shm_all_gather, steps = rank.meet((shm_all_gather, steps))[0]
    for captured in ways:
        group = TPGroup(rank.rank, rank.count, shm_all_gather)
        compare(TorchBackend(*made, **how, captured=captured, group=group), steps)
    rank.meet()
    if rank.rank == 0:
        shm_all_gather.remove()
    return len(steps)


def _torch_part(name: str, count: int, is_joined: bool) -> int:
    return in_processes(count, _on_torch, name, is_joined, seconds=PATIENCE_S)[0]


def _jax_part(name: str, count: int, is_joined: bool) -> int:
    with choosing("jax", is_joined):
        return _run_jax(name, count)


def _run_jax(name: str, count: int) -> int:
    from jax_impl.backend import JaxBackend

    made, device = made_from(name, count), "gpu" if torch.cuda.is_available() else "cpu"
    how: dict[str, Any] = {"dtype": DTYPE, "device": device, "quick_compile": True}
    steps = of_one_gpu(JaxBackend(*made, **how), name)
    compare(JaxBackend(*made, **how, group=TPGroup(0, count, None)), steps)
    return len(steps)


PARTS: dict[str, Callable[[str, int, bool], int]] = {"torch": _torch_part, "jax": _jax_part}


def run_part(backend: str, name: str, count: int = 2, is_joined: bool = False) -> str:
    """Compares a model on a backend among some ranks, in a process of its own.

    Args:
      is_joined: Of one GPU and of ranks, heads leave what choices need.

    Returns:
      Its output; it begins with a number of steps if all are bitwise equal to one GPU.
    """
    command = [sys.executable, "-m", "tests.support.rank_steps_on_gpus", "--part", backend, name]
    command += ["--ranks", str(count), *(["--joined"] if is_joined else [])]
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if not torch.cuda.is_available():
        env |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **how)
    try:
        said, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        said, _ = process.communicate()
        return f"not done in {PATIENCE_S:.0f} s: ...{said[-400:]}"
    return said.strip().splitlines()[-1] if not process.returncode else f"failed: ...{said[-1500:]}"


def main(argv: Sequence[str]) -> int:
    """Prints a line for each part; the exit code is 1 where one has other bits or fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", nargs=2, metavar=("BACKEND", "MODEL"), help="this one, here")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=2, help="how many, a GPU each if there are")
    parser.add_argument("--joined", action="store_true", help="heads leave what choices need")
    parser.add_argument("--at-once", type=int, default=1, help="parts: they mostly compile")
    given = parser.parse_args(argv)
    if given.part:
        backend, name = given.part
        print(f"{PARTS[backend](name, given.ranks, given.joined)} steps have the bits of one GPU")
        return 0

    def run(part: tuple[str, str]) -> bool:
        began, said = time.monotonic(), run_part(*part, given.ranks, given.joined)
        print(f"{part[0]:6}{part[1]:16}{time.monotonic() - began:6.0f} s  {said}", flush=True)
        return said[0].isdigit()

    with ThreadPoolExecutor(given.at_once) as pool:
        are_right = list(pool.map(run, product(given.backends, given.models)))
    return 0 if all(are_right) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
