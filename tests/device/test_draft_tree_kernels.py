"""Kernels of draft trees: on a GPU, or interpreted."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import numpy as np
import pytest
import torch

import jax_impl.ops.attention.attention
import jax_impl.ops.trees.draft_tree
import torch_impl.ops.trees.draft_tree
from shared.spec import draft_tree as spec
from shared.spec.attention import tree_rows
from tests.support.cases.trees.draft_tree import (
    TABLE,
    chains_arguments,
    keep_arguments,
    level_arguments,
    parents_of,
)
from tests.support.implementations import to_jax, to_torch
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, OPTIONS, bind_kernels
from tests.support.op_case import Arguments, OpCase
from tests.support.op_records import mapped

pytestmark = pytest.mark.usefixtures("interpreted")

CASES = {str(case): case for case in TABLE if not case.is_large}
FUNCTIONS = ("ancestors", "next_level", "keep_best", "chains")
FIXED = ("nodes", "root_rows", "rows", "is_chain")


def flat(value: Any) -> list[Any]:
    """The arrays of a result or of an argument, and numbers; a record as its fields."""
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return [x for each in value for x in flat(each)] if isinstance(value, tuple) else [value]


def kernel_of(language: str, function: str) -> Callable[..., Any]:
    module = "flatten_tree" if function == "flat_nodes" else "draft_tree"
    return getattr(KERNELS[language][module], function)


def given(function: str, arguments: Arguments) -> dict[str, Any]:
    """A kernel's arguments by name: of a level, those of its fields that it reads."""
    names = inspect.signature(kernel_of("pallas", function)).parameters
    known = arguments | (vars(arguments["level"]) if "level" in arguments else {}) | arguments
    return {name: known[name] for name in names if name != "interpret"}


def run_pallas(function: str, arguments: Arguments) -> list[np.ndarray]:
    kernel = kernel_of("pallas", function)
    known = given(function, arguments)
    fixed = {name: known.pop(name) for name in FIXED if name in known}
    call = jax.jit(lambda given: kernel(**given, **fixed, interpret=INTERPRET))
    compiled = call.lower(known).compile(OPTIONS)
    return [np.asarray(x) for x in flat(compiled(known))]


def run_triton(function: str, arguments: Arguments) -> list[np.ndarray]:
    kernel, device = kernel_of("triton", function), "cuda" if ON_GPU else "cpu"
    known = given(function, arguments)
    placed = {
        name: torch.tensor(x, device=device) if isinstance(x, np.ndarray) else x
        for name, x in known.items()
    }
    return [x.cpu().numpy() for x in flat(kernel(**placed))]


@pytest.fixture(params=KERNELS)
def run(request: pytest.FixtureRequest) -> Callable[[str, Arguments], list[np.ndarray]]:
    return {"pallas": run_pallas, "triton": run_triton}[request.param]


def compare(case: OpCase, seed: int, run: Callable[[str, Arguments], list[np.ndarray]]) -> None:
    arguments = case.arguments(seed)
    wanted = flat(getattr(spec, case.function)(**arguments))
    for got, want in zip(run(case.function, arguments), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", CASES)
def test_draft_tree_kernels_match_spec(name: str, run) -> None:
    compare(CASES[name], 0, run)


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize(("B", "N", "rows"), [(1, 1, 1), (3, 1, 3), (4, 9, 40), (5, 4, 17)])
def test_flat_nodes_matches_spec(B: int, N: int, rows: int, is_chain: bool, run) -> None:
    rng = np.random.default_rng(B)
    arguments = parents_of(B, B=B, N=N) | {
        "num_nodes": rng.integers(1, min(N, rows // B) + 1, B).astype(np.int32),
        "lengths": rng.integers(0, 99, B).astype(np.int32),
        "rows": rows,
        "is_chain": is_chain,
    }
    if is_chain:
        chain = np.maximum(np.arange(N, dtype=np.int32) - 1, 0)
        arguments["parents"] = np.broadcast_to(chain, (B, N)).copy()
    table = np.zeros((B, 0), np.int32)
    sized = (arguments["num_nodes"], arguments["lengths"], table, rows)
    want, node = tree_rows(arguments["parents"], *sized)
    starts = np.concatenate([[0], np.cumsum(arguments["num_nodes"])])
    until, window = want.until, want.window
    if is_chain:  # a node attends to earlier positions
        until, window = np.where(want.is_real, want.places + 1, 0), window[:, :0]
    wanted = (starts, want.request, node, want.is_real, want.positions, want.places, until, window)
    for got, expected in zip(run("flat_nodes", arguments), wanted, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_keep_best_bounds_nodes_for_nan_weights(run) -> None:
    arguments = keep_arguments(3, B=3, C=21, N=9)
    arguments["weights"][:] = np.nan
    _, parents, num_nodes, _ = run("keep_best", arguments)
    drafts = np.where(arguments["has_relay"], np.clip(arguments["max_drafts"], 0, 8), 0)
    np.testing.assert_array_equal(num_nodes, 1 + drafts)
    assert (parents < np.maximum(np.arange(9), 1)).all()


MADE = {
    "ancestors": parents_of(0, B=2, N=16),
    "next_level": level_arguments(0, B=2, k=4, s=2, depth=5, root_rows=1),
    "keep_best": keep_arguments(0, B=2, C=68, N=16),
    "chains": chains_arguments(0, B=3, S=5),
}


ROWS = parents_of(0, B=2, N=16) | {
    "num_nodes": np.array([16, 3], np.int32),
    "lengths": np.array([7, 90], np.int32),
    "rows": 32,
}


@pytest.mark.parametrize(
    ("function", "made"),
    [
        *MADE.items(),
        ("flat_nodes", ROWS | {"is_chain": False}),
        ("flat_nodes", ROWS | {"is_chain": True}),
    ],
)
def test_jax_draft_tree_kernel_lowered_for_gpu_only(
    function: str, made: Arguments, monkeypatch
) -> None:
    bind_kernels(monkeypatch, jax_impl.ops, KERNELS["pallas"])
    of = "attention" if function == "flat_nodes" else "draft_tree"
    rooms = {"attention": jax_impl.ops.attention.attention}
    ops = rooms.get(of, jax_impl.ops.trees.draft_tree)
    bound = (getattr(ops, f"{kind}_{function}") for kind in ("kernel", "plain"))
    operation = jax_impl.ops.kernel_or_reference(*bound)
    made = {name: mapped(x, leaf=to_jax, module=ops) for name, x in made.items()}
    fixed = {name: made.pop(name) for name in FIXED if name in made}
    traced = jax.jit(lambda made: operation(**made, **fixed)).trace(made)
    launched = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("xla.gpu.triton")
        for platform in ("cpu", "cuda")
    }
    assert launched == {"cpu": 0, "cuda": 1}


@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_draft_tree_operation_matches_spec(function: str, framework: str, monkeypatch):
    language, ops, leaf = {
        "jax": ("pallas", jax_impl.ops.trees.draft_tree, to_jax),
        "torch": ("triton", torch_impl.ops.trees.draft_tree, _placed),
    }[framework]
    if language not in KERNELS:
        pytest.skip("triton is not installed")
    modules = KERNELS[language]
    if framework == "jax":
        monkeypatch.setattr(modules["draft_tree"], function, _interpreted(modules, function))
    package = jax_impl.ops if framework == "jax" else torch_impl.ops
    bind_kernels(monkeypatch, package, modules)
    made = [mapped(x, leaf=leaf, module=ops) for x in MADE[function].values()]
    want = flat(getattr(spec, function)(*MADE[function].values()))
    for got, wanted in zip(
        jax.tree.leaves(_as_tuples(getattr(ops, f"kernel_{function}")(package.KERNELS, *made))),
        want,
        strict=True,
    ):
        got = got.cpu() if isinstance(got, torch.Tensor) else got
        np.testing.assert_array_equal(np.asarray(got), wanted)


def _placed(value: Any) -> Any:
    """Converts like `to_torch`, onto the device of the kernels."""
    made = to_torch(value)
    return made.cuda() if ON_GPU and isinstance(made, torch.Tensor) else made


def _interpreted(modules: dict[str, Any], function: str) -> Callable[..., Any]:
    kernel = getattr(modules["draft_tree"], function)
    return lambda *args: kernel(*args, interpret=INTERPRET)


def _as_tuples(value: Any) -> Any:
    return tuple(flat(value))
