"""Token sampling from vocab-parallel logits, for `bench.kernels.tp_all_gather`.

The LM head is that of Qwen3-8B. Three ways are compared: gather all logits and sample from whole
rows; gather the partial results of vocabulary shards; and the same from the LM-head epilogue. Rows
are greedy, have a temperature, or have a filter.
"""

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch

from bench.kernels.tp_gemm import HIDDEN, Line, Timed, buffer_of, note, randoms
from kernels.peer_buffers import BLOCK_BYTES, BufferLayout
from kernels.rooms import module_in
from shared.boundary.tp_group import TPGroup
from shared.spec.gumbel_noise import TARGET_STREAM
from shared.spec.sampling import TokenCounts
from tests.support.cases.sampling.sampling import asked
from tests.support.gpu_ranks import LOOKS, Rank
from tests.support.implementations import to_jax, to_torch
from tests.support.op_records import mapped
from tests.support.ranks_on_gpus import joined
from torch_impl.symmetric_memory import AllGather

TOKENS = 151_936
WAYS = ("whole", "parts", "joined")
CALLS = 16
"""Samplings per JAX program, because its launch takes longer than one sampling on the GPU."""


class _Exchange(AllGather):
    """All-gathers of a step through a connected symmetric buffer."""

    def __init__(self, kernels: Any, group: TPGroup, symmetric_buffer: Any) -> None:
        self._kernels, self._group, self._calls, self._symmetric_buffer = (
            kernels,
            group,
            0,
            symmetric_buffer,
        )


def kinds(R: int) -> dict[str, Any]:
    """Returns sampling parameters by kind of request."""
    warm = np.full(R, 0.8, np.float32)
    return {
        "greedy": asked(R, TOKENS),
        "warm": asked(R, TOKENS, temperature=warm),
        "filtered": asked(R, TOKENS, temperature=warm, top_p=np.full(R, 0.95, np.float32)),
    }


def given_of(R: int, params: Any) -> list[Any]:
    """Returns token counts, positions, sampling parameters, and the request of each row."""
    rows, path = np.arange(R, dtype=np.int32), np.zeros((R, 0), np.int32)
    seen = TokenCounts(np.zeros((2, TOKENS), np.int32), np.ones(R, np.int32), path, path > 0)
    return [seen, rows + 100, params, rows]


def ways_of(backend: str, kernels: Any, vocabulary: Any) -> dict[str, Callable[..., Any]]:
    """Ways from a head and its rows to tokens."""
    sampling, projection, tokens = (
        module_in(f"{backend}_impl.ops", name) for name in ("sampling", "lm_head", "vocab_parallel")
    )

    def whole(head: Any, seen: Any, *given: Any) -> Any:
        logits = tokens.whole(projection.scores(head), vocabulary)
        tiles = kernels.tiles.sampling.of(rows=len(logits))
        return kernels.sampling.choose(
            logits, seen, *given, None, stream=TARGET_STREAM, tiles=tiles
        )[0]

    def parts(head: Any, *given: Any) -> Any:
        scores = projection.scores(head)
        return sampling.choose_parts(kernels, scores, *given, None, vocabulary).ids

    def joined_head(head: Any, *given: Any) -> Any:
        return projection.kernel_fused_choose(kernels, head, *given, vocabulary).ids

    return dict(zip(WAYS, (whole, parts, joined_head), strict=True))


def choices_in_torch(rank: Rank, rows: tuple[int, ...]) -> list[Line]:
    """Returns the microseconds of LM head and sampling, by rows, kind of request and method."""
    ops, found = import_module("torch_impl.ops"), []
    names = ("linear", "lm_head", "sampling", "vocab_parallel")
    linear, projection, sampling, tokens = (module_in("torch_impl.ops", name) for name in names)
    symmetric_buffer = buffer_of(rank, BLOCK_BYTES)
    device, timed = symmetric_buffer.mail.place.device, Timed(rank, symmetric_buffer)
    alone = TPGroup(rank.rank, rank.count, None)
    exchange = _Exchange(ops.KERNELS, alone, symmetric_buffer)
    vocabulary = tokens.Vocabulary(TOKENS, alone.on(exchange))
    head = randoms(device, 1, TOKENS, HIDDEN).bfloat16()
    first = tokens.first_of(vocabulary)
    own = head.new_zeros(vocabulary.share, HIDDEN)
    own[: tokens.num_tokens_of(vocabulary)] = head[first : first + vocabulary.share]
    ways = ways_of("torch", ops.KERNELS, vocabulary)
    for R in rows:
        x = randoms(device, R + 2, R, HIDDEN).bfloat16()
        for kind, params in kinds(R).items():
            given = [
                mapped(value, lambda a: to_torch(a).to(device), sampling)
                for value in given_of(R, params)
            ]
            whole = projection.Projection(x, linear.Matrix.plain(head))
            want = sampling.choose(projection.scores(whole), *given, None).ids
            for way, choose in ways.items():
                got: list[Any] = []

                def step(choose: Any = choose, got: Any = got, x: Any = x, given: Any = given):
                    exchange.begin()
                    got[:] = [choose(projection.Projection(x, linear.Matrix.plain(own)), *given)]
                    exchange.end()

                line = {"part": "choices", "language": "torch", "ranks": rank.count, "rows": R}
                line |= {"rows ask": kind, "way": way, "us": round(timed.us(step, 1), 1)}
                note(found, line | {"is_right": torch.equal(got[0], want)}, rank)
    missing = symmetric_buffer.missing()
    assert missing is None, f"rank {rank.rank} missed {missing}"
    return found


def choices_in_jax(own: Rank, ranks: int, rows: tuple[int, ...]) -> list[Line]:
    """Same as `choices_in_torch`, several in one queued program for all devices."""
    jax, jnp, sharding = (import_module(name) for name in ("jax", "jax.numpy", "jax.sharding"))
    ops, memory = import_module("jax_impl.ops"), import_module("jax_impl.symmetric_memory")
    names = ("linear", "lm_head", "sampling", "vocab_parallel")
    linear, projection, sampling, tokens = (module_in("jax_impl.ops", name) for name in names)
    devices, spec, found = jax.devices()[:ranks], sharding.PartitionSpec, []
    mesh = sharding.Mesh(np.array(devices), ("ranks",))
    boxes = BufferLayout(ranks, BLOCK_BYTES)
    symmetric_buffer = import_module(
        "kernels.pallas_gpu.collectives.symmetric_memory"
    ).SymmetricBuffer(boxes, devices)
    idle, waiting = (joined(mesh, symmetric_buffer.places(looks), 0) for looks in (0, LOOKS))
    share = tokens.Vocabulary(TOKENS, TPGroup(0, ranks, None)).share
    # The same numbers on each device, of which it has its part.
    normal = jax.jit(
        lambda first: jnp.pad(
            jax.random.normal(jax.random.key(1), (TOKENS, HIDDEN), jnp.bfloat16),
            ((0, share * ranks - TOKENS), (0, 0)),
        )[first + jnp.arange(share)]
    )
    parts = [normal(jax.device_put(jnp.int32(i * share), d)) for i, d in enumerate(devices)]
    head = joined(mesh, parts, 0)
    whole = jnp.concatenate([jax.device_put(part, devices[0]) for part in parts])[:TOKENS]
    kernels = (ops.KERNELS.ranks, ops.KERNELS.vocabulary)
    for R in rows:
        x = jax.random.normal(jax.random.key(R), (R, HIDDEN), jnp.bfloat16)
        for kind, params in kinds(R).items():
            given = [mapped(value, to_jax, sampling) for value in given_of(R, params)]

            def alone(weight: Any, x: Any, given: Any) -> Any:
                scores = projection.scores(projection.Projection(x, linear.Matrix.plain(weight)))
                return sampling.choose(scores, *given, None).ids

            want = np.asarray(jax.jit(alone)(whole, x, given))
            for way in WAYS:

                def run(weight: Any, x: Any, given: Any, place: Any, way: str = way) -> Any:
                    exchange = memory.AllGather(place, *kernels, boxes)
                    vocabulary = tokens.Vocabulary(TOKENS, TPGroup(0, ranks, None).on(exchange))
                    choose, ids = ways_of("jax", ops.KERNELS, vocabulary)[way], None
                    for _ in range(CALLS):  # of which none begins before the last one's end
                        ids = choose(projection.Projection(x, linear.Matrix.plain(weight)), *given)
                        x += jnp.minimum(ids, 0).astype(x.dtype)[:, None]
                    return ids

                places = (spec("ranks"), spec(), spec(), spec("ranks"))
                mapped_run = jax.shard_map(
                    run, mesh=mesh, in_specs=places, out_specs=spec("ranks"), check_vma=False
                )
                program = jax.jit(mapped_run)
                jax.block_until_ready(program(head, x, given, idle))
                got = jax.block_until_ready(program(head, x, given, waiting))
                best = []
                for _ in range(4):
                    began = time.perf_counter()
                    for _ in range(20):
                        got = program(head, x, given, waiting)
                    jax.block_until_ready(got)
                    best.append((time.perf_counter() - began) / 20 / CALLS * 1e6)
                line = {"part": "choices", "language": "jax", "ranks": ranks, "rows": R}
                line |= {"rows ask": kind, "way": way, "us": round(min(best[1:]), 1)}
                is_right = np.array_equal(np.asarray(got), np.tile(want, ranks))
                note(found, line | {"is_right": is_right}, own)
    late = [x for x in symmetric_buffer.missing() if x is not None]
    assert not late, f"ranks missed {late}"
    return found
