"""Kernels of a MoE block: on a GPU, or interpreted.

The bits of a row depend neither on other rows nor on the algorithm, and are equal in both
languages. Interpreted sums have the order of numpy's and XLA's products; effects of matrix units
show on a GPU only.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from kernels.tiles import MEASURED, Tiles
from shared.models.activation import GELU_TANH, RELU2, SWIGLU_OAI, Activation
from tests.support.experts_kernels import (
    HALF,
    Case,
    Found,
    block_of,
    check_equal,
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
