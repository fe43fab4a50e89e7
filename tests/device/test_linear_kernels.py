"""Kernels of GEMMs and norms against the specification: on a GPU, or interpreted.

And that a row's bits depend neither on the rows beside it nor on the tiles.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kernels.pallas_gpu.gemm import linear_sm90
from kernels.tiles import LinearTiles
from shared.models.activation import GELU_TANH, RELU2, SCALED_SILU, SILU_AND_MUL, Activation
from shared.models.formats.weight_format import PLAIN
from shared.spec import layers as spec_layers
from shared.spec import linear as spec
from shared.spec.linear import Matrix, NormedStream
from shared.spec.reduction_order import SQUARES, chunks_of_squares, sum_of_squares
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, in_languages
from tests.support.linear_kernels import (
    EPS,
    KINDS,
    Arrays,
    alone,
    in_bfloat16,
    in_pallas,
    in_triton,
    normal,
    tiles,
)

pytestmark = pytest.mark.usefixtures("interpreted")

each_language = pytest.mark.parametrize("language", KERNELS)


CUTS = {
    "pallas": [(False, False), (True, True)],
    "triton": [(False, False), (False, True), (True, False), (True, True)],
}
"""Pairs: blocks are copied by TMA, programs are persistent."""


TMA = {"described": True, "persistent": True}


def multiply(
    language: str,
    x: np.ndarray,
    weight: np.ndarray,
    *,
    squares: np.ndarray | None = None,
    added: np.ndarray | None = None,
    norm: np.ndarray | None = None,
    is_gated: bool = False,
    activation: Activation = SILU_AND_MUL,
    bias: np.ndarray | None = None,
    factor: float = 1.0,
    cut: LinearTiles | None = None,
    first: int = 0,
) -> Arrays:
    how = {"eps": EPS, "is_gated": is_gated, "activation": activation, "factor": factor}
    how |= {"order": SQUARES, "tiles": cut or tiles(), "format": PLAIN}
    module = KERNELS[language]["linear"]
    if language == "triton":
        return in_triton(
            lambda x, weight, squares, bias, added, norm: module.product(
                x,
                weight[first:],
                None,
                squares=squares,
                bias=bias if bias is None else bias[first:],
                added=added,
                norm=norm,
                out_type=torch.float32,
                **how,
            ),
            *(x, weight, squares, bias, added, norm),
        )
    stack, biases, norms = (
        x if x is None else np.stack([np.full_like(x, np.nan), x]) for x in (weight, bias, norm)
    )
    return in_pallas(
        lambda x, stack, squares, biases, added, norms, interpret: module.product(
            x,
            stack,
            None,
            jnp.int32(1),
            first=first,
            squares=squares,
            bias=biases,
            added=added,
            norm=norms,
            norm_layer=jnp.int32(1),
            out_type=jnp.float32,
            interpret=interpret,
            **how,
        ),
        *(x, stack, squares, biases, added, norms),
    )


def beside(language: str, x: np.ndarray, norm: np.ndarray | None) -> Arrays:
    module = KERNELS[language]["layers"]
    if language == "triton":
        return in_triton(module.beside, x, norm, order=SQUARES)
    norms = None if norm is None else np.stack([np.full_like(norm, np.nan), norm])
    return in_pallas(
        lambda x, norms, **how: module.beside(x, norms, jnp.int32(1), **how),
        x,
        norms,
        order=SQUARES,
    )


SIZES = {"few rows": (3, 96, 80), "rows over": (20, 128, 128), "nothing over": (16, 64, 64)}
SHAPED = [(name, is_swapped) for name in SIZES for is_swapped in (False, True)]
# Of Pallas each size in one of the two shapes.
each_shape = pytest.mark.parametrize(
    ("language", "shaped"),
    in_languages(SHAPED, [("few rows", True), ("rows over", True), ("nothing over", False)]),
    ids=str,
)


@each_shape
def test_linear_fused_prologue_and_epilogue_match_spec(
    shaped: tuple[str, bool], language: str
) -> None:
    name, is_swapped = shaped
    R, K, N = SIZES[name]
    x, weight, gates = normal(0, R, K), normal(1, N, K), normal(2, 2 * N, K)
    cut, squares = tiles(swapped=is_swapped), chunks_of_squares(x)
    (got,) = multiply(language, x, weight, cut=cut)
    np.testing.assert_allclose(got, spec.product(x, Matrix.plain(weight)), rtol=1e-4, atol=1e-4)
    (got,) = multiply(language, x, weight, squares=squares, cut=cut)
    want = spec.rmsnorm_linear(NormedStream(x), EPS, Matrix.plain(weight))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    (got,) = multiply(language, x, gates, squares=squares, is_gated=True, cut=cut)
    want = spec.act_and_mul_linear(NormedStream(x), EPS, Matrix.plain(gates))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
    added, norm = normal(3, R, N), 1 + normal(6, N) / 4
    got, scaled, sums = multiply(language, x, weight, added=added, norm=norm, cut=cut)
    want = spec.linear_add(x, Matrix.plain(weight), NormedStream(added)).rows
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(sums, chunks_of_squares(got))
    np.testing.assert_array_equal(scaled, got * norm)


@each_shape
def test_linear_bias_and_scale_match_spec(shaped: tuple[str, bool], language: str) -> None:
    name, is_swapped = shaped
    R, K, N = SIZES[name]
    x, cut, squares = normal(0, R, K), tiles(swapped=is_swapped), chunks_of_squares(normal(0, R, K))
    weight, gates = (
        Matrix.plain(normal(1, N, K), normal(4, N)),
        Matrix.plain(normal(2, 2 * N, K), normal(5, 2 * N)),
    )
    given = {"bias": weight.bias, "cut": cut}
    (got,) = multiply(language, x, weight.values, squares=squares, **given)
    want = spec.rmsnorm_linear(NormedStream(x), EPS, weight)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    (got,) = multiply(language, x, weight.values, first=N // 2, **given)
    np.testing.assert_allclose(got, spec.product(x, weight, N // 2), rtol=1e-4, atol=1e-4)
    how = {"squares": squares, "is_gated": True, "bias": gates.bias, "cut": cut}
    for activation in (Activation(GELU_TANH), Activation(SCALED_SILU, alpha=0.3, factor=0.7)):
        (got,) = multiply(language, x, gates.values, activation=activation, **how)
        want = spec.act_and_mul_linear(NormedStream(x), EPS, gates, activation)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
    (got,) = multiply(
        language, x, weight.values, squares=squares, activation=Activation(RELU2), **given
    )
    want = spec.act_and_mul_linear(NormedStream(x), EPS, weight, Activation(RELU2))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
    added = normal(3, R, N)
    got, sums = multiply(language, x, weight.values, added=added, factor=0.22, **given)
    want = spec.linear_add(x, weight, NormedStream(added), 0.22).rows
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    # Interpreted, XLA rounds the product and the sum once in one place and twice in another.
    np.testing.assert_allclose(sums, chunks_of_squares(got), rtol=0 if ON_GPU else 1e-6)


@each_shape
def test_linear_tma_tiles_bitwise_equal(shaped: tuple[str, bool], language: str) -> None:
    """In Pallas float32 has no descriptors, and falls back."""
    name, is_swapped = shaped
    R, K, N = SIZES[name]
    x, weight = normal(0, R, K), normal(1, 2 * N, K)
    given = {"x": x, "weight": weight, "squares": chunks_of_squares(x), "is_gated": True}
    cuts = [
        tiles(swapped=is_swapped, described=described, persistent=persistent)
        for described, persistent in CUTS[language]
    ]
    (want,), *others = (multiply(language, **given, cut=cut) for cut in cuts)
    for (got,) in others:
        np.testing.assert_array_equal(got, want)


@pytest.mark.skipif(
    INTERPRET or not ON_GPU or "triton" not in KERNELS, reason="blocks are copied by TMA on a GPU"
)
@pytest.mark.parametrize("out_type", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"R": 1, "K": 256, "N": 192},
        {"R": 64, "K": 256, "N": 64},
        {"R": 300, "K": 1024, "N": 320},
        {"R": 512, "K": 4096, "N": 1088},
        {"R": 2048, "K": 512, "N": 6144},
    ],
    ids=lambda sizes: f"{sizes['R']} rows",
)
def test_pallas_sm90_linear_and_triton_tma_bitwise_equal(
    sizes: dict[str, int], kind: str, out_type: str
) -> None:
    given = sizes | {"kind": kind, "out_type": out_type, "first": 64 * ("gated" not in kind)}
    how = {"rows": 128, "columns": 128, "swapped": False, "warps": 8, "stages": 3}
    want = in_bfloat16("pallas", cut=tiles(**how), **given)
    others = [
        in_bfloat16("triton", cut=tiles(described=True, persistent=is_persistent, **how), **given)
        for is_persistent in (False, True)
    ]
    changes = [
        {},
        {"columns": 64, "stages": 6},
        {"rows": 64, "warps": 4, "depth": 128, "stages": 2},
    ]
    changes += [{"rows": 256, "columns": 64}] if "gated" in kind else [{"columns": 256}]
    for change in changes:
        others.append(in_bfloat16("pallas", cut=tiles(**how | TMA | change), **given))
    for got in others:
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(INTERPRET or not ON_GPU, reason="blocks are copied by TMA on a GPU")
@pytest.mark.parametrize("out_type", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["plain", "normed", "added", "times, added"])
@pytest.mark.parametrize("K", [64, 320])
@pytest.mark.parametrize("R", [1, 7, 8, 12, 16, 32])
def test_pallas_sm90_linear_few_rows_bitwise_equal(
    R: int, K: int, kind: str, out_type: str
) -> None:
    """Tile configs that Mosaic does not support fall back."""
    given = {"kind": kind, "R": R, "K": K, "N": 192, "out_type": out_type}
    given["first"] = 64 * ("gated" not in kind)
    want = in_bfloat16("pallas", cut=tiles(rows=32), **given)
    for change in ({}, {"depth": 128, "stages": 4}):
        rows = max(8, 1 << (R - 1).bit_length())
        got = in_bfloat16("pallas", cut=tiles(rows=rows, **TMA | change), **given)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(
    INTERPRET or not ON_GPU or "triton" not in KERNELS, reason="blocks are copied by TMA on a GPU"
)
@pytest.mark.parametrize(
    ("kind", "R", "out_type"),
    [*((kind, 256, "bfloat16") for kind in KINDS)]
    + [("gated", 300, "float32"), ("added", 300, "bfloat16"), ("added", 256, "float32")],
)
def test_linear_192_column_tiles_bitwise_equal(kind: str, R: int, out_type: str) -> None:
    # With these widths a mean is rounded, and the sum with `eps` again: fused, it would differ.
    given = {"kind": kind, "R": R, "K": 1536, "N": 320, "first": 0, "out_type": out_type}
    how = {"rows": 128, "columns": 128, "swapped": False, "warps": 8, "stages": 3}
    want = in_bfloat16("triton", cut=tiles(**how), **given)
    wide = how | TMA | {"columns": 96 if "gated" in kind else 192}
    for change in ({}, {"rows": 64, "warps": 4, "stages": 4}):
        for language in ("triton", "pallas"):
            got = in_bfloat16(language, cut=tiles(**wide | change), **given)
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(INTERPRET or not ON_GPU, reason="a compiler rounds, and an interpreter never")
@pytest.mark.parametrize("kind", ["added", "biased", "biased, times, added"])
@each_language
def test_linear_epilogue_rounding_independent_of_depth(language: str, kind: str) -> None:
    sizes = {"R": 128, "K": 128, "N": 256, "first": 0}
    found = []
    for depth in (32, 64, 128):
        cut = tiles(rows=64, swapped=False, stages=5, depth=depth)
        found.append(in_bfloat16(language, kind, cut, **sizes, out_type="bfloat16"))
    for got in found[1:]:
        for one, other in zip(got, found[0], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("inputs", "want"), [(4096, 128), (129, 128), (128, 64), (24, 16), (16, 16)]
)
def test_depth_of_splits_inputs_into_several_steps(inputs: int, want: int) -> None:
    assert tiles(depth=128).depth_of(inputs) == want


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"swapped": True, "columns": 128}, "must have 64 columns and 4 warps where they are swa"),
        ({"swapped": True, "warps": 8}, "must have 64 columns and 4 warps where they are swapped"),
        ({"persistent": False}, "must be persistent"),
        ({"warps": 2}, "must have 4 warps or more"),
        ({"warps": 8}, "must have 64 rows or more for 4 warps"),
        ({"columns": 32}, "must have 64 columns or more"),
        ({"depth": 16}, "must have a depth of 32 or more"),
    ],
)
def test_pallas_sm90_linear_rejects_invalid_tiles(change: dict[str, int], why: str) -> None:
    x, weights = jnp.zeros((64, 64), jnp.bfloat16), jnp.zeros((1, 64, 64), jnp.bfloat16)
    how = {"rows": 64, "swapped": False} | TMA
    with pytest.raises(ValueError, match=f"described tiles {why}"):
        linear_sm90.linear_sm90(x, weights, jnp.int32(0), **alone(tiles(**how | change)))


@pytest.mark.parametrize("swapped", [True, False], ids=["outputs wide", "rows wide"])
@pytest.mark.parametrize("out_type", ["bfloat16", "float32"])
def test_sm90_takes_float32_output_of_wide_rows_only(
    out_type: str, swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of a model of few tokens is a product of few outputs, and its result is float32."""
    monkeypatch.setattr(linear_sm90, "has_mosaic", lambda: True)
    x, weights = jnp.zeros((1, 256), jnp.bfloat16), jnp.zeros((1, 4096, 256), jnp.bfloat16)
    taken = linear_sm90.takes(
        x,
        weights,
        outputs=4096,
        first=0,
        out_type=jnp.dtype(out_type),
        is_normed=False,
        is_plain=True,
        added=None,
        order=SQUARES,
        tiles=tiles(**({"rows": 8 if swapped else 64, "swapped": swapped} | TMA)),
        segments=1,
    )
    assert taken is (out_type == "bfloat16" or not swapped)


@pytest.mark.parametrize(
    ("version", "has"), [((0, 10, 2), False), ((0, 11, 0), True), ((0, 12, 0, 1), False)]
)
def test_has_mosaic_requires_supported_jax_version(
    version: tuple[int, ...], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version starts too, with the kernels of Pallas for Triton."""
    monkeypatch.setattr(linear_sm90, "is_on_hopper", lambda: True)
    monkeypatch.setattr(jax, "__version_info__", version)
    assert linear_sm90.has_mosaic() is has


def test_pallas_linear_rejects_persistent_tiles_without_tma() -> None:
    with pytest.raises(ValueError, match="persistent tiles must be described in Pallas"):
        multiply("pallas", normal(0, 3, 64), normal(1, 64, 64), cut=tiles(persistent=True))


@pytest.mark.parametrize("change", [{"described": False}, {"rows": 32}, {"swapped": True}], ids=str)
@pytest.mark.parametrize("columns", [96, 192])
def test_tiles_reject_unsupported_columns_not_power_of_two(
    columns: int, change: dict[str, int]
) -> None:
    how = {"rows": 64, "columns": columns, "swapped": False} | TMA
    assert tiles(**how).narrowed == tiles(**how | {"columns": columns * 2 // 3})
    with pytest.raises(ValueError, match=f"tiles of {columns} columns must be described, not swa"):
        tiles(**how | change)


@each_language
def test_linear_192_column_tiles_narrowed_without_tma(language: str) -> None:
    x, weight = normal(0, 20, 128), normal(1, 256, 128)
    how = {"rows": 64, "swapped": False} | TMA
    (want,) = multiply(language, x, weight, cut=tiles(columns=128, **how))
    (got,) = multiply(language, x, weight, cut=tiles(columns=192, **how))
    np.testing.assert_array_equal(got, want)


@each_language
def test_linear_first_selects_output_columns(language: str) -> None:
    x, weight = normal(0, 3, 64), normal(1, 128, 64)
    (got,) = multiply(language, x, weight, first=96)
    (whole,) = multiply(language, x, weight)
    np.testing.assert_allclose(got, whole[:, 96:], rtol=1e-5, atol=1e-4)


@each_language
def test_linear_row_is_batch_invariant_across_tiles(language: str) -> None:
    x, weight, added = normal(0, 40, 192), normal(1, 256, 192), normal(2, 40, 256)
    want = multiply(language, x, weight, added=added, cut=tiles(rows=64, depth=64))
    cuts = [tiles(), tiles(columns=128), tiles(rows=32, swapped=False, depth=32)]
    if ON_GPU:  # the interpreter's products are numpy's, which follow the shape
        for cut in cuts:
            got = multiply(language, x[:1], weight, added=added[:1], cut=cut)
            for alone, among in zip(got, want, strict=True):
                np.testing.assert_array_equal(alone[0], among[0])
    sums = [multiply(language, x, weight, added=added, cut=cut)[1] for cut in cuts]
    for found in sums:
        np.testing.assert_allclose(found, want[1], rtol=1e-4)


ROWS = {
    "an embedding's": normal(0, 4, 300) * np.float32(1e-3),
    "of a wide channel": np.concatenate([normal(1, 4, 199), np.full((4, 1), 3e4, np.float32)], 1),
    "zeros": np.zeros((2, 64), np.float32),
    "all alike": np.full((2, 256), 1.9, np.float32),
}


@pytest.mark.parametrize("name", ROWS)
def test_sum_of_squares_order_independent_and_precise(name: str) -> None:
    exact = np.square(ROWS[name].astype(np.float64)).sum(axis=1)
    np.testing.assert_allclose(sum_of_squares(ROWS[name]), exact, rtol=2e-6)
    shuffled = np.random.default_rng(0).permuted(ROWS[name][:, :64], axis=1)
    np.testing.assert_array_equal(sum_of_squares(shuffled), sum_of_squares(ROWS[name][:, :64]))


@each_language
@pytest.mark.parametrize("name", ROWS)
def test_norm_and_squares_match_spec(name: str, language: str) -> None:
    x = ROWS[name]
    weight = 1 + normal(3, x.shape[1]) / 4
    run = {"pallas": in_pallas, "triton": in_triton}[language]
    module = KERNELS[language]["layers"]
    (squares,) = beside(language, x, None)
    np.testing.assert_array_equal(squares, chunks_of_squares(x))
    scaled, squares = beside(language, x, weight)
    np.testing.assert_array_equal(squares, chunks_of_squares(x))
    np.testing.assert_array_equal(scaled, x * weight)
    (got,) = run(
        lambda x, weight, **how: module.rms_norm(x, weight, EPS, **how), x, weight, order=SQUARES
    )
    np.testing.assert_allclose(got, spec_layers.rms_norm(x, weight, EPS), rtol=1e-5, atol=1e-7)
    (got,) = run(lambda x, **how: module.rms_norm(x, None, EPS, **how), x, order=SQUARES)
    np.testing.assert_allclose(got, spec_layers.rms_norm(x, None, EPS), rtol=1e-5, atol=1e-7)
    half = x.shape[1] // 2
    (got,) = run(lambda x, **how: module.rms_norm(x[:, half:], None, EPS, **how), x, order=SQUARES)
    want = spec_layers.rms_norm(x[:, half:], None, EPS)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
