"""Kernels of the n-gram table: on a GPU, or interpreted."""

from typing import Any

import jax
import numpy as np
import pytest

import torch_impl.ops
import torch_impl.ops.trees.ngram
from tests.support.cases.trees.ngram import TABLE
from tests.support.implementations import to_jax, to_torch
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, OPTIONS, bind_kernels, in_languages
from tests.support.op_case import Arguments, arrays_of

pytestmark = pytest.mark.usefixtures("interpreted")

CASES = {str(case): case for case in TABLE if ON_GPU or not case.is_large}
COMPILED = [name for name in CASES if "n 150" in name or "B 9" in name]


def in_order(arguments: Arguments) -> list[Any]:
    """A table as its fields, and the other arguments."""
    return [*arrays_of(arguments["table"]), *list(arguments.values())[1:]]


def run_pallas(function: str, arguments: Arguments) -> list[np.ndarray]:
    given = in_order(arguments)
    arrays, sizes = (
        [x for x in given if not isinstance(x, int)],
        [x for x in given if isinstance(x, int)],
    )
    kernel = getattr(KERNELS["pallas"]["ngram"], function)
    call = jax.jit(lambda *arrays: kernel(*arrays, *sizes, interpret=INTERPRET))
    options: Any = OPTIONS
    placed = [to_jax(x) for x in arrays]
    return [np.asarray(x) for x in call.lower(*placed).compile(options)(*placed)]


def run_triton(function: str, arguments: Arguments) -> list[np.ndarray]:
    device = "cuda" if ON_GPU else "cpu"
    given: list[Any] = [
        x if isinstance(x, int) else to_torch(x).to(device) for x in in_order(arguments)
    ]
    found = getattr(KERNELS["triton"]["ngram"], function)(*given)
    return [x.cpu().numpy() for x in (given[:4] if found is None else found)]


@pytest.mark.parametrize(("language", "name"), in_languages(CASES, COMPILED))
def test_ngram_kernels_match_spec(language: str, name: str) -> None:
    case = CASES[name]
    arguments = case.arguments(0)
    run = {"pallas": run_pallas, "triton": run_triton}[language]
    wanted = case.specified(arguments, None)
    for got, want in zip(run(case.function, arguments), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_torch_ngram_kernels_match_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    if "triton" not in KERNELS:
        pytest.skip("triton is not installed")
    bind_kernels(monkeypatch, torch_impl.ops, KERNELS["triton"])
    ops, device = torch_impl.ops.trees.ngram, "cuda" if ON_GPU else "cpu"
    for name, sizes in (("insert", "n 1,"), ("draft", "B 5,")):
        case = next(case for case in TABLE if case.function == name and sizes in case.name)
        arguments = case.arguments(0)
        table, *given = arguments.values()
        held = ops.NgramTable(*(to_torch(x).to(device) for x in arrays_of(table)))
        placed = [x if isinstance(x, int) else to_torch(x).to(device) for x in given]
        found = getattr(ops, f"kernel_{name}")(torch_impl.ops.KERNELS, held, *placed)
        results = arrays_of(held if found is None else found)
        for got, want in zip(results, case.specified(arguments, None), strict=True):
            np.testing.assert_array_equal(got.cpu().numpy(), want)


def test_jax_ngram_insert_updates_table_in_place() -> None:
    """A copy of the table would take longer than a step."""
    arguments = CASES[COMPILED[0]].arguments(0)
    kernel = KERNELS["pallas"]["ngram"].insert
    placed = [to_jax(x) for x in in_order(arguments)]
    lowered = jax.jit(kernel, donate_argnums=range(4)).trace(*placed)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("operand_index") == 4
