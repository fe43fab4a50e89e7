"""Vocab-parallel sampling kernels: bitwise equal to the kernels of one rank.

The kernels are interpreted; `tests/device/test_all_gather_kernels.py` has whole steps on GPUs.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels.tile_tables import Line, Table
from kernels.tiles import MEASURED, SamplingTiles, Tiles
from shared.spec.gumbel_noise import TARGET_STREAM
from tests.support.cases.sampling.lm_head import mixed_arguments as head_arguments
from tests.support.cases.sampling.sampling import (
    drafted_arguments,
    mixed_arguments,
    ranked_arguments,
)
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU
from tests.support.vocab_shards import alone_and_on_ranks

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.skipif(ON_GPU, reason="ranks exchange on a GPU in test_ranks_kernels.py"),
]

VOCAB = 301
LANGUAGES = {"torch": "triton", "jax": "pallas"}
FRAMEWORKS = [name for name, language in LANGUAGES.items() if language in KERNELS]


def but(left_out: str) -> list[Any]:
    """The frameworks, one of them in the matrix alone: interpreted kernels take their time."""
    marks = {left_out: pytest.mark.matrix}
    return [pytest.param(name, marks=marks.get(name, ())) for name in FRAMEWORKS]


# Several tiles of a row, some of them of two ranks.
TILES = {"groups": 2, "programs": 2, "row_programs": 2, "at_once": 2, "sampled": 64, "listed": 64}
_ONE = threading.Lock()
"""Ranks of torch are threads here, and Triton's interpreter runs one program at a time."""


class _Module:
    """A module of kernels as `ops` calls it, interpreted where there is no GPU."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if not inspect.isfunction(found):
            return found
        takes = inspect.signature(found).parameters
        how = {"interpret": INTERPRET} if "interpret" in takes else {}

        def call(*given: Any, **named: Any) -> Any:
            with _ONE:
                return found(*given, **named, **how)

        return call


def kernels_of(framework: str) -> Any:
    """The kernels of a language with tiles of few tokens, and the measured ones of products."""
    language = LANGUAGES[framework]
    tiles = SamplingTiles(**TILES, warps=4, row_warps=4)
    measured = Tiles.load(f"{language}_gpu", MEASURED)
    tables = replace(measured, sampling=Table((Line(tiles=tiles, at_most={}),)))
    modules = {name: _Module(module) for name, module in KERNELS[language].items()}
    return SimpleNamespace(**modules, tiles=tables)


def compared(
    framework: str, ranks: int, work: Callable[..., Any], rows: list[np.ndarray], given: dict
) -> None:
    """Compares the results of ranks with those of one rank."""
    alone, every = alone_and_on_ranks(framework, ranks, work, VOCAB, rows, given)
    for of_rank in every:
        for got, want in zip(of_rank, alone, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.fixture(autouse=True)
def undefined_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rows that are not listed NaN, because they are not gathered.

    The fixture also lowers the number of tokens from which partial results are gathered.
    """
    for framework, arrays in (("torch", "torch"), ("jax", "jax.numpy")):
        tokens = import_module(f"{framework}_impl.ops.sampling.vocab_parallel")
        monkeypatch.setattr(tokens, "MOST_WHOLE_WORDS", 0)
        ranks, lib = (
            import_module(f"{framework}_impl.ops.collectives.all_gather"),
            import_module(arrays),
        )

        def listed_only(
            group: Any, values: Any, rows: Any, ranks: Any = ranks, lib: Any = lib
        ) -> Any:
            row = lib.arange(len(values))
            is_listed = (rows[:-1] == row[:, None]) & (row < rows[-1])
            every = ranks.all_gather(group, values)
            return lib.where(is_listed.any(1)[:, None], every, lib.nan)

        monkeypatch.setattr(ranks, "gathered_rows", listed_only)


@pytest.mark.parametrize("framework", but("torch"))
def test_vocab_parallel_choose_bitwise_equal(framework: str) -> None:
    """By four ranks, of which the third has few tokens and the last none."""
    given = mixed_arguments(3, vocab=VOCAB, is_masked=True)
    logits = given.pop("logits")
    logits[:, [70, 130, 299]] = logits[:, [5]]  # ties across parts go by id
    logits[0, 290] = np.nan
    logits[1, 70] = np.inf
    kernels = kernels_of(framework)

    def work(ops: Any, vocabulary: Any, parts: list, has: dict) -> Any:
        return ops("sampling").kernel_choose(kernels, parts[0], **has, vocabulary=vocabulary)

    compared(framework, 4, work, [logits], given)


@pytest.mark.parametrize("framework", but("jax"))
@pytest.mark.parametrize(
    "make", [pytest.param(ranked_arguments, marks=pytest.mark.matrix), drafted_arguments]
)
def test_vocab_parallel_rank_bitwise_equal(framework: str, make: Callable[..., Any]) -> None:
    """With filters and without; of a drafter with the target's tokens or its own."""
    given = make(3, vocab=VOCAB, stream=TARGET_STREAM)
    logits, kernels = given.pop("logits"), kernels_of(framework)
    logits[:, :, [70, 130]] = logits[:, :, [5]]
    size = logits.shape[-1]
    fixed = {name: given.pop(name) for name in ("stream", "width", "is_sampled")}

    def work(ops: Any, vocabulary: Any, parts: list, has: dict) -> Any:
        heads = type(vocabulary)(size, vocabulary.group)
        return ops("sampling").kernel_rank(kernels, parts[0], **has, **fixed, vocabulary=heads)

    compared(framework, 2, work, [logits], given)


@pytest.mark.parametrize("framework", but("jax"))
def test_vocab_parallel_lm_head_bitwise_equal(framework: str) -> None:
    """Rows with all sampling options, and rows that need only their best token."""
    given = head_arguments(5, K=128, N=VOCAB)
    made = given.pop("projection")
    head = made.weight.values.copy()
    head[[70, 130, 299]] = head[[5]] = 4 * head[[9]]
    rows, kernels = made.rows.copy(), kernels_of(framework)
    rows[15, 5] = np.nan

    def work(ops: Any, vocabulary: Any, parts: list, has: dict) -> Any:
        linear, projection = ops("linear"), ops("lm_head")
        x, weight = (narrow(framework, array) for array in (has["rows"], parts[0].T))
        asked = {name: value for name, value in has.items() if name != "rows"}
        projected = projection.Projection(x, linear.Matrix.plain(weight))
        return projection.kernel_fused_choose(kernels, projected, **asked, vocabulary=vocabulary)

    compared(framework, 4, work, [head.T], given | {"rows": rows})


def narrow(framework: str, x: Any) -> Any:
    """Numbers of bfloat16."""
    return x.bfloat16().contiguous() if framework == "torch" else x.astype("bfloat16")
