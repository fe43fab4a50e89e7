"""Times all-gathers between the GPUs of a host, and the GEMMs of a layer between them.

    python -m bench.kernels.tp_all_gather --out bench/results/ranks.json
    python -m bench.kernels.tp_all_gather --parts layer --languages torch --rows 1 8 --ranks 2
    python -m bench.kernels.tp_all_gather --parts choices --rows 1 8 32 128 512 --ranks 2

Ranks are processes in torch and devices of one process in JAX, with a GPU each. The all-gathers
alone come first, in one graph or program, by the LL protocol and by blocks. Then come the four
GEMMs of a layer of Qwen3-8B: on one GPU, on ranks with separate gather kernels, and on ranks with
gathers within the GEMMs. Weights of several layers rotate, more than a cache holds. A line also
reports whether the gathered values are right. A part that fails is a line too. All GPUs should be
idle.
"""

import argparse
import shlex
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common.environment import write_results
from bench.kernels.tp_gemm import (
    FEW_ROWS,
    HIDDEN,
    INNER,
    Line,
    Timed,
    block_bytes,
    buffer_of,
    layer_in_torch,
    note,
    randoms,
    tiles_in_torch,
)
from bench.kernels.tp_gemm_jax import layer_in_jax
from bench.kernels.tp_sampling import choices_in_jax, choices_in_torch
from kernels.peer_buffers import BufferLayout
from shared.spec.reduction_order import SQUARES
from tests.support.gpu_ranks import LOOKS, Rank, in_processes
from tests.support.ranks_on_gpus import joined

ROWS = (1, 8, 32, 128, 512, 2048)
VALUES = {"stream": (HIDDEN, HIDDEN // SQUARES.chunk), "inner": (INNER, 0)}
"""Values of a row that all ranks gather, and sums in chunks with them."""
CALLS, FEWER_CALLS = 32, 8
"""Gathers of a graph, of up to `FEW_ROWS` rows and of more."""
WORDS, BLOCKS = 1 << 30, 0
"""Up to how many bytes words are sent, where all are and where none is."""


def gathers_in_torch(rank: Rank, rows: tuple[int, ...]) -> list[Line]:
    """Microseconds of a gather by rows, values and way."""
    ranks, found = import_module("kernels.triton_gpu.collectives.all_gather"), []
    symmetric_buffer = buffer_of(rank, block_bytes(rank.count, max(rows)))
    device, timed = symmetric_buffer.mail.place.device, Timed(rank, symmetric_buffer)
    for name, (values, chunks) in VALUES.items():
        for R in rows:
            for way, largest in (("words", WORDS), ("blocks", BLOCKS)):
                if way == "words" and R * (values // 2 + chunks) // rank.count > 1 << 16:
                    continue
                shares = [
                    randoms(device, seed, R, values // rank.count).bfloat16()
                    for seed in range(rank.count)
                ]
                sums = randoms(device, 99, R, chunks // rank.count) if chunks else None
                count, got = CALLS if R <= FEW_ROWS else FEWER_CALLS, []

                def step(
                    own: Any = shares[rank.rank],
                    sums: Any = sums,
                    count: int = count,
                    largest: int = largest,
                    got: list[Any] = got,
                ) -> None:
                    how = {"boxes": symmetric_buffer.boxes, "largest_words_bytes": largest}
                    got[:] = [
                        ranks.all_gather(own, sums, symmetric_buffer.mail, call, **how)[0]
                        for call in range(count)
                    ]
                    ranks.advance_sequence(symmetric_buffer.mail, count)

                us = timed.us(step, count)
                is_right = all(torch.equal(x, torch.cat(shares, 1)) for x in got)
                line = {"part": "gathers", "language": "torch", "ranks": rank.count, "rows": R}
                line |= {"values": name, "way": way, "us": round(us, 2), "is_right": is_right}
                note(found, line, rank)
    missing = symmetric_buffer.missing()
    assert missing is None, f"rank {rank.rank} missed {missing}"
    return found


def gathers_in_jax(own: Rank, ranks: int, rows: tuple[int, ...]) -> list[Line]:
    """Same as `gathers_in_torch`, in one program for all devices, queued."""
    jax, jnp = import_module("jax"), import_module("jax.numpy")
    sharding, gathers = (
        import_module("jax.sharding"),
        import_module("kernels.pallas_gpu.collectives.all_gather"),
    )
    devices, spec, found = jax.devices()[:ranks], sharding.PartitionSpec, []
    mesh = sharding.Mesh(np.array(devices), ("ranks",))
    symmetric_buffer = import_module(
        "kernels.pallas_gpu.collectives.symmetric_memory"
    ).SymmetricBuffer(BufferLayout(ranks, block_bytes(ranks, max(rows))), devices)
    idle, waiting = (joined(mesh, symmetric_buffer.places(looks), 0) for looks in (0, LOOKS))
    for name, (values, chunks) in VALUES.items():
        for R in rows:
            for way, largest in (("words", WORDS), ("blocks", BLOCKS)):
                if way == "words" and R * (values // 2 + chunks) // ranks > 1 << 16:
                    continue
                count = CALLS if R <= FEW_ROWS else FEWER_CALLS

                def run(
                    own: Any,
                    place: Any,
                    count: int = count,
                    largest: int = largest,
                    R: int = R,
                    chunks: int = chunks,
                ) -> Any:
                    gather = gathers.AllGatherArgs(place, symmetric_buffer.boxes)
                    sums = jnp.ones((R, chunks // ranks), jnp.float32) if chunks else None
                    got, how = None, {"largest_words_bytes": largest}
                    for _ in range(count):
                        got, _ = gathers.all_gather(own, sums, gather, **how, after=got)
                    return got

                columns = spec(None, "ranks")
                program = jax.jit(
                    jax.shard_map(
                        run,
                        mesh=mesh,
                        in_specs=(columns, spec("ranks")),
                        out_specs=columns,
                        check_vma=False,
                    )
                )
                rng = np.random.default_rng(R)
                shares = [
                    rng.standard_normal((R, values // ranks), np.float32) for _ in range(ranks)
                ]
                given = joined(mesh, [x.astype(jnp.bfloat16) for x in shares], 1)
                jax.block_until_ready(program(given, idle))
                got = jax.block_until_ready(program(given, waiting))
                want = np.concatenate(shares, 1).astype(jnp.bfloat16)
                parts = [np.asarray(x.data) for x in got.addressable_shards]
                best = []
                for _ in range(4):
                    began = time.perf_counter()
                    for _ in range(20):
                        got = program(given, waiting)
                    jax.block_until_ready(got)
                    best.append((time.perf_counter() - began) / 20 / count * 1e6)
                line = {"part": "gathers", "language": "jax", "ranks": ranks, "rows": R}
                line |= {"values": name, "way": way, "us": round(min(best[1:]), 2)}
                line |= {"is_right": all(np.array_equal(x, want) for x in parts)}
                note(found, line, own)
    late = [x for x in symmetric_buffer.missing() if x is not None]
    assert not late, f"ranks missed {late}"
    return found


def main() -> int:
    """Prints all that was timed; the exit code is 1 where a part has failed or is not right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), metavar="R")
    parser.add_argument(
        "--parts", nargs="+", default=["gathers", "layer"], help="gathers, layer, choices or tiles"
    )
    parser.add_argument("--languages", nargs="+", default=["torch", "jax"])
    parser.add_argument(
        "--seconds", type=float, default=200.0, help="time limit of a part in seconds"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    gpus, rows = torch.cuda.device_count(), tuple(options.rows)
    found: dict[str, Any] = {"command": shlex.join(sys.argv), "results": [], "failed": []}
    found["gpus"] = [torch.cuda.get_device_name(i) for i in range(gpus)]
    print(found["gpus"], flush=True)
    for ranks in (n for n in options.ranks if n <= gpus):
        jobs: dict[str, Any] = {
            "gathers torch": (ranks, gathers_in_torch, rows),
            "gathers jax": (1, gathers_in_jax, ranks, rows),
            "layer torch": (ranks, layer_in_torch, rows),
            "layer jax": (1, layer_in_jax, ranks, rows),
            "choices torch": (ranks, choices_in_torch, rows),
            "choices jax": (1, choices_in_jax, ranks, rows),
            "tiles torch": (ranks, tiles_in_torch, rows, (1, 2, 4, 8)),
        }
        for name, job in jobs.items():
            part, language = name.split()
            if part not in options.parts or language not in options.languages:
                continue
            try:
                lines = in_processes(*job, seconds=options.seconds)[0]
            except AssertionError as error:
                found["failed"].append(f"{name}, {ranks} ranks: {error}")
                print(f"FAILED: {name}, {ranks} ranks: {error}", flush=True)
                continue
            found["results"] += lines
            if options.out:
                write_results(options.out, found)
    wrong = [line for line in found["results"] if line.get("is_right") is False]
    print(f"{len(found['results'])} lines, {len(wrong)} wrong, {len(found['failed'])} failed parts")
    return int(bool(wrong or found["failed"]))


if __name__ == "__main__":
    sys.exit(main())
