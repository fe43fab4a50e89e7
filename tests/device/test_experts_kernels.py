"""Kernels of a MoE block: on a GPU, or interpreted.

The bits of a row depend neither on other rows nor on the algorithm, and are equal in both
languages. Interpreted sums have the order of numpy's and XLA's products; effects of matrix units
show on a GPU only.
"""

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.tiles import MEASURED, ExpertsTiles, Tiles
from shared.models.activation import GELU_TANH, RELU2, SWIGLU_OAI, Activation
from shared.models.formats import four_bit
from shared.models.formats.weight_format import SCALES, VALUES
from shared.spec.reduction_order import SQUARES
from tests.support.experts_kernels import (
    HALF,
    Case,
    Found,
    block_of,
    reference,
    routing,
    run,
    run_ranks,
    tiles,
)
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, in_languages, share_arithmetic

pytestmark = pytest.mark.usefixtures("interpreted")
each_language = pytest.mark.parametrize("language", KERNELS)
each_way = pytest.mark.parametrize("grouped", [False, True], ids=["slots", "groups"])
on_a_gpu = pytest.mark.skipif(not ON_GPU, reason="the tiles of a GPU are too large to interpret")

GATED = {"is_shared": True, "is_gated": True}
SIGMOID = {"is_sigmoid": True, "is_shared": True, "factor": 2.5}
GROUPS = {"groups": 4, "top_groups": 2}
SMALL = {
    "a shared expert with a gate": Case(3, 96, 48, routing(10, 3, **GATED)),
    "no shared expert, rows over": Case(19, 80, 16, routing(6, 2)),
    "shares of all": Case(5, 64, 32, routing(9, 3, is_renormalised=False)),
    "sigmoids with a bias": Case(5, 64, 32, routing(12, 4, **SIGMOID), is_biased=True),
    "sigmoids in groups": Case(7, 64, 32, routing(12, 4, **GROUPS, **SIGMOID), is_biased=True),
    "FP8": Case(4, 128, 128, routing(5, 2, **GATED), quantized="FP8"),
    "FP8 by channels": Case(3, 256, 128, routing(3, 1), quantized="FP8 by channels"),
    "FP8, float32 scales": Case(3, 256, 128, routing(3, 1), quantized="FP8 by channels in float32"),
    "AWQ": Case(2, 256, 256, routing(3, 1), quantized="AWQ"),
    "MXFP4": Case(2, 256, 256, routing(3, 1), quantized="MXFP4"),
    "biases, clamped": Case(
        5, 64, 32, routing(6, 2), activation=Activation(SWIGLU_OAI, 1.702, 0.5), has_biases=True
    ),
    "GELU": Case(3, 64, 32, routing(6, 2), activation=Activation(GELU_TANH)),
    "no gate": Case(5, 64, 40, routing(6, 2), activation=Activation(RELU2), has_biases=True),
    "no gate, FP8": Case(2, 128, 128, routing(4, 2), activation=Activation(RELU2), quantized="FP8"),
    "parallel to an MLP": Case(
        5, 64, 32, routing(6, 3), activation=Activation(GELU_TANH), is_parallel=True
    ),
    "latents": Case(5, 64, 32, routing(6, 2), activation=Activation(RELU2), is_latent=True),
    "residual multiplier": Case(5, 64, 32, routing(6, 2, output_factor=0.22, **GATED)),
    "the next norm's scale elsewhere": Case(2, 64, 32, routing(4, 1), is_scaled=False),
}
LARGE = {
    "of 512, FP8": Case(40, 2048, 512, routing(20, 8, **GATED), quantized="FP8"),
    "of 512, FP8 by channels": Case(
        40, 2048, 512, routing(20, 8, **GATED), quantized="FP8 by channels"
    ),
    "of 512": Case(40, 2048, 512, routing(20, 8, **GATED)),
    "of 768, FP8": Case(150, 2048, 768, routing(12, 8), quantized="FP8"),
    "of 768, INT4": Case(150, 2048, 768, routing(12, 8), quantized="INT4"),
    "of 704, INT4": Case(
        40,
        2816,
        704,
        routing(12, 8),
        activation=Activation(GELU_TANH),
        quantized="INT4 in groups of 32",
    ),
    "of 1856, FP8": Case(
        40, 2688, 1856, routing(12, 6), activation=Activation(RELU2), quantized="FP8"
    ),
    "of 1856, FP8, float32 scales": Case(
        40, 2688, 1856, routing(12, 6), "FP8 by channels in float32", activation=Activation(RELU2)
    ),
    "of 2880, MXFP4": Case(40, 2880, 2880, routing(12, 4), quantized="MXFP4"),
    "of 768": Case(150, 2048, 768, routing(12, 8)),
}
BITS = {
    "latents, residual multiplier": Case(
        2, 64, 32, routing(4, 2, output_factor=0.22), activation=Activation(RELU2), is_latent=True
    ),
    "softmax": Case(2, 64, 32, routing(4, 2, **GATED)),
    "partial blocks, float32 scales": Case(
        2, 160, 144, routing(3, 1), quantized="FP8 by channels in float32"
    ),
    "sigmoids in FP8": Case(2, 128, 128, routing(3, 1, is_sigmoid=True), quantized="FP8"),
}
"""Interpreted, a program that fuses nothing is compiled for seconds."""
CASES = SMALL | (LARGE if ON_GPU else {})
# Interpreted, all is float32; on a GPU, values between the products and rows are bfloat16.
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2} if ON_GPU else {"rtol": 1e-4, "atol": 1e-4}


def check_equal(one: Found, other: Found, count: int | None = None) -> None:
    for name, x, y in zip(Found._fields, one, other, strict=True):
        np.testing.assert_array_equal(x[:count], y[:count], err_msg=name)


def check_same(language: str, one: Found, other: Found) -> None:
    """The same bits; interpreted, XLA adds a product in an order of its own."""
    if language == "triton" or not INTERPRET:
        return check_equal(one, other)
    for name, x, y in zip(Found._fields, one, other, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=name)


PADDED = {
    "MXFP4, rows without the last inputs": Case(3, 160, 96, routing(3, 1), quantized="MXFP4"),
    "INT4, partial blocks": Case(3, 160, 224, routing(3, 1), quantized="INT4 in groups of 32"),
    "FP8, partial blocks": Case(3, 160, 208, routing(3, 1), quantized="FP8"),
    "FP8, partial blocks, no gate": Case(
        3, 192, 208, routing(3, 1), activation=Activation(RELU2), quantized="FP8"
    ),
    "FP8, partial blocks, float32 scales": Case(
        2, 160, 208, routing(3, 1), quantized="FP8 by channels in float32"
    ),
}
"""Weights with a last block that rows do not fill."""
OTHER_STEPS = ("MXFP4, rows without the last inputs",)
"""Cases in which the steps of packed and of dequantised weights have different lengths."""
WAYS = [(name, grouped) for name in CASES | PADDED for grouped in (False, True)]
# Of Pallas: routers of both kinds, rows over, and weights in FP8, each in one way; a test below
# compares the ways.
COMPILED = [
    ("a shared expert with a gate", False),
    ("no shared expert, rows over", True),
    ("sigmoids in groups", True),
    ("biases, clamped", False),
    ("FP8", False),
    ("FP8, partial blocks", True),
]


@pytest.mark.parametrize(("language", "way"), in_languages(WAYS, COMPILED), ids=str)
def test_experts_block_matches_spec(way: tuple[str, bool], language: str) -> None:
    name, grouped = way
    case = (CASES | PADDED)[name]
    want, got = (
        reference(case),
        run(language, case, cut=tiles(grouped=grouped)),
    )
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_allclose(got.weights, want.weights, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got.rows, want.rows, **TOLERANCE)
    np.testing.assert_allclose(got.scaled, want.scaled, **TOLERANCE)
    np.testing.assert_allclose(got.squares, want.squares, rtol=4 * TOLERANCE["rtol"])


@each_language
@pytest.mark.parametrize("grouped", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_experts_ranks_concatenate_to_single_rank(grouped: bool, language: str) -> None:
    """Each has a share of every expert's inner columns, and of the columns of the stream."""
    case = Case(3, 128, 64, routing(5, 2, **GATED))
    cut = tiles(grouped=grouped)
    want, shares = run(language, case, cut=cut), run_ranks(language, case, 2, cut=cut)
    for name in ("rows", "scaled", "squares"):
        got = np.concatenate([getattr(share, name) for share in shares], axis=1)
        if language == "triton" or not INTERPRET:
            np.testing.assert_array_equal(got, getattr(want, name), err_msg=name)
        else:  # as in `check_same`
            np.testing.assert_allclose(got, getattr(want, name), rtol=1e-5, err_msg=name)


@pytest.fixture
def one_arithmetic(monkeypatch) -> None:
    share_arithmetic(monkeypatch)


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize("name", BITS | CASES if ON_GPU else BITS)
def test_experts_kernels_bitwise_equal(name: str, one_arithmetic) -> None:
    case = (BITS | CASES)[name]
    for grouped in (False, True) if ON_GPU else (case.is_packed,):
        cut = tiles(grouped=grouped)
        ours, theirs = (run(each, case, cut=cut, is_as_written=True) for each in KERNELS)
        check_equal(ours, theirs)


@each_language
@pytest.mark.parametrize("name", ["a shared expert with a gate", "FP8", *(LARGE if ON_GPU else {})])
def test_experts_row_bits_independent_of_batch_and_tiles(name: str, language: str) -> None:
    case = CASES[name]
    cut = tiles()
    want = run(language, case, cut=cut)
    for changed in ({"grouped": True}, {"swapped": False}):
        check_same(language, run(language, case, cut=replace(cut, **changed)), want)
    alone = run(language, case, cut=cut, rows=[1])
    check_same(language, alone, Found(*(x[1:2] for x in want)))


@pytest.mark.parametrize(
    ("language", "name"),
    in_languages(
        [
            name
            for name, case in (CASES | PADDED).items()
            if case.is_packed and (ON_GPU or name not in OTHER_STEPS)
        ],
        ["FP8", "FP8, partial blocks, float32 scales"],
    ),
)
def test_experts_packed_weights_dequantised_bitwise_equal(name: str, language: str) -> None:
    """Interpreted, a sum is rounded once a step, and the steps are as long."""
    case = (CASES | PADDED)[name]
    block = block_of(case)
    wide = {"gate_up": block.gate_up.astype(HALF), "down": block.down.astype(HALF)}
    wide |= {"gate_up_scales": None, "down_scales": None}
    want = run(language, case, cut=tiles(), changed={"stored": wide})
    check_same(language, run(language, case, cut=tiles()), want)


@each_language
@each_way
def test_experts_ignores_padding_rows(grouped: bool, language: str) -> None:
    case = SMALL["no shared expert, rows over"]
    cut = tiles(grouped=grouped)
    want = run(language, case, cut=cut)
    for live in (0, 7, 17):
        block = block_of(case)
        changed = {name: getattr(block, name).copy() for name in ("rows", "scaled", "squares")}
        for x in changed.values():
            x[live:] = np.nan
        got = run(language, case, cut=cut, live=live, changed=changed)
        assert (got.ids[live:] == -1).all()
        check_equal(got, want, live)


@each_language
@each_way
def test_experts_nan_row_spoils_only_itself(grouped: bool, language: str) -> None:
    case = SMALL["a shared expert with a gate"]
    cut, block = tiles(grouped=grouped), block_of(case)
    changed = {name: getattr(block, name).copy() for name in ("rows", "scaled", "squares")}
    for x in changed.values():
        x[1] = np.nan
    got, want = run(language, case, cut=cut, changed=changed), run(language, case, cut=cut)
    others = [0, 2]
    check_equal(Found(*(x[others] for x in got)), Found(*(x[others] for x in want)))
    assert (np.diff(got.ids[1]) > 0).all()
    assert got.ids[1].min() >= 0
    assert got.ids[1].max() <= case.routing.experts
    assert np.isnan(got.weights[1, :-1]).all()
    assert np.isnan(got.rows[1]).all()


@each_language
def test_router_ties_choose_lower_expert_ids(language: str) -> None:
    case = SMALL["no shared expert, rows over"]
    router = np.zeros_like(block_of(case).router)
    router[1] = -1
    for sign, want in ((1, [0, 2]), (-1, [0, 1])):
        scaled = np.full_like(block_of(case).scaled, sign)
        changed = {"router": router, "scaled": scaled}
        got = run(language, case, cut=tiles(), rows=[0], changed=changed)
        assert got.ids[0].tolist() == want


@on_a_gpu
@each_language
@pytest.mark.parametrize("name", LARGE)
def test_experts_bits_independent_of_tuned_tiles(name: str, language: str) -> None:
    case = LARGE[name]
    want = run(language, case, cut=tiles())
    lines = Tiles.load(f"{language}_gpu", MEASURED).experts.lines
    for line in lines:
        if line.at_most.get("item_bytes") == math.ceil(case.format.item_bytes):
            check_equal(run(language, case, cut=line.tiles), want)


COPIED = {
    "MXFP4": LARGE["of 2880, MXFP4"],
    "MXFP4, clamped, biases": LARGE["of 2880, MXFP4"]._replace(
        activation=Activation(SWIGLU_OAI, 1.702, 7.0), has_biases=True
    ),
    "MXFP4, blocks of 256": Case(40, 2048, 768, routing(12, 4), quantized="MXFP4"),
    "MXFP4, partial blocks of 256": Case(40, 2880, 1440, routing(12, 4), quantized="MXFP4"),
    "MXFP4, partial blocks of 256, whole lines": Case(
        40, 2880, 1472, routing(12, 4), quantized="MXFP4"
    ),
    "INT4": LARGE["of 768, INT4"],
    "INT4 in groups of 32": LARGE["of 704, INT4"],
    "FP8": LARGE["of 512, FP8"],
    "FP8 by channels": LARGE["of 512, FP8 by channels"],
    "FP8, no gate, scales of outputs": LARGE["of 1856, FP8"],
    "FP8, no gate, float32 scales, biases": LARGE["of 1856, FP8, float32 scales"]._replace(
        has_biases=True
    ),
    "FP8, partial blocks": Case(40, 160, 208, routing(12, 4), quantized="FP8"),
    "FP8, partial blocks, whole lines": LARGE["of 704, INT4"]._replace(
        quantized="FP8", has_biases=True
    ),
}
DEEP = {"depth": 512, "down_depth": 512}
SHALLOW = {"depth": 128, "down_depth": 128, "stages": 5, "down_stages": 5}
NARROW = {"depth": 512, "down_depth": 256, "stages": 2, "columns": 16, "down_columns": 32}
WIDE = {"columns": 64, "warps": 4, "down_warps": 2}
CALLS = [
    (1, 0, {}),
    (3, 0, DEEP),
    (3, 0, NARROW),
    (4, 0, SHALLOW),
    (7, 8, {}),
    (8, 16, DEEP),
    (40, 8, DEEP),
    (40, 16, {}),
    (40, 16, NARROW),
    (40, 8, WIDE),
    (40, 32, {}),
]
"""Rows, slots of a tile of expert blocks or 0 without them, and changed tiles."""


def copied(slots: int, changed: dict[str, int]) -> ExpertsTiles:
    how = {"depth": 256, "down_depth": 256, "stages": 3, "down_stages": 3} | changed
    how |= {"copies_packed": True, "slots": slots or 16}
    return tiles(grouped=slots > 0, **how)


def is_copied_in_pallas(case: Case, changed: dict[str, int]) -> bool:
    sizes, depth = (case.hidden, case.inner), changed.get("depth", 256)
    is_whole = all(size % 64 == 0 for size in sizes)
    if case.quantized == "MXFP4":
        is_whole &= all(depth % four_bit.block_of(size) == 0 for size in sizes)
    return case.quantized in ("MXFP4", "FP8") and case.activation.is_gated and is_whole


@on_a_gpu
@each_language
@pytest.mark.parametrize(("rows", "slots", "changed"), CALLS)
@pytest.mark.parametrize("name", COPIED)
def test_experts_packed_sm90_bitwise_equal(
    name: str, rows: int, slots: int, changed: dict[str, int], language: str
) -> None:
    """The results of kernels that copy packed weights by TMA, and of those that do not."""
    case = COPIED[name]
    is_copied = is_copied_in_pallas(case, changed) and changed not in (NARROW, WIDE)
    if language == "pallas" and not is_copied:
        pytest.skip("unsupported in Pallas")
    module = KERNELS[language]["experts"].experts_packed_sm90
    cut = tiles(grouped=slots > 0)
    launch = "linear" if language == "pallas" else "launch_down"
    with patch.object(module, launch, wraps=getattr(module, launch)) as ran:
        got = run(language, case, cut=copied(slots, changed), rows=list(range(rows)))
    assert ran.called
    check_equal(got, run(language, case, cut=cut, rows=list(range(rows))))


@on_a_gpu
@each_language
@each_way
@pytest.mark.parametrize("name", ["MXFP4", "FP8"])
def test_experts_packed_sm90_nan_row_spoils_only_itself(
    name: str, grouped: bool, language: str
) -> None:
    case = COPIED[name]
    cut = tiles(grouped=grouped, copies_packed=True, depth=256, down_depth=256)
    block, nan = block_of(case), {}
    for field in ("rows", "scaled", "squares"):
        nan[field] = getattr(block, field).copy()
        nan[field][1] = np.nan
    got = run(language, case, cut=cut, rows=[0, 1, 2], changed=nan)
    want = run(language, case, cut=cut, rows=[0, 1, 2])
    assert np.isnan(got.rows[1]).all()
    check_equal(Found(*(x[[0, 2]] for x in got)), Found(*(x[[0, 2]] for x in want)))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"top": 9}, "top must be from 1 to 8, got 9"),
        ({"groups": 3}, "groups of equal size, two or more each, got 8 experts and 3 groups"),
        ({"groups": 8}, "groups of equal size, two or more each, got 8 experts and 8 groups"),
        (
            {"groups": 4, "top_groups": 1, "top": 3},
            "top_groups must be at most 4 and have 3 experts or more, got 1",
        ),
        ({"is_gated": True}, "is_gated requires is_shared"),
    ],
)
def test_routing_rejects_invalid_values(changed: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        routing(**{"experts": 8, "top": 2} | changed)


@pytest.mark.parametrize(
    ("rows", "slots", "changed"), [call for call in CALLS if call[2] not in (SHALLOW, WIDE)]
)
@pytest.mark.parametrize("name", COPIED)
def test_pallas_experts_packed_sm90_takes_whole_lines(
    name: str, rows: int, slots: int, changed: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, case = KERNELS["pallas"]["experts"].experts_packed_sm90, COPIED[name]
    monkeypatch.setattr(module, "has_mosaic", lambda: True)

    def stored(outputs: int, inputs: int) -> Any:
        shape = (1, 12, outputs, four_bit.padded(inputs))
        planes = (case.format.planes(shape)[name] for name in (VALUES, SCALES))
        words, scales = (jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in planes)
        return module.ExpertWeights(words, scales, None)

    found = module.takes(
        jax.ShapeDtypeStruct((rows, case.hidden), jnp.bfloat16),
        stored(2 * case.inner, case.hidden),
        stored(case.hidden, case.inner),
        formats=(case.format.name,) * 2,
        squares=jax.ShapeDtypeStruct((rows, case.hidden // SQUARES.chunk), jnp.float32),
        activation=case.activation,
        is_adapted=False,
        tiles=copied(slots, changed),
    )
    assert found == is_copied_in_pallas(case, changed)
