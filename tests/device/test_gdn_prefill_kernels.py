"""Kernels of chunked GDN prefill: on a GPU, or interpreted."""

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_impl.ops.recurrent.recurrent_layer
import torch_impl.ops.recurrent.recurrent_layer
from kernels.gdn_tiles import GDNPrefillTiles
from shared.models.mixers import RecurrentConfig
from shared.spec import gated_delta
from shared.spec.reduction_order import SQUARES
from tests.support.cases.gdn.gdn_prefill import TABLE
from tests.support.cases.gdn.recurrent_layer import FALCON_H1, MODEL, NEMOTRON, SMALL
from tests.support.gdn_layer_kernels import EPS, LAYER, MAMBA2, SHARED_KEYS
from tests.support.gdn_prefill_kernels import (
    CASES,
    STATES,
    TILES,
    Case,
    Found,
    alone,
    feed,
    found,
    kernel_of,
    specified,
)
from tests.support.kernels import (
    KERNELS,
    ON_GPU,
    bind_kernels,
    in_languages,
    in_pallas,
    share_arithmetic,
)
from tests.support.op_case import OpCase, as_list
from tests.support.op_sides import SIDES

pytestmark = pytest.mark.usefixtures("interpreted")

# Of a head's outputs: queries, their reach and the result have 8 bits each. Half of the last is
# 0.2 % of a number; of a row whose terms cancel each other, which the norm then makes as long as
# any, it is more.
OUTPUT = 1e-2
# Of a state: 16 bits count of what it is made of, of its error some more where keys are alike.
STATE = 4e-4
HOW = {"eps": EPS, "digits": SQUARES.digits, "tiles": TILES}
each_language = pytest.mark.parametrize("language", KERNELS)
# Interpreted, Pallas compiles a shape for ten seconds, and it is held against Triton bit by bit.
a_language = pytest.mark.parametrize("language", [x for x in KERNELS if ON_GPU or x != "pallas"])
both_languages = pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")


def assert_close(got: np.ndarray, want: np.ndarray, bound: float) -> None:
    """Holds the length of the difference of each matrix against its length."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    got, want = (np.nan_to_num(x).astype(np.float64) for x in (got, want))
    length = np.linalg.norm(want, axis=(-2, -1))
    assert (np.linalg.norm(got - want, axis=(-2, -1)) <= bound * length).all()


def assert_equal(got: Found, want: Found) -> None:
    for field in fields(Found):
        mine, other = (getattr(each, field.name) for each in (got, want))
        np.testing.assert_array_equal(mine, other, err_msg=field.name)


def heads_of(case: Case, out: np.ndarray, request: int) -> np.ndarray:
    """A request's outputs as [H, T, V]."""
    own = out[case.rows(request)]
    heads = case.sizes.state_shape[::2]
    return np.moveaxis(own.reshape(len(own), *heads), 1, 0)


# Of Pallas: several requests, and one that forgets.
COMPILED = ("ragged", "strong decay", "Mamba2, ragged")
RAGGED = pytest.mark.parametrize("name", ["ragged", "Mamba2, ragged"])


@pytest.mark.parametrize(("language", "name"), in_languages(CASES, COMPILED))
def test_gdn_prefill_matches_spec(name: str, language: str) -> None:
    case, got, want = CASES[name], found(language, name), specified(CASES[name])
    for request in range(len(case.lengths)):
        assert_close(*(heads_of(case, x.out, request) for x in (got, want)), OUTPUT)
    assert not got.out[case.row_starts[-1] :].any()
    assert_close(got.recurrent, want.recurrent, STATE)
    assert_close(got.saved_recurrent, want.saved_recurrent, STATE)
    np.testing.assert_array_equal(got.window, want.window)
    np.testing.assert_array_equal(got.saved_window, want.saved_window)


@each_language
def test_gdn_prefill_precise_after_strong_decay(language: str) -> None:
    """The sum of a chunk's log decays is not lost in that of one token, as in a float32 it is."""
    case = CASES["ragged"]
    projected = case.projected.copy()
    projected[[5, 75], -case.sizes.num_value_heads :] = 3e4
    weights = {name: getattr(case.weights, name).astype(np.float64) for name in case.weight_names}
    exact = replace(
        case,
        projected=projected.astype(np.float64),
        weights=replace(case.weights, **weights),
        recurrent=case.recurrent.astype(np.float64),
        window=case.window.astype(np.float64),
    )
    got = feed(language, replace(case, projected=projected))
    assert_close(got.recurrent, specified(exact).recurrent, STATE)


@RAGGED
@each_language
def test_gdn_prefill_empty_request_preserves_and_saves_state(name: str, language: str) -> None:
    case, got = CASES[name], found(language, name)
    (slot,) = case.slots[case.lengths == 0]
    (save,) = case.save[case.lengths == 0]
    for state in ("recurrent", "window"):
        before, after, saved = (
            getattr(case, state),
            getattr(got, state),
            getattr(got, f"saved_{state}"),
        )
        np.testing.assert_array_equal(after[:, slot], before[:, slot])
        np.testing.assert_array_equal(saved[LAYER, save], before[LAYER, slot])


@RAGGED
@each_language
def test_gdn_prefill_request_is_batch_invariant(name: str, language: str) -> None:
    case, together = CASES[name], found(language, name)
    request = 3
    got, slot = feed(language, alone(case, request)), case.slots[request]
    outputs = got.out[: case.lengths[request]]
    np.testing.assert_array_equal(outputs, together.out[case.rows(request)])
    for state in ("recurrent", "window"):
        mine, other = getattr(got, state), getattr(together, state)
        np.testing.assert_array_equal(mine[LAYER, slot], other[LAYER, slot])


@RAGGED
@each_language
def test_gdn_prefill_chunks_of_64_bitwise_equal(name: str, language: str) -> None:
    case, whole = CASES[name], found(language, name)
    request = 3
    slot, outputs = case.slots[request], []
    for rows in (slice(0, 64), slice(64, 130)):
        got = feed(language, alone(case, request, rows))
        outputs.append(got.out[: rows.stop - rows.start])
        case = replace(case, recurrent=got.recurrent, window=got.window)
    np.testing.assert_array_equal(np.concatenate(outputs), whole.out[case.rows(request)])
    for state in ("recurrent", "window"):
        mine, other = getattr(case, state), getattr(whole, state)
        np.testing.assert_array_equal(mine[LAYER, slot], other[LAYER, slot])


@RAGGED
@each_language
def test_gdn_prefill_snapshot_equals_state_of_shorter_prompt(name: str, language: str) -> None:
    case, got = CASES[name], found(language, name)
    slot, save = case.slots[0], case.save[0]
    cut = feed(language, alone(case, 0, slice(case.save_after[0])))
    np.testing.assert_array_equal(got.saved_recurrent[LAYER, save], cut.recurrent[LAYER, slot])
    np.testing.assert_array_equal(got.saved_window[LAYER, save], cut.window[LAYER, slot])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@RAGGED
@each_language
def test_gdn_prefill_nan_request_preserves_other_requests(name: str, language: str) -> None:
    case, want = CASES[name], found(language, name)
    rows, slot, save = case.rows(0), case.slots[0], case.save[0]
    projected, recurrent, window = case.projected.copy(), case.recurrent.copy(), case.window.copy()
    projected[rows] = np.nan
    recurrent[LAYER, slot] = window[LAYER, slot] = np.nan
    got = feed(language, replace(case, projected=projected, recurrent=recurrent, window=window))
    assert np.isnan(got.out[rows]).all()
    assert np.isnan(got.saved_recurrent[LAYER, save]).all()
    np.testing.assert_array_equal(got.out[rows.stop :], want.out[rows.stop :])
    for state, place in zip(STATES, (slot, slot, save, save), strict=True):
        mine, other = getattr(got, state), getattr(want, state)
        others = np.delete(np.arange(mine.shape[1]), place)
        np.testing.assert_array_equal(mine[:, others], other[:, others])


@a_language
@pytest.mark.parametrize("name", ["unshared keys", "Mamba2, ragged"])
def test_gdn_prefill_bits_independent_of_tile_config(name: str, language: str) -> None:
    tiles = GDNPrefillTiles(columns=16, warps=8, stages=3, prepare_warps=8, rows=16, row_warps=1)
    assert_equal(feed(language, CASES[name], tiles), found(language, name))


@both_languages
@pytest.mark.parametrize("name", in_pallas(["ragged", *COMPILED[1:]], COMPILED[1:]))
def test_gdn_prefill_kernels_bitwise_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    share_arithmetic(monkeypatch)
    assert_equal(*(feed(language, CASES[name]) for language in KERNELS))


def shapes(lengths: tuple[int, ...], sizes: RecurrentConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a model's layers, as arguments of `prefill`."""
    (H, K, V), C, has_delta = sizes.state_shape, sizes.channels, sizes.has_delta
    L, B, of = 3, len(lengths), jax.ShapeDtypeStruct
    half, single, ints = (partial(of, dtype=x) for x in (jnp.bfloat16, jnp.float32, jnp.int32))
    states = {"recurrent": single((L, 4, H, K, V)), "window": half((L, 4, 3, C))}
    return {
        "projected": half((sum(lengths), C + H * V + (1 + has_delta) * H)),
        "conv": half((C, 4)),
        **{name: single((H,)) for name in ("a_log", "dt_bias")},
        **(
            {"norm": single((V,))} if has_delta else {"conv_bias": half((C,)), "skip": single((H,))}
        ),
        **states,
        **{f"saved_{name}": x for name, x in states.items()},
        **{"layer": ints((1,)), "row_starts": ints((B + 1,))},
        **dict.fromkeys(("slots", "save_after", "save"), ints((B,))),
    }


SIZES = (MODEL, SMALL, SHARED_KEYS, NEMOTRON, FALCON_H1, MAMBA2)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("lengths", [(1,), (2048,), (100, 3, 64)], ids=str)
def test_pallas_gdn_prefill_lowers_for_gpu(
    lengths: tuple[int, ...], sizes: RecurrentConfig
) -> None:
    # The interpreter accepts operations and sizes that the lowering rejects.
    kernel = partial(kernel_of("pallas", sizes.has_delta), tiles=TILES)
    program = jax.jit(kernel).trace(**shapes(lengths, sizes))
    lowered = program.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("__gpu$xla.gpu.triton") == 3 + sizes.has_delta


def test_gdn_prefill_kernels_same_signature_and_chunk() -> None:
    modules = [each["gdn_prefill"] for each in KERNELS.values()]
    for kernels in (modules, [each["mamba2_prefill"] for each in KERNELS.values()]):
        names = [list(inspect.signature(module.prefill).parameters) for module in kernels]
        assert all([n for n in own if n != "interpret"] == names[0][:-1] for own in names)
    assert all(module.CHUNK == gated_delta.CHUNK for module in modules)


@both_languages
def test_gdn_prefill_rejects_noncontiguous_states() -> None:
    case = CASES["unshared keys"]
    given = {k: torch.tensor(x) for k, x in case.arrays().items()}
    given["recurrent"] = given["recurrent"].mT
    with pytest.raises(ValueError, match="must be contiguous"):
        KERNELS["triton"]["gdn_prefill"].prefill(layer=LAYER, **given, **HOW)


def bound(monkeypatch: pytest.MonkeyPatch, language: str, case: OpCase) -> tuple[Callable, list]:
    """Returns the operation with its kernels bound, as on a GPU, and its arguments."""
    impl = {"pallas": jax_impl, "triton": torch_impl}[language]
    bind_kernels(monkeypatch, impl.ops, KERNELS[language])
    ops = impl.ops.recurrent.recurrent_layer
    side = SIDES[{"pallas": "jax", "triton": "torch"}[language]]()
    operation = partial(ops.kernel_prefill, impl.ops.KERNELS)
    if language == "pallas":
        takes = impl.ops.is_bfloat16
        operation = impl.ops.kernel_or_reference(ops.kernel_prefill, ops.plain_prefill, takes=takes)
    return operation, side.placed(case, case.arguments(0))


def launches(operation: Callable, first: jax.Array, others: list, platform: str) -> int:
    """Kernels of the program for a platform."""
    traced = jax.jit(lambda first: operation(first, *others)).trace(first)
    lowered = traced.lower(lowering_platforms=(platform,)).as_text()
    return lowered.count("__gpu$xla.gpu.triton")


SMALL_CASES = [case for case in TABLE if not case.is_large]


@pytest.mark.parametrize("case", SMALL_CASES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_jax_gdn_prefill_kernel_requires_gpu_and_bfloat16(
    dtype: str, case: OpCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation, (first, *others) = bound(monkeypatch, "pallas", replace(case, dtype=dtype))
    found = {x: launches(operation, first, others, x) for x in ("cpu", "cuda")}
    count = 3 + case.arguments(0)["sizes"].has_delta
    assert found == {"cpu": 0, "cuda": count if dtype == "bfloat16" else 0}


@both_languages
@pytest.mark.parametrize("case", SMALL_CASES, ids=str)
def test_torch_gdn_prefill_kernel_matches_spec(
    case: OpCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(case, dtype="bfloat16")
    operation, placed = bound(monkeypatch, "triton", case)
    got = [x.float().cpu().numpy() for x in as_list(operation(*placed))]
    assert case.errors(case.arguments(0), got)[0] < 1e-2  # two roundings to 8 bits, and more
