"""Attention layer with WGMMA on Hopper: bitwise equal to `attention_layer`, in both languages.

Gluon and Mosaic GPU have no interpreter, so the kernels run on a GPU only. Their expected results
are those of the kernels of `attention_layer`, which have tests of their own.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch

from kernels.tiles import DecodeAttentionTiles
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

DESCRIBED = DecodeAttentionTiles(
    lanes=32,
    programs=4,
    splits=8,
    ones=64,
    placed=True,
    described=True,
    warps=4,
    stages=2,
    registers=0,
)
CASES: dict[str, Callable[..., MixCase]] = {
    "blocks": partial(
        prompt_case, [(500, 516), (130, 139), (0, 1), (65, 65), (2040, 2056)], bucket=16
    ),
    "chains": partial(
        prompt_case, [(500, 516), (130, 137), (0, 16), (700, 701)], draft_from=(0, 64, 0, 650)
    ),
    "blocks of pairs": partial(prompt_case, [(200, 240), (70, 103), (129, 132)], bucket=40),
    "full attention from an offset": partial(
        prompt_case, [(500, 516), (130, 139), (300, 316)], draft_from=(100, 64, 290)
    ),
    "spans": partial(prompt_case, [(5000, 5016), (2047, 2052), (4096, 4112)]),
}
PAIRS = [(name, "model") for name in CASES]
PAIRS += [(name, "hybrid") for name in ("blocks", "spans")]
PAIRS += [("blocks", "group of seven, heads of 64"), ("chains", "pages of two tiles")]
PAIRS += [("blocks", sizes) for sizes in SIZES if sizes.startswith("hybrid, ")]
PAIRS += [(name, "sinks") for name in ("blocks", "spans")]
PAIRS += [(name, "shared KV") for name in ("blocks", "spans")] + [("blocks", "shared KV, hybrid")]


@pytest.fixture(params=KERNELS)
def language(request: pytest.FixtureRequest) -> str:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("kernels of a Hopper's matrix units")
    return request.param


@cache
def case_of(name: str, sizes: str) -> MixCase:
    """A case with pools that are NaN except at visible positions."""
    return with_seen_pools(CASES[name](**SIZES[sizes]))


@cache
def today(language: str, name: str, sizes: str) -> Found:
    """Returns the result of `attention_layer` for queries after RoPE."""
    case = case_of(name, sizes)
    table = {"item_bytes": 2, "rows": case.max_rows * case.group, "requests": 8, "nodes": 0}
    tiles = TILES[language].attention_layer.of(**table, head_size=case.heads.head_size)
    return RUN[language](case, How(True, tiles=replace(tiles, placed=True, described=False)))


def assert_mixed(got: Found, want: Found) -> None:
    assert_equal(got, want)
    assert not np.asarray(got.arrivals).any()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "sizes"), PAIRS)
def test_attention_layer_sm90_bitwise_equal(name: str, sizes: str, language: str) -> None:
    got = RUN[language](case_of(name, sizes), How(True, tiles=DESCRIBED))
    assert_mixed(got, today(language, name, sizes))
    np.testing.assert_array_equal(got.out, today("triton", name, sizes).out)


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [{"programs": 1}, {"programs": 2}, {"stages": 1}], ids=str)
def test_attention_layer_sm90_bits_independent_of_tile_config(
    cut: dict[str, int], language: str
) -> None:
    got = RUN[language](case_of("spans", "model"), How(True, tiles=replace(DESCRIBED, **cut)))
    assert_mixed(got, today(language, "spans", "model"))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_attention_layer_sm90_nan_reaches_only_visible_rows(bad: float, language: str) -> None:
    case, node = case_of("blocks", "model"), 3
    qkv = case.qkv.copy()
    qkv[node, -1] = bad  # the new value of a row of the first request
    got = RUN[language](replace(case, qkv=qkv), How(True, tiles=DESCRIBED))
    spoiled = (case.rows.positions >= case.rows.positions[node]) & (case.rows.request == 0)
    assert 1 <= spoiled.sum() < 16
    assert_harmed(got, today(language, "blocks", "model"), spoiled)
