"""Operations of GDN and Mamba2 layers: their kernels are lowered for a GPU and bound there."""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_impl.ops.recurrent.recurrent_layer
import torch_impl.ops.recurrent.recurrent_layer
from kernels.gdn_tiles import MOST_TREE_GROUPS
from shared.models.mixers import RecurrentConfig
from shared.spec.recurrent_state import WINDOW
from tests.support.cases.gdn.recurrent_layer import MODEL, NEMOTRON, TABLE
from tests.support.gdn_layer_kernels import APART, CUT, HOW, KERNEL_OF, MIX
from tests.support.kernels import KERNELS, bind_kernels
from tests.support.op_case import OpCase, as_list
from tests.support.op_sides import SIDES

pytestmark = pytest.mark.usefixtures("interpreted")

# The order of sums differs, and each exp2 errs by some 1e-7.
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}
each_case = pytest.mark.parametrize("case", [x for x in TABLE if not x.is_large], ids=str)


def shapes(sizes: RecurrentConfig, N: int, has_fields: bool) -> dict:
    """Returns the shapes of a model's layers, as arguments of `verify`."""
    L, B, (H, K, V), C, has_delta = 3, 2, sizes.state_shape, sizes.channels, sizes.has_delta
    of = jax.ShapeDtypeStruct
    half, single, ints = (partial(of, dtype=x) for x in (jnp.bfloat16, jnp.float32, jnp.int32))
    fields = ((H, K), (H, V), (H,), *[(H,)] * has_delta) if has_fields else ()
    return {
        "projected": half((B * N, C + H * V + (1 + has_delta) * H)),
        "conv": half((C, 4)),
        "conv_bias": None if has_delta else half((C,)),
        **{name: single((H,)) for name in ("a_log", "dt_bias")},
        "skip": None if has_delta else single((H,)),
        "norm": single((V,)) if has_delta else None,
        "recurrent": single((L, 4, H, K, V)),
        "window": half((L, 4, WINDOW, C)),
        **{"layer": ints((1,)), "slots": ints((B,)), "row_starts": ints((B + 1,))},
        "kept": [*(single((L, B, N, *shape)) for shape in fields), half((L, B, N, C))],
        "arrivals": ints((B, H, MOST_TREE_GROUPS)),
    }


LOWERED = ((4, 4), (6, 6), (16, 6))


@pytest.mark.parametrize(
    ("N", "W"),
    [(1, 1), *(pytest.param(N, W, marks=pytest.mark.matrix) for N, W in LOWERED), (64, 4)],
)
@pytest.mark.parametrize("sizes", [MODEL, NEMOTRON], ids=["GDN", "Mamba2"])
def test_pallas_gdn_layer_lowers_for_gpu(sizes: RecurrentConfig, N: int, W: int) -> None:
    # The interpreter accepts operations and sizes that the lowering rejects.
    kernels, (given, ints) = KERNEL_OF["pallas"], (shapes(sizes, N, N > 1), jnp.int32)
    tree = jax.ShapeDtypeStruct((2, N), ints)
    rows = dict.fromkeys(("slots", "counts", "save_after", "save"), given["slots"])
    states = {name: given[name] for name in ("recurrent", "window")}
    saved = {f"saved_{name}": x for name, x in states.items()}
    path = {"path": jax.ShapeDtypeStruct((2, W), ints), "kept": given["kept"]}
    programs = [(kernels["commit"], HOW, states | saved | rows | path, 1)]
    for parents, (tiles, launches) in product((None, tree)[: 1 + (N > 1)], ((CUT, 1), (APART, 2))):
        arrays = given | {"parents": parents}
        programs.append((kernels["verify"], MIX | {"tiles": tiles}, arrays, launches))
    for kernel, how, arrays, launches in programs:
        program = jax.jit(partial(kernel, **how)).trace(**arrays)
        lowered = program.lower(lowering_platforms=("cuda",)).as_text()
        assert lowered.count("__gpu$xla.gpu.triton") == launches


def test_gdn_layer_kernels_same_signature() -> None:
    for kernel in ("verify", "commit"):
        names = [list(inspect.signature(own[kernel]).parameters) for own in KERNEL_OF.values()]
        assert all([n for n in own if n != "interpret"] == names[0][:-1] for own in names)


def bound(monkeypatch: pytest.MonkeyPatch, language: str, case: OpCase) -> tuple[Callable, list]:
    """Returns the operation with its kernels bound, as on a GPU, and its arguments."""
    impl = {"pallas": jax_impl, "triton": torch_impl}[language]
    bind_kernels(monkeypatch, impl.ops, KERNELS[language])
    ops = impl.ops.recurrent.recurrent_layer
    kernel, plain = (getattr(ops, f"{kind}_{case.function}") for kind in ("kernel", "plain"))
    side = SIDES[{"pallas": "jax", "triton": "torch"}[language]]()
    operation = partial(kernel, impl.ops.KERNELS)
    if language == "pallas":
        operation = impl.ops.kernel_or_reference(kernel, plain)
    return operation, side.placed(case, case.arguments(0))


@each_case
def test_jax_gdn_layer_kernel_lowered_for_gpu_only(case: OpCase, monkeypatch) -> None:
    operation, (first, *others) = bound(monkeypatch, "pallas", case)
    traced = jax.jit(lambda first: operation(first, *others)).trace(first)
    launched = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("xla.gpu.triton")
        for platform in ("cpu", "cuda")
    }
    # The tiles of some cases prepare rows in a launch of its own.
    is_apart = case.function != "commit" and not case.arguments(0)["sizes"].has_delta
    assert launched == {"cpu": 0, "cuda": 1 + is_apart}


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@each_case
def test_torch_gdn_layer_kernel_matches_spec(case: OpCase, monkeypatch) -> None:
    operation, placed = bound(monkeypatch, "triton", case)
    found = operation(*placed)
    got = [np.asarray(x.cpu()) for x in as_list(found)]
    if case.function == "commit":  # slot 0 receives unused results
        wanted = case.specified(case.arguments(0), None)
        pairs = [(x[:, 1:], y[:, 1:]) for x, y in zip(got, wanted, strict=True)]
    else:
        wanted = case.specified(case.arguments(0), np.arange(len(got[0])))
        pairs = list(zip(got, wanted, strict=True))
    for x, y in pairs:
        np.testing.assert_allclose(x, y, **FLOAT32)
