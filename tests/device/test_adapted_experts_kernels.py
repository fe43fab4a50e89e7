"""MoE kernels with LoRA adapters of routers and experts: on a GPU, or interpreted.

The bits of a row depend neither on other rows nor on their adapters, and are equal in both
languages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shared.spec import experts as spec
from shared.spec.reduction_order import SHRINK
from tests.support.adapted_experts import of_rows, run, with_broken, with_slots
from tests.support.cases.gemm.linear import QUANTIZED
from tests.support.cases.gemm.lora import adapted_experts
from tests.support.cases.moe.experts import GROUPS, LARGE, NO_GATE, SMALL
from tests.support.experts_kernels import tiles
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, in_languages, share_arithmetic

pytestmark = pytest.mark.usefixtures("interpreted")
MANY = pytest.mark.matrix if INTERPRET else ()
"""Mark of cases that are interpreted for long."""
LANGUAGE_ROWS = [
    pytest.param(language, rows, marks=MANY if language == "pallas" or rows > 100 else ())
    for language in KERNELS
    for rows in (1, 3, 20, 130, 512)
]

CASES: dict[str, dict[str, Any]] = {
    "shared expert with a gate": {"R": 7, "config": SMALL},
    "sigmoids in groups": {"R": 19, "config": GROUPS},
    "no gate, biases": {"R": 5, "config": replace(NO_GATE, has_bias=True)},
    "latents": {"R": 5, "config": replace(NO_GATE, latent=32, output_factor=0.22)},
    "two chunks of inputs": {"R": 3, "config": SMALL, "hidden": SHRINK.chunk + 64},
}
WAYS = [(name, grouped) for name in CASES for grouped in (False, True)]
BROKEN = 2
"""Adapter slot with huge weights, some of which are NaN."""


def given(num: int = 3, rank: int = 16, **how: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"hidden": 64} | how
    return adapted_experts(0, adapters=num, rank=rank, **sizes)


@pytest.mark.parametrize(
    ("language", "way"), in_languages(WAYS, [("shared expert with a gate", True)]), ids=str
)
def test_adapted_experts_match_spec(way: tuple[str, bool], language: str) -> None:
    name, grouped = way
    case = given(**CASES[name])
    got, want = run(language, case, tiles(grouped=grouped)), spec.added_experts(**case).rows
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)  # order of the sums
    slots = case["weights"].router.lora.slots
    plain = spec.added_experts(**with_slots(case, None)).rows
    assert np.abs(plain - want).max(axis=1)[slots > 0].min() > 0.1


@pytest.mark.parametrize("matrix", ["router", "gate_up", "down"])
def test_adapters_of_one_matrix_match_spec(matrix: str) -> None:
    """Each matrix has its own adapters, and the others may have none."""
    case = given(R=4, config=SMALL)
    bare = with_slots(case, None)["weights"]
    case["weights"] = replace(bare, **{matrix: getattr(case["weights"], matrix)})
    want, plain = (
        spec.added_experts(**case | {"weights": x}).rows for x in (case["weights"], bare)
    )
    language = "triton" if "triton" in KERNELS else "pallas"
    np.testing.assert_allclose(run(language, case, tiles()), want, rtol=1e-3, atol=1e-3)
    assert np.abs(plain - want).max() > 1e-2


@pytest.mark.parametrize(("language", "rows"), LANGUAGE_ROWS)
def test_adapted_expert_bits_independent_of_neighbours(
    rows: int, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours have a broken adapter; rows are alone, few or many."""
    share_arithmetic(monkeypatch)
    case = with_broken(given(R=rows, config=SMALL), BROKEN)
    slots = (np.arange(rows) + 1) % 4
    case, bare = with_slots(case, slots), with_slots(case, None)
    cut = tiles(grouped=rows > 3, slots=64 if rows > 128 else 16)
    many, without = run(language, case, cut), run(language, bare, cut)
    checked = [row for row in range(min(rows, 4)) if slots[row] != BROKEN]
    for row in checked:
        (alone,) = run(language, of_rows(case, slice(row, row + 1)), tiles())
        assert alone.tobytes() == many[row].tobytes()
        assert (alone.tobytes() == without[row].tobytes()) == (slots[row] == 0)
    plain = slots == 0
    assert many[plain].tobytes() == without[plain].tobytes()
    assert np.isnan(many[slots == BROKEN]).all()


@pytest.mark.parametrize(("language", "num"), in_languages([1, 8], []), ids=str)
def test_expert_rows_without_adapters_keep_bits(num: int, language: str) -> None:
    case = given(num, R=20, config=SMALL)
    none, bare = with_slots(case, np.zeros(20)), with_slots(case, None)
    cut = tiles(grouped=num == 8)
    assert run(language, none, cut).tobytes() == run(language, bare, cut).tobytes()


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize("grouped", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_adapted_experts_bitwise_equal_in_languages(
    grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_arithmetic(monkeypatch)
    case = given(rank=32, R=5, config=SMALL)
    dtype = "bfloat16" if ON_GPU else "float32"
    pallas, triton = (run(x, case, tiles(grouped=grouped), dtype) for x in ("pallas", "triton"))
    np.testing.assert_array_equal(triton, pallas)


@pytest.mark.parametrize(("language", "format"), in_languages(QUANTIZED, []), ids=str)
def test_adapted_packed_experts_match_spec(format: str, language: str) -> None:
    """The accumulation continues after the last block of a packed matrix."""
    config = replace(SMALL, num_experts=3, top_k=1, intermediate=128, shared_intermediate=128)
    case = given(R=5, hidden=256, config=config, quantized=QUANTIZED[format])
    got, want = run(language, case, tiles()), spec.added_experts(**case).rows
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)  # order of the sums
    bare = with_slots(case, None)
    base = case["weights"].router.lora.slots == 0
    np.testing.assert_array_equal(got[base], run(language, bare, tiles())[base])


@pytest.mark.skipif(INTERPRET or not ON_GPU, reason="of the tiles of a GPU")
@pytest.mark.parametrize(("num", "rank"), [(8, 16), (1, 64)])
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("counts", [(512, 40, 4, 1), (2048, 130)], ids=["few", "many"])
def test_adapted_experts_tuned_tiles_bitwise_equal(
    counts: tuple[int, ...], name: str, num: int, rank: int
) -> None:
    """Each row has the same bits in both languages, for 1 to 2048 rows, beside a broken adapter."""
    case, want = given(num, rank, R=counts[0], hidden=2048, config=LARGE[name]), None
    healthy = case["weights"].router.lora.slots != BROKEN
    for language in KERNELS:
        for rows in counts:
            got = run(language, of_rows(case, slice(rows)), dtype="bfloat16")
            if want is None:  # of whole adapters
                want, case = got, with_broken(case, BROKEN) if num >= BROKEN else case
            same = healthy[:rows]
            np.testing.assert_array_equal(
                got[same], want[:rows][same], err_msg=f"{language}, {rows} rows"
            )
