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
from tests.support.cases.attention.attention_layer import MixCase, prompt_case, tree_case
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
    "trees": partial(tree_case, [16, 9, 1, 0, 16], [500, 130, 0, 65, 2040], nodes=16, columns=34),
    "chains": partial(
        prompt_case, [(500, 516), (130, 137), (0, 16), (700, 701)], draft_from=(0, 64, 0, 650)
    ),
    "blocks of pairs": partial(tree_case, [40, 33, 3], [200, 70, 129], nodes=40, columns=8),
    "full attention from an offset": partial(
        tree_case, [16, 9, 16], [500, 130, 300], nodes=16, columns=10, draft_from=(100, 64, 290)
    ),
    "spans": partial(tree_case, [16, 5, 16], [5000, 2047, 4096], nodes=16, columns=80),
}
PAIRS = [(name, "model") for name in CASES]
PAIRS += [(name, "hybrid") for name in ("trees", "spans")]
PAIRS += [("trees", "group of seven, heads of 64"), ("chains", "pages of two tiles")]
PAIRS += [("trees", sizes) for sizes in SIZES if sizes.startswith("hybrid, ")]
PAIRS += [(name, "sinks") for name in ("trees", "spans")]
PAIRS += [(name, "shared KV") for name in ("trees", "spans")] + [("trees", "shared KV, hybrid")]


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
    table = {"item_bytes": 2, "rows": case.max_rows * case.group, "requests": 8}
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
    case, node = case_of("trees", "model"), 3
    qkv = case.qkv.copy()
    qkv[node, -1] = bad  # the new value of a node of the first request
    got = RUN[language](replace(case, qkv=qkv), How(True, tiles=DESCRIBED))
    spoiled = case.rows.window[:, node] & (case.rows.request == 0)
    assert 1 <= spoiled.sum() < 16
    assert_harmed(got, today(language, "trees", "model"), spoiled)
