"""LM-head epilogue and the choice from its partial results, against the choice from full logits."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_impl.ops.sampling.sampling
import torch_impl.ops.sampling.sampling
from kernels.tiles import LinearTiles, SamplingTiles
from shared.models.formats.weight_format import PLAIN
from shared.spec import lm_head as spec
from shared.spec.gumbel_noise import TARGET_STREAM
from shared.spec.reduction_order import SQUARES
from shared.spec.sampling import DRAFT_TAU, Sampling, TokenCounts, choose
from tests.support.cases.sampling.lm_head import greedy_arguments, ranked_arguments
from tests.support.cases.sampling.sampling import asked, f32, i32
from tests.support.implementations import to_jax, to_torch
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, OPTIONS, in_languages
from tests.support.linear_kernels import normal, tiles
from tests.support.op_case import OpCase
from tests.support.op_records import mapped
from tests.support.op_sides import SIDES, Operation, Side

pytestmark = pytest.mark.usefixtures("interpreted")

R, K, VOCAB = 20, 128, 301
# Four programs of a row look at five tiles.
TILES = SamplingTiles(
    groups=1,
    warps=4,
    programs=1,
    row_programs=2,
    at_once=2,
    row_warps=4,
    sampled=64,
    listed=64,
)
CUTS = {
    ("pallas", "swapped"): tiles(),
    ("triton", "swapped"): tiles(),
    ("triton", "described"): tiles(swapped=False, described=True, persistent=True),
}
CUTS = {key: cut for key, cut in CUTS.items() if key[0] in KERNELS}


def of_requests() -> Sampling:
    """Eight requests: three without options, and one for each option that needs logits."""
    bias = np.zeros((8, 2), np.float32)
    bias[3, 1] = 2
    return asked(
        8,
        VOCAB,
        temperature=f32(0, 0, 0, 0, 0.8, 1, 0, 0),
        top_p=f32(0.5, 1, 1, 1, 1, 0.7, 1, 1),
        presence=f32(0, 0, 0, 0, 0, 0, 0.5, 0),
        min_length=i32(0, 0, 0, 0, 0, 0, 0, 40),
        bias_ids=np.tile(i32(2, 7), (8, 1)),
        bias_values=bias,
    )


def case() -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Rows, an LM head and sampling parameters; the last block of rows needs no logits."""
    rng = np.random.default_rng(7)
    x, weight = normal(0, R, K), normal(1, VOCAB, K) / 8
    weight[[9, 200]] = 3 * weight[3]  # the best of some rows, in two blocks; ties go by id
    x[1] = weight[3] * 8
    x[2, 5] = np.nan
    x[17, 5], weight[70, 5] = np.inf, 0.5
    x[18] = 0
    request = np.concatenate([i32(1, 1, 2), rng.permutation(8), i32(3, 0, 7, 6, 4, 0, 1, 2, 1)])
    path = np.zeros((R, 0), np.int32)
    given = {
        "seen": TokenCounts(
            rng.integers(0, 3, (8, VOCAB)).astype(np.int32), request, path, path > 0
        ),
        "positions": np.arange(30, 30 + R, dtype=np.int32),
        "sampling": of_requests(),
        "request": request.astype(np.int32),
    }
    return x, weight, given


def in_torch(x: np.ndarray, weight: np.ndarray, cut: LinearTiles, given: dict[str, Any]) -> Any:
    """Flags of rows that need logits, full logits, the stored logits, and the choice from them."""
    device, kernels = "cuda" if ON_GPU else "cpu", SimpleNamespace(**KERNELS["triton"])

    def leaf(x: Any) -> Any:
        return to_torch(x).to(device) if isinstance(x, np.ndarray) else x

    given = {k: mapped(v, leaf, torch_impl.ops.sampling.sampling) for k, v in given.items()}
    rows, head = (torch.from_numpy(a).to(device).bfloat16() for a in (x, weight))
    how = {"format": PLAIN, "out_type": torch.float32, "order": SQUARES, "tiles": cut}
    asks = kernels.lm_head_epilogue.row_outputs(**given, num_tokens=VOCAB)
    whole, *_ = kernels.linear.product(rows, head, None, **how)
    stored, _, _, left = kernels.linear.product(rows, head, None, asks=asks, **how)
    stored = torch.where(asks.asks[:, None] > 0, stored, torch.nan)
    how = {"allowed": None, "stream": TARGET_STREAM, "tiles": TILES, "leaves": left}
    found = asks.asks, whole, stored, *kernels.sampling.choose(stored, **given, **how)
    return [y.cpu().numpy() for y in found]


def in_jax(x: np.ndarray, weight: np.ndarray, cut: LinearTiles, given: dict[str, Any]) -> Any:
    """Same as `in_torch`, for JAX."""
    kernels = SimpleNamespace(**KERNELS["pallas"])

    def run(x: Any, weight: Any, given: dict[str, Any]) -> Any:
        rows, stack = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)[None]
        how = {"format": PLAIN, "first": 0, "out_type": jnp.float32, "order": SQUARES, "tiles": cut}
        how |= {"norm_layer": jnp.int32(0), "interpret": INTERPRET}
        asks = kernels.lm_head_epilogue.row_outputs(**given, num_tokens=VOCAB)
        whole, *_ = kernels.linear.product(rows, stack, None, jnp.int32(0), **how)
        stored, _, _, left = kernels.linear.product(
            rows, stack, None, jnp.int32(0), asks=asks, **how
        )
        stored = jnp.where(asks.asks[:, None] > 0, stored, jnp.nan)
        how = {"allowed": None, "stream": TARGET_STREAM, "tiles": TILES, "leaves": left}
        how |= {"interpret": INTERPRET}
        return asks.asks, whole, stored, *kernels.sampling.choose(stored, **given, **how)

    given = {k: mapped(v, to_jax, jax_impl.ops.sampling.sampling) for k, v in given.items()}
    return [np.asarray(y) for y in jax.jit(run, compiler_options=OPTIONS)(x, weight, given)]


@pytest.mark.parametrize(("language", "cut"), CUTS, ids=str)
def test_lm_head_epilogue_choice_matches_full_logits(language: str, cut: str) -> None:
    x, weight, given = case()
    run = in_torch if language == "triton" else in_jax
    asks, whole, stored, ids, finite = run(x, weight, CUTS[language, cut], given)
    want = choose(whole, **given, allowed=None)
    of_rows = {name: given[name] for name in ("seen", "positions", "request")}
    np.testing.assert_array_equal(asks > 0, spec.needs_logits(params=given["sampling"], **of_rows))
    assert 0 < asks[:16].sum() < 16
    assert not asks[16:].any()
    np.testing.assert_array_equal(stored[asks > 0], whole[asks > 0])
    np.testing.assert_array_equal(ids, want.ids)
    np.testing.assert_array_equal(finite, want.is_finite)
    assert list(np.flatnonzero(~finite)) == [2, 17]
    assert ids[1] == 9  # of two equal ones in different blocks the first
    assert ids[18] == 0


def ranked_in_torch(arguments: dict[str, Any], width: int) -> Any:
    """Returns children from the epilogue's partial results, and from full logits."""
    device, kernels = "cuda" if ON_GPU else "cpu", SimpleNamespace(**KERNELS["triton"])

    def leaf(x: Any) -> Any:
        return to_torch(x).to(device) if isinstance(x, np.ndarray) else x

    given = {k: mapped(v, leaf, torch_impl.ops.sampling.sampling) for k, v in arguments.items()}
    rows, head = (given.pop(name).bfloat16() for name in ("x", "weight"))
    how = {
        "format": PLAIN,
        "out_type": torch.float32,
        "order": SQUARES,
        "tiles": CUTS["triton", "swapped"],
    }
    asks = asked_of_children(kernels, given, len(head), width)
    whole, *_ = kernels.linear.product(rows, head, None, **how)
    stored, _, _, left = kernels.linear.product(rows, head, None, asks=asks, **how)
    stored = torch.where(asks.asks[:, None] & 1 > 0, stored, torch.nan)
    found = children_of(kernels, given, width, {}, whole.view(B, -1, VOCAB), None)
    found += children_of(kernels, given, width, {}, stored.view(B, -1, VOCAB), left)
    return [y.cpu().numpy() for y in (asks.asks, *found)]


def ranked_in_jax(arguments: dict[str, Any], width: int) -> Any:
    """Same as `ranked_in_torch`, for JAX."""
    kernels = SimpleNamespace(**KERNELS["pallas"])

    def run(given: dict[str, Any]) -> Any:
        given = dict(given)
        rows, head = (given.pop(name).astype(jnp.bfloat16) for name in ("x", "weight"))
        how = {
            "format": PLAIN,
            "first": 0,
            "out_type": jnp.float32,
            "order": SQUARES,
            "interpret": INTERPRET,
        }
        how |= {"norm_layer": jnp.int32(0), "tiles": CUTS["pallas", "swapped"]}
        product = partial(kernels.linear.product, rows, head[None], None, jnp.int32(0), **how)
        asks = asked_of_children(kernels, given, len(head), width)
        (whole, *_), (stored, _, _, left) = product(), product(asks=asks)
        stored = jnp.where(asks.asks[:, None] & 1 > 0, stored, jnp.nan)
        how = {"interpret": INTERPRET}
        found = children_of(kernels, given, width, how, whole.reshape(B, -1, VOCAB), None)
        found += children_of(kernels, given, width, how, stored.reshape(B, -1, VOCAB), left)
        return asks.asks, *found

    given = {k: mapped(v, to_jax, jax_impl.ops.sampling.sampling) for k, v in arguments.items()}
    return [np.asarray(y) for y in jax.jit(run, compiler_options=OPTIONS)(given)]


B = 10
"""Requests: two need only their best tokens, and more do in greedy decoding."""


def asked_of_children(kernels: Any, given: dict[str, Any], outputs: int, width: int) -> Any:
    rows = (given["seen"], given["positions"], given["sampling"], given["positions"])
    how = {"num_tokens": outputs, "nodes": len(given["seen"].slots) // B, "width": width}
    return kernels.lm_head_epilogue.row_outputs(*rows, **how, is_warm_whole=True)


def children_of(
    kernels: Any, given: dict[str, Any], width: int, how: Any, logits: Any, left: Any
) -> list[Any]:
    named = given | {"logits": logits, "stream": TARGET_STREAM, "width": width}
    named |= {"is_sampled": False, "columns": None, "tau": DRAFT_TAU, "tiles": TILES}
    return list(kernels.sampling.rank(**named, leaves=left, **how)[:2])


@pytest.mark.parametrize(("language", "width"), in_languages([1, 3], ()))
def test_lm_head_epilogue_children_match_full_logits(language: str, width: int) -> None:
    """To the bit, weights too; rows that have no scores are chosen by their groups' best tokens."""
    arguments = ranked_arguments(5, B=B, k=2, K=K, N=VOCAB, width=width)
    made, params = arguments.pop("projection"), arguments.pop("params")
    weight = made.weight.values.copy()
    weight[[9, 200]] = 3 * weight[3]  # the best of some rows, in two blocks; ties go by id
    given = {name: arguments[name] for name in ("seen", "positions", "keys")}
    given |= {"x": made.rows.copy(), "weight": weight, "sampling": params}
    given["x"][17] = weight[3] * 8
    given["x"][18] = 0
    if width == 3:  # each node has its own position
        given |= {name: given[name][:, None] + np.int32([0, 1]) for name in ("positions", "keys")}
    run = ranked_in_torch if language == "triton" else ranked_in_jax
    asks, want_ids, want, ids, weights = run(given, width)
    assert set(asks) == {1, 2 if width == 1 else 3}
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(weights, want)
    assert ids[8, 1, 0] == 9
    assert list(ids[9, 0]) == list(range(width))


@pytest.mark.gpu
@pytest.mark.parametrize("R", [1, 8, 32, 128, 512])
def test_lm_head_fused_choose_bitwise_equal(R: int) -> None:
    """Rows without a need for logits are covered, and rows of which every ninth needs them."""
    found = []
    for is_mixed in (False, True):
        arguments = greedy_arguments(1, R=R, K=4096, N=151_936, temperature=0.0)
        if is_mixed:
            arguments["params"].temperature[::9] = 0.8
        case = OpCase(
            op="lm_head",
            function="fused_choose",
            name="head",
            make=lambda _, given=arguments: given,
            dtype="bfloat16",
            wide=("seen", "params"),
        )
        for side in (make() for make in SIDES.values()):
            placed = side.placed(case, case.arguments(0))
            joined = side.run(side.operation(case), placed)
            apart = side.run(Operation(choose_apart(side), ()), placed)
            found.append([*joined, *apart])
            side.release()
    for of_torch, of_jax in (found[:2], found[2:]):
        for ids, is_finite, want, want_finite in (of_torch, of_jax):
            np.testing.assert_array_equal(ids, want)
            np.testing.assert_array_equal(is_finite, want_finite)
        np.testing.assert_array_equal(of_torch[0], of_jax[0])


def choose_apart(side: Side) -> Callable[..., Any]:
    """The product with the head, and then the choice from its scores."""
    projection = import_module(f"{side.name}_impl.ops.sampling.lm_head")
    sampling = import_module(f"{side.name}_impl.ops.sampling.sampling")
    return lambda rows, *given: sampling.choose(projection.scores(rows), *given, None)
