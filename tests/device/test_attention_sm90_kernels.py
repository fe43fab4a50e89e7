"""Attention of many rows with WGMMA on Hopper: bitwise equal to `attention`, in both languages.

Gluon and Mosaic GPU have no interpreter, so the kernels run on a GPU only. Their expected results
are those of the kernels of `attention`, which have tests of their own.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch

from kernels.tiles import AttentionTiles
from shared.spec.attention import with_sliding_window
from tests.support.attention_layer_kernels import TILES, Found, How
from tests.support.cases.attention.attention_layer import MixCase, prompt_case
from tests.support.kernels import KERNELS
from tests.support.sm90_cases import (
    RUN,
    SIZES,
    assert_equal,
    assert_harmed,
    with_seen_pools,
)


def windowed_case(size: int, **how: object) -> MixCase:
    """A prompt with a sliding window."""
    case = prompt_case([(0, 700), (100, 190)], **how)
    return replace(case, rows=with_sliding_window(case.rows, size))


CASES: dict[str, Callable[..., MixCase]] = {
    "prompt": partial(prompt_case, [(0, 300)]),
    "chunks": partial(
        prompt_case,
        [(500, 700), (130, 137), (0, 16), (63, 65), (64, 192)],
        draft_from=(0, 64, 0, 20, 100),
        bucket=450,
    ),
    "spans": partial(prompt_case, [(4010, 4200), (2040, 2060), (0, 100)]),
    "sliding windows": partial(windowed_case, 150),
}
PAIRS = [(name, "model") for name in CASES]
PAIRS += [(name, "hybrid") for name in ("chunks", "spans")]
PAIRS += [("chunks", "group of seven, heads of 64"), ("chunks", "pages of two tiles")]
PAIRS += [("chunks", sizes) for sizes in SIZES if sizes.startswith(("hybrid, ", "s"))]


@pytest.fixture(params=KERNELS)
def language(request: pytest.FixtureRequest) -> str:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("kernels of a Hopper's matrix units")
    return request.param


@cache
def case_of(name: str, sizes: str) -> MixCase:
    """A case with pools that are NaN except at visible positions."""
    return with_seen_pools(CASES[name](**SIZES[sizes]))


def tiles_of(language: str, case: MixCase, **changes: int) -> AttentionTiles:
    """Returns the tile config of the table with some changes."""
    sizes = {"item_bytes": 2, "rows": case.max_rows * case.group}
    tiles = TILES[language].attention.of(**sizes, head_size=case.heads.head_size)
    return replace(tiles, **changes)


@cache
def today(language: str, name: str, sizes: str) -> Found:
    """Returns the result of `attention`."""
    case = case_of(name, sizes)
    return RUN[language](case, How(False, tiles=tiles_of(language, case, described=0)))


def described(language: str, case: MixCase, stages: int = 2) -> Found:
    return RUN[language](case, How(False, tiles=tiles_of(language, case, described=stages)))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "sizes"), PAIRS)
def test_attention_sm90_bitwise_equal(name: str, sizes: str, language: str) -> None:
    got = described(language, case_of(name, sizes))
    assert_equal(got, today(language, name, sizes))
    np.testing.assert_array_equal(got.out, today("triton", name, sizes).out)


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [1, 3])
def test_attention_sm90_bits_independent_of_stages(stages: int, language: str) -> None:
    got = described(language, case_of("spans", "model"), stages)
    assert_equal(got, today(language, "spans", "model"))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", ["model", "hybrid"])
@pytest.mark.parametrize("row", [3, 30, 250])
def test_attention_sm90_nan_reaches_only_visible_rows(row: int, sizes: str, language: str) -> None:
    case = case_of("prompt", sizes)
    qkv = case.qkv.copy()
    qkv[row, -1] = np.nan  # the row's new value
    got = described(language, replace(case, qkv=qkv))
    spoiled = case.rows.is_real & (np.arange(len(qkv)) >= row)
    assert_harmed(got, today(language, "prompt", sizes), spoiled)
