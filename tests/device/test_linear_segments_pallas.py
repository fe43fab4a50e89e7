"""Segments of the inputs in GEMMs of Pallas alone: WGMMA, clusters, counters, invalid segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_impl.ops
from jax_impl.ops.gemm import linear as jax_linear
from kernels.pallas_gpu.gemm import (
    fp8_activations,
    linear,
    linear_packed_sm90,
    linear_sm90,
    linear_sm90_mainloop,
)
from kernels.pallas_gpu.gemm.linear_launch import GemmTiling
from kernels.tiles import LinearTiles
from shared.models.formats.fp8 import BLOCK, Granularity
from shared.models.formats.int4_encoding import Int4Encoding
from shared.models.formats.weight_format import PLAIN
from shared.spec import reduction_order
from shared.spec.reduction_order import SQUARES, LinearOrder
from tests.support import linear_segments
from tests.support.kernels import (
    AS_WRITTEN,
    INTERPRET,
    KERNELS,
    ON_GPU,
    bind_kernels,
    share_arithmetic,
)
from tests.support.linear_kernels import (
    Weights,
    as_w4a16,
    as_w8a16,
    copied,
    normal,
    plain_weights,
    tiles,
)

pytestmark = pytest.mark.usefixtures("interpreted")


def as_codes(outputs: int, inputs: int) -> Weights:
    """Two weights in FP8 (W8A8), with scales of several sizes."""
    shape = (2, outputs // BLOCK, inputs // BLOCK)
    scales = np.random.default_rng(5).uniform(0.5, 1, shape).astype(np.float32)
    values = (normal(1, 2, outputs, inputs) / 8).astype(ml_dtypes.float8_e4m3fn)
    return Weights("fp8_w8a8", values, scales)


FORMATS: dict[str, Callable[[int, int], Weights]] = {
    "plain": plain_weights,
    "FP8": partial(as_w8a16, Granularity.BLOCK),
    "INT4": partial(as_w4a16, Int4Encoding(128, "BF16", has_zeros=False)),
    "AWQ": partial(as_w4a16, Int4Encoding(128, "F16", has_zeros=True)),
    "W8A8": as_codes,
}
PACKED = ("FP8", "INT4", "AWQ")
"""Formats of `linear_packed_sm90`."""
OUTPUTS = 128
TMA = {"described": True, "persistent": True, "swapped": False}
COUNTERS = 64
"""Counters of a call, more than blocks."""


def added(
    x: np.ndarray,
    weights: Weights,
    cut: LinearTiles,
    segments: int,
    *,
    num_counters: int = COUNTERS,
    has_norm: bool = True,
    is_added: bool = True,
) -> list[tuple[np.ndarray, ...]]:
    """Adds a GEMM with the second of two weights to a residual twice, with the same counters.

    Returns:
      The result, the result times the scale of the next norm if there is one, and the sums of
      squares, of each. Only the result if the GEMM is not added.
    """
    format, values, scales = weights
    R = len(x)
    stream, norm = normal(2, R, values.shape[1]), 1 + normal(4, 2, values.shape[1]) / 4
    is_cast = scales is not None and format != "fp8_w8a8" and scales.dtype != np.int32

    def run(x: Any, values: Any, scales: Any, stream: Any) -> list[tuple[Any, ...]]:
        arrivals = jnp.zeros(num_counters, jnp.int32) + (x[0, 0] > 1e30).astype(jnp.int32)
        x = x.astype(jnp.bfloat16)
        codes, row_scales = (x, None)
        if format == "fp8_w8a8":
            codes, row_scales = fp8_activations.quantised(x, interpret=INTERPRET)
        results = []
        for index in range(2):
            out, scaled, sums, _ = linear.product(
                codes,
                values.astype(x.dtype) if format == PLAIN else values,
                scales.astype(x.dtype) if is_cast else scales,
                jnp.int32(1),
                row_scales,
                format=format,
                num_rows=R,
                first=0,
                out_type=x.dtype,
                factor=1 / (1 + index),
                added=stream.astype(x.dtype) if is_added else None,
                norm=jnp.asarray(norm) if has_norm and is_added else None,
                norm_layer=jnp.int32(1),
                order=SQUARES,
                tiles=cut,
                segments=segments,
                arrivals=arrivals,
                interpret=INTERPRET,
            )
            results.append((out, scaled, sums))
        return jax.tree.map(lambda y: y.astype(jnp.float32), results)

    program = jax.jit(run, compiler_options=AS_WRITTEN)
    return jax.tree.map(np.asarray, program(x, values, scales, stream))


def check_equal(got: list[tuple[np.ndarray, ...]], want: list[tuple[np.ndarray, ...]]) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(INTERPRET or not ON_GPU, reason="blocks are copied by TMA on a GPU")
@pytest.mark.parametrize("rows", [1, 8, 32, 64, 300, 2048])
@pytest.mark.parametrize("format", ["plain", "W8A8"])
def test_pallas_sm90_segments_bitwise_equal(format: str, rows: int) -> None:
    x, weights = normal(0, rows, 2048), FORMATS[format](384, 2048)
    given = {"x": x, "weights": weights, "segments": 2}
    how = {"depth": BLOCK, "stages": 3}
    want = added(**given, cut=tiles(**how))
    cuts = [how | {"separate": True}]
    cuts += [how | TMA | {"rows": 64}, how | TMA | {"rows": 128, "columns": 128, "warps": 8}]
    if format == "plain":
        wide = TMA | {"depth": 64, "rows": 128, "warps": 8, "stages": 4}
        cuts += [wide | {"columns": columns} for columns in (192, 256)]
        if rows <= 32:
            cuts.append(TMA | {"swapped": True, "depth": 128, "rows": max(8, rows), "stages": 8})
    for cut in cuts:
        check_equal(added(**given, cut=tiles(**cut)), want)


WIDE = TMA | {"rows": 128, "columns": 256, "warps": 8, "depth": 64}
HALF_STORED = [{"stages": 3}, {"stages": 6, "depth": 32}, {"stages": 3, "rows": 64, "warps": 4}]
"""Changed tiles of which shared memory has half of the sums of finished segments."""


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the segments of each call that is traced with sums in shared memory."""
    calls, healthy = list[int](), linear_sm90_mainloop.sums_of_halves

    def counted(shared: Any, work: Any, *args: Any) -> Any:
        calls.append(work.segments)
        return healthy(shared, work, *args)

    monkeypatch.setattr(linear_sm90_mainloop, "sums_of_halves", counted)
    return calls


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "segments"),
    [
        (33, 384, 2048, 2),
        (300, 640, 2048, 2),
        (512, 256, 128, 2),  # segments of one step
        (512, 4096, 1536, 3),
        (2048, 2560, 1024, 4),  # more blocks than multiprocessors
        (2048, 4096, 12288, 2),
    ],
)
def test_pallas_sm90_stored_sums_bitwise_equal(
    rows: int, outputs: int, inputs: int, segments: int, halved: list[int]
) -> None:
    """Sums of finished segments in shared memory, and all of them in registers."""
    given = {"x": normal(0, rows, inputs), "weights": plain_weights(outputs, inputs)}
    given |= {"segments": segments}
    want = added(**given, cut=tiles(**WIDE | {"columns": 128, "stages": 4}))
    assert not halved
    for change in HALF_STORED:
        check_equal(added(**given, cut=tiles(**WIDE | change)), want)
    assert set(halved) == {segments}


@pytest.mark.parametrize(
    ("change", "want"),
    [
        *(({**change}, {}) for change in HALF_STORED),
        ({"stages": 4}, {"columns": 128, "stages": 6}),
        ({"stages": 7, "depth": 32}, {"columns": 128, "stages": 10}),
        ({"stages": 2, "depth": 128}, {"columns": 128, "stages": 3}),
        ({"columns": 192, "stages": 4}, {"columns": 128, "stages": 5}),
        ({"columns": 128, "stages": 6}, {}),
        ({"columns": 64, "stages": 8}, {}),
    ],
    ids=str,
)
def test_pallas_sm90_tiles_have_space_for_finished_sums(
    change: dict[str, int], want: dict[str, int]
) -> None:
    cut = tiles(**WIDE | change)
    assert linear_sm90.tiles_of_segments(cut, 2) == replace(cut, **want)


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the segments of each call of `linear_packed_sm90` that is traced."""
    calls, healthy = list[int](), linear_packed_sm90.linear

    def counted(*args: Any, **how: Any) -> Any:
        calls.append(how["segments"])
        return healthy(*args, **how)

    monkeypatch.setattr(linear_packed_sm90, "linear", counted)
    return calls


@pytest.mark.gpu
@pytest.mark.parametrize(("is_added", "has_norm"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("rows", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("format", PACKED)
def test_pallas_packed_segments_bitwise_equal(
    format: str, rows: int, is_added: bool, has_norm: bool, packed_calls: list[int]
) -> None:
    """A cluster adds the segments in the order of one program of the ordinary kernel."""
    x, weights = normal(0, rows, 4096), FORMATS[format](384, 4096)
    for segments, depths in ((2, (256, 512)), (4, (256,))):
        given = {"x": x, "weights": weights, "segments": segments}
        given |= {"has_norm": has_norm, "is_added": is_added}
        want = added(**given, cut=tiles(widens=False))
        for depth in depths:
            cut = copied("pallas", "added", separate=True, stages=2, depth=depth)
            check_equal(added(**given, cut=cut), want)
    assert packed_calls == [2] * 4 + [4] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("kind", ["added", "alone"])
def test_pallas_packed_segments_match_spec(
    kind: str, format: str, rows: int, packed_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = linear_segments.product_of(format, kind, rows=rows)
    if given.stream is not None:
        given = given._replace(stream=linear_segments.in_bfloat16(given.stream))
    want = linear_segments.specified(given, 2, monkeypatch)
    cut = copied("pallas", "added", separate=True)
    got = linear_segments.added("pallas", given, cut, 2, "bfloat16")[0]
    assert packed_calls == [2]
    # The result is rounded to bfloat16, and tensor cores add in another order.
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "segments", "taken"),
    [
        ({}, 1, True),
        ({"separate": True}, 1, True),
        ({}, 2, False),  # one program has all segments
        ({"separate": True}, 2, True),
        ({"separate": True, "depth": 512}, 2, True),
        ({"separate": True, "depth": 512}, 4, False),  # segments of one and a half steps
        ({"separate": True}, 12, False),  # a cluster of 12 programs is not portable
    ],
    ids=str,
)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_added", [False, True])
def test_packed_sm90_takes_segments_of_whole_steps(
    change: dict[str, int],
    segments: int,
    taken: bool,
    is_added: bool,
    has_norm: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_packed_sm90, "has_mosaic", lambda: True)
    of: Any = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    found = linear_packed_sm90.takes(
        of((8, 3072)),
        of((2, OUTPUTS, 3072 // 8), dtype=jnp.int32),
        of((2, OUTPUTS, 3072 // 128)),
        format="int4_w4a16",
        outputs=OUTPUTS,
        first=0,
        out_type=jnp.bfloat16,
        squares=of((8, 3072 // 64), dtype=jnp.float32) if has_norm else None,
        is_plain=True,
        added=of((8, OUTPUTS)) if is_added else None,
        order=SQUARES,
        segments=segments,
        tiles=copied("pallas", "added", **change),
    )
    assert found == (taken and not (has_norm and segments > 1))


@pytest.mark.parametrize("is_added", [False, True])
def test_pallas_separate_segments_reset_counters(
    is_added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer counters than blocks one program adds all segments."""
    share_arithmetic(monkeypatch)
    x, weights = normal(0, 3, 512), plain_weights(OUTPUTS, 512)
    given = {"x": x, "weights": weights, "cut": tiles(separate=True), "segments": 4}
    given["is_added"] = is_added
    check_equal(added(**given), added(**given, num_counters=1))


@pytest.mark.parametrize(
    ("format", "inputs", "why"),
    [
        ("plain", 272, "segments must be multiples of 16 inputs, got 2 of 272 inputs"),
        ("FP8", 384, "segments of fp8_w8a16 must be multiples of 128 inputs, got 2 of 384 inputs"),
    ],
)
def test_pallas_segments_reject_partial_blocks(format: str, inputs: int, why: str) -> None:
    x, weights = normal(0, 3, inputs), FORMATS[format](OUTPUTS, inputs)
    with pytest.raises(ValueError, match=why):
        added(x, weights, tiles(widens=False), 2)


@pytest.mark.parametrize(
    ("outputs", "counters", "programs", "gathering"),
    [
        (4096, 512, 128, 128),
        (4096, 63, 64, 64),  # fewer counters than blocks
        (5120, 512, 160, 80),  # more programs than multiprocessors
    ],
)
def test_pallas_segments_that_wait_run_at_once(
    outputs: int, counters: int, programs: int, gathering: int
) -> None:
    tiling = GemmTiling.of(
        1,
        outputs,
        4096,
        tiles(separate=True),
        PLAIN,
        is_gated=False,
        is_adapted=False,
        segments=2,
        counters=counters,
    )
    assert (tiling.programs, tiling.with_gather.programs) == (programs, gathering)


@pytest.mark.parametrize(("segments", "total"), [(1, 0), (2, 2)])
def test_jax_linear_add_passes_segments_to_kernel(
    segments: int, total: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind_kernels(monkeypatch, jax_impl.ops, KERNELS["pallas"])
    order = LinearOrder(segments=segments, least=256, unit=64)
    monkeypatch.setattr(reduction_order, "LINEAR", order)
    kernels = jax_impl.ops.KERNELS
    assert kernels is not None  # bound above
    if INTERPRET:
        named = {"linear": "product", "layers": "beside"}
        modules = {
            module: type("Interpreted", (), {name: partial(function, interpret=True)})
            for module, name in named.items()
            for function in [getattr(KERNELS["pallas"][module], name)]
        }
        kernels = replace(kernels, **modules)
    wide = np.zeros((OUTPUTS, 512), np.float32)
    wide[:, ::128] = 2.0**25, 0, 2, -(2.0**25)  # 2^25 + 2 is rounded to 2^25

    def run(x: jax.Array, wide: jax.Array, rows: jax.Array) -> tuple[jax.Array, ...]:
        weight, stream = jax_linear.Matrix.plain(wide), jax_linear.kernel_stream(kernels, rows)
        assert (stream.arrivals is not None) == (segments > 1)
        once = jax_linear.kernel_added(kernels, x, weight, stream, 1.0, None, 1).rows
        partial_pass = stream._replace(arrivals=None)
        return once, *(
            out
            for each in (stream, partial_pass)
            for out in (
                jax_linear.kernel_linear_add(kernels, x, weight, each).rows,
                jax_linear.kernel_residual_product(kernels, x, weight, each.arrivals),
            )
        )

    x, rows = np.ones((3, 512), np.float32), np.zeros((3, OUTPUTS), np.float32)
    once, *found = jax.jit(run, compiler_options=AS_WRITTEN)(x, wide, rows)
    assert (once == 0).all()
    assert all((rows == total).all() for rows in found)
