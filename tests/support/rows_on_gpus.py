"""Rank code of tests that gather some rows on GPUs: a process in torch, a device in JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kernels.peer_buffers import PeerTimeout
from tests.support.gpu_ranks import LOOKS, Rank
from tests.support.ranks_on_gpus import buffers_of_jax, joined, on_torch

CASES = ((20, 4, 1), (128, 75_968, 6), (7, 64, 2))
"""Rows, columns of a rank, and gathers among which the rows are divided."""


def listed(step: int, rows: int) -> np.ndarray:
    """Returns the rows that a step gathers: none, all, then some."""
    kept = np.random.default_rng(step).random(rows) < (0, 2, 0.3, 0.9)[step % 4]
    found = np.flatnonzero(kept)
    return np.concatenate([found, np.zeros(rows - len(found)), [len(found)]]).astype(np.int32)


def share(rank: int, step: int, rows: int, columns: int) -> np.ndarray:
    """A rank's columns, random bits; some are no numbers."""
    rng = np.random.default_rng([rank, step, rows])
    return rng.integers(0, 1 << 32, (rows, columns), np.uint32)


def differing(got: np.ndarray, ranks: int, step: int, case: Sequence[int]) -> list[str]:
    """Returns a sentence for each difference in the bits of a rank for a case."""
    rows, columns, _ = case
    which = listed(step, rows)
    which = which[: which[-1]]
    want = np.concatenate([share(r, step, rows, columns)[which] for r in range(ranks)], axis=1)
    count = int((got[which] != want).sum())
    return [f"{case}, step {step}: {count} of {want.size} differ"] if count else []


def rows_of_torch(rank: Rank, steps: int) -> list[str]:
    """Gathers rows of all cases in each step, captured; returns a sentence for each fault."""
    from kernels.triton_gpu.collectives.all_gather import AllGatherArgs, advance_sequence
    from kernels.triton_gpu.sampling.vocab_parallel import gathered_rows

    symmetric_buffer = on_torch(rank)
    device = symmetric_buffer.mail.place.device
    own = [torch.empty((rows, columns), device=device) for rows, columns, _ in CASES]
    which = [torch.zeros(rows + 1, dtype=torch.int32, device=device) for rows, *_ in CASES]

    def step() -> list[Any]:
        call, found = 0, []
        for values, rows, (_, _, count) in zip(own, which, CASES, strict=True):
            gathers = [
                AllGatherArgs(symmetric_buffer.mail, call + i, symmetric_buffer.boxes)
                for i in range(count)
            ]
            found.append(gathered_rows(values, rows, gathers))
            call += count
        advance_sequence(symmetric_buffer.mail, call)
        return found

    step()  # no rank waits for one that still compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step()
    rank.meet()
    symmetric_buffer.wait(LOOKS)
    torch.cuda.synchronize(device)
    rank.meet()
    wrong = []
    for number in range(steps):
        for values, rows, (R, columns, _) in zip(own, which, CASES, strict=True):
            bits = share(rank.rank, number, R, columns).view(np.int32)
            values.view(torch.int32).copy_(torch.from_numpy(bits))
            rows.copy_(torch.from_numpy(listed(number, R)))
        torch.cuda.synchronize(device)
        graph.replay()
        for case, out in zip(CASES, captured, strict=True):
            got = out.view(torch.int32).cpu().numpy().view(np.uint32)
            wrong += differing(got, rank.count, number, case)
        if late := PeerTimeout.read(int(symmetric_buffer.mail.error)):
            wrong.append(f"rank {rank.rank} missed {late} in step {number}")
            break
    rank.meet()
    symmetric_buffer.close()
    return wrong


def rows_of_jax(ranks: int, steps: int) -> list[str]:
    """Same as `rows_of_torch`, on devices of this process, in one program per step."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from kernels.pallas_gpu.collectives.all_gather import AllGatherArgs, missed
    from kernels.pallas_gpu.sampling.vocab_parallel import gathered_rows

    mesh, symmetric_buffer = buffers_of_jax(ranks)

    def run(given: list[Any], place: Any) -> Any:
        gather, found = AllGatherArgs(place, symmetric_buffer.boxes), []
        for (values, rows), (_, _, count) in zip(given, CASES, strict=True):
            out = gathered_rows(values.view(jnp.float32), rows, [gather] * count)
            found.append(out.view(jnp.uint32))
        return found, missed(gather, jnp.stack([out[0, 0] for out in found]))

    columns, alike = PartitionSpec(None, "ranks"), PartitionSpec()
    program = jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=([(columns, alike)] * len(CASES), PartitionSpec("ranks")),
            out_specs=([columns] * len(CASES), PartitionSpec("ranks")),
            check_vma=False,
        )
    )

    def placed(number: int) -> list[Any]:
        made = []
        for rows, width, _ in CASES:
            own = [share(rank, number, rows, width) for rank in range(ranks)]
            made.append((joined(mesh, own, 1), joined(mesh, [listed(number, rows)] * ranks, None)))
        return made

    idle, waiting = (joined(mesh, symmetric_buffer.places(looks), 0) for looks in (0, LOOKS))
    # No rank waits for one that still loads its kernels.
    jax.block_until_ready(program(placed(0), idle))
    wrong = []
    for number in range(steps):
        found, errors = program(placed(number), waiting)
        for case, out in zip(CASES, found, strict=True):
            for part in out.addressable_shards:
                wrong += differing(np.asarray(part.data), ranks, number, case)
        wrong += [f"{PeerTimeout.read(int(x))} in step {number}" for x in np.asarray(errors) if x]
    return wrong
