"""Tensor-parallel GEMMs of a layer in JAX, for `bench.kernels.tp_all_gather`."""

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from bench.kernels.tp_gemm import (
    EPS,
    HIDDEN,
    LAYERS,
    PRODUCTS,
    QKV,
    Line,
    block_bytes,
    note,
)
from kernels.peer_buffers import MOST_JOINED_ROWS, BufferLayout
from kernels.tiles import Tiles
from shared.spec.reduction_order import SQUARES
from tests.support.gpu_ranks import LOOKS, Rank
from tests.support.ranks_on_gpus import joined


def layer_in_jax(process: Rank, ranks: int, rows: tuple[int, ...]) -> list[Line]:
    """Same as `layer_in_torch`, in one queued program for all devices; no GEMM alone."""
    jax, jnp = import_module("jax"), import_module("jax.numpy")
    gathers, linear = import_module("kernels.pallas_gpu.collectives.all_gather"), _linear_of_jax()
    sharding, symmetric_buffer = (
        import_module("jax.sharding"),
        import_module("kernels.pallas_gpu.collectives.symmetric_memory"),
    )
    devices, spec, found = jax.devices()[:ranks], sharding.PartitionSpec, []
    mesh = sharding.Mesh(np.array(devices), ("ranks",))
    boxes = symmetric_buffer.SymmetricBuffer(
        BufferLayout(ranks, block_bytes(ranks, max(rows))), devices
    )
    idle, waiting = (joined(mesh, boxes.places(looks), 0) for looks in (0, LOOKS))
    table = Tiles.load("pallas_gpu", devices[0].device_kind).linear
    columns, whole = spec(None, "ranks"), spec()

    def made(name: str, count: int, own: int) -> Any:
        """A stack of a rank's weights, on its device."""
        product = PRODUCTS[name]
        shape = (LAYERS, 2 if product.is_gated else 1, product.outputs, product.inputs)
        share = product.outputs // count

        def draw() -> Any:
            key = jax.random.key(list(PRODUCTS).index(name))
            return jax.random.normal(key, shape, jnp.bfloat16) / 64

        def cut(drawn: Any) -> Any:
            mine = drawn[:, :, own * share : (own + 1) * share]
            return mine.reshape(LAYERS, -1, product.inputs)

        # Drawn by one program for any share, so that its numbers are those of the whole.
        with jax.default_device(devices[own]):
            return jax.block_until_ready(jax.jit(cut)(jax.jit(draw)()))

    for count in (1, ranks):
        weights = [[made(name, count, own) for own in range(count)] for name in PRODUCTS]
        axes = spec(None, "ranks", None)
        weights = [joined(mesh, each, 1) if count > 1 else each[0] for each in weights]
        for R in rows:
            for way in ("alone",) if count == 1 else ("apart", "joined"):
                if way == "joined" and R > MOST_JOINED_ROWS:
                    continue

                def run(
                    weights: Any,
                    stream: Any,
                    attended: Any,
                    norm: Any,
                    scaled: Any,
                    place: Any,
                    R: int = R,
                    way: str = way,
                    count: int = count,
                ) -> Any:
                    gather, sums = (
                        gathers.AllGatherArgs(place, boxes.boxes),
                        jnp.ones((R, HIDDEN // 64)),
                    )

                    def gathered(values: Any, sums: Any) -> Any:
                        return (
                            (values, sums)
                            if count == 1
                            else gathers.all_gather(values, sums, gather)
                        )

                    def multiply(number: int, layer: int, given: Any, sums: Any) -> Any:
                        product, weight = list(PRODUCTS.values())[number], weights[number]
                        is_joined = way == "joined" and number > 0
                        out, read, after, _ = linear(
                            given,
                            weight,
                            jnp.int32(layer),
                            tiles=table.of(
                                item_bytes=2,
                                rows=R,
                                outputs=product.outputs // count,
                                gated=int(product.is_gated),
                            ),
                            squares=None if product.is_added else sums,
                            is_gated=product.is_gated,
                            added=stream if product.is_added else None,
                            norm=norm if product.is_added else None,
                            gather=gather if is_joined else None,
                        )
                        if number == 0 or is_joined:
                            return (out, None) if read is None else (read, after)
                        return gathered(out if read is None else read, after)

                    for layer in range(LAYERS):
                        qkv, _ = multiply(0, layer, scaled, sums)
                        # Attention's part here: nothing but that it follows, on each rank.
                        own, parts = attended, ranks // count
                        for part in range(parts):
                            to, of = (part * n // ranks for n in (HIDDEN, QKV))
                            own = own.at[0, to].set(qkv[0, of])
                        scaled, sums = multiply(1, layer, gathered(own, None)[0], None)
                        inner, _ = multiply(2, layer, scaled, sums)
                        scaled, sums = multiply(3, layer, inner, None)
                    return scaled

                rng = np.random.default_rng(R)
                stream, attended, scaled = (
                    rng.standard_normal((R, HIDDEN), np.float32).astype(jnp.bfloat16)
                    for _ in range(3)
                )
                norm = np.ones((1, HIDDEN), np.float32)
                if count == 1:
                    program = jax.jit(run)
                    arrays = jax.device_put((stream, attended, norm, scaled), devices[0])
                    places = (jax.device_put(np.zeros(4, np.int32), devices[0]),) * 2
                else:
                    how = {"mesh": mesh, "out_specs": columns, "check_vma": False}
                    specs = ([axes] * 4, columns, columns, columns, whole, spec("ranks"))
                    program = jax.jit(jax.shard_map(run, in_specs=specs, **how))
                    arrays = [
                        joined(mesh, np.split(x, ranks, 1), 1) for x in (stream, attended, norm)
                    ]
                    arrays.append(joined(mesh, [scaled] * ranks, None))
                    places = (idle, waiting)
                jax.block_until_ready(program(weights, *arrays, places[0]))
                best = []
                for _ in range(4):
                    began = time.perf_counter()
                    for _ in range(20):
                        got = program(weights, *arrays, places[1])
                    jax.block_until_ready(got)
                    best.append((time.perf_counter() - began) / 20 / LAYERS * 1e6)
                line: Line = {"part": "layer", "language": "jax", "ranks": count, "rows": R}
                parts = [np.asarray(x.data) for x in got.addressable_shards]
                line |= {"way": way, "us": round(min(best[1:]), 2), "last": parts[0]}
                line["alike"] = all(np.array_equal(x, parts[0]) for x in parts)
                found.append(line)
                print(f"layer of jax, {R} rows, {way}: {line['us']} us", flush=True)
        del weights
    late = [x for x in boxes.missing() if x is not None]
    assert not late, f"ranks missed {late}"
    right = {line["rows"]: line["last"] for line in found if line["way"] == "alone"}
    lines: list[Line] = []
    for line in found:
        is_right = line.pop("alike") and np.array_equal(line.pop("last"), right[line["rows"]])
        note(lines, line | {"is_right": bool(is_right)}, process)
    return lines


def _linear_of_jax() -> Callable[..., Any]:
    """A product with what stays the same."""
    jnp = import_module("jax.numpy")
    product = import_module("kernels.pallas_gpu.gemm.linear").product

    def multiply(x: Any, weight: Any, layer: Any, **how: Any) -> Any:
        same = {"first": 0, "out_type": jnp.bfloat16, "eps": EPS, "bias": None, "factor": 1.0}
        return product(
            x, weight, None, layer, **same, norm_layer=jnp.int32(0), order=SQUARES, **how
        )

    return multiply
