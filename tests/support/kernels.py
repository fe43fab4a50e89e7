"""The modules of kernels of both languages: on a GPU for real, elsewhere interpreted.

Triton decides at the import of a kernel whether it is interpreted, so its kernels are imported
here and nowhere else in the tests.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from jax import lax
from jax.experimental.pallas import triton as pltriton

from jax_impl.backend import compiler_options
from kernels.rooms import module_in
from kernels.tiles import MEASURED, Tiles
from tests.support.addresses import watch
from tests.support.op_case import changed
from tests.support.rounding import IS_ROUNDED_TWICE
from tests.support.triton_types import remember_types

ON_GPU = torch.cuda.is_available()
INTERPRET = jax.default_backend() == "cpu"
MODULES = (
    "acceptance",
    "best_prefixes",
    "encoder_attention",
    "attention",
    "convolution",
    "gdn_commit",
    "gdn_prefill",
    "gdn_layer",
    "mamba2_output",
    "mamba2_prefill",
    "draft_tree",
    "experts",
    "head_product",
    "flatten_tree",
    "dequantize",
    "fp8_activations",
    "moe_align",
    "qk_norm_rope_kv_write",
    "latent_rows",
    "layers",
    "lm_head_epilogue",
    "linear",
    "lora",
    "attention_layer",
    "latent_attention",
    "ngram",
    "gumbel_noise",
    "int4_w4a16",
    "mxfp4_w4a16",
    "row_bounds",
    "rejection",
    "router",
    "sampling",
    "slot_state",
    "verify_budget",
    "vocab_parallel",
    "kv_compaction",
)
# An interpreted Pallas kernel is compiled once a shape and hardly runs, so it is compiled quickly.
OPTIONS = compiler_options(jax.devices()[0], quick_compile=True)
# For kernels of which bits are compared: a product and a sum, fused, may be rounded once in one
# program and twice in another, which a GPU's compiler does not do. Without the instruction for it
# (`tests.support.rounding`) a processor rounds twice. Without fusions, which is the alternative,
# XLA compiles three times as long.
AS_ROUNDED = OPTIONS
if not IS_ROUNDED_TWICE:
    AS_ROUNDED = {"xla_backend_optimization_level": 0, "xla_disable_hlo_passes": "fusion"}
AS_ROUNDED = AS_ROUNDED if INTERPRET else {}
# Two sums, one of the other's results, may be made one in an order of its own, and a number that is
# rounded to bfloat16 may keep its digits; no GPU's do.
AS_WRITTEN = AS_ROUNDED and AS_ROUNDED | {
    "xla_disable_hlo_passes": "algsimp" if IS_ROUNDED_TWICE else "fusion,algsimp",
    "xla_allow_excess_precision": False,
}


def in_pallas(names: Iterable[Any], compiled: Container[Any]) -> list:
    """The names; those of cases that Pallas has in the matrix alone are marked.

    XLA compiles an interpreted kernel for seconds, while Triton's interpreter compiles nothing, and
    the kernels of both are the same. On a GPU every case runs by default.
    """
    left = pytest.mark.matrix if INTERPRET else ()
    return [pytest.param(name, marks=() if name in compiled else left) for name in names]


def in_languages(names: Iterable[Any], compiled: Container[Any]) -> list:
    """Each language with each name, of Pallas as `in_pallas` has them."""
    by_name = zip(names, in_pallas(names, compiled), strict=True)
    chosen = [(name, pallas.marks) for name, pallas in by_name]
    return [
        pytest.param(language, name, marks=marks if language == "pallas" else ())
        for language in KERNELS
        for name, marks in chosen
    ]


@contextmanager
def triton_interpreter() -> Iterator[None]:
    """Without a GPU, Triton is imported and run as its interpreter, in a test alone."""
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            patch.setenv("TRITON_INTERPRET", "1")
            interpreter = importlib.import_module("triton.runtime.interpreter")
            patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
            # It computes whether sums of integers overflow, and drops the result.
            options = interpreter.interpreter_builder.options
            assert not options.debug
            silent = replace(options, sanitize_overflow=False)
            patch.setattr(interpreter.interpreter_builder, "options", silent)
            patch.setattr(interpreter, "_convert_float", _rounding(interpreter._convert_float))
            patch.setattr(interpreter.InterpretedFunction, "__call__", _call)
            patch.setattr(interpreter, "_get_np_dtype", _numpy_type(interpreter._get_np_dtype))
            remember_types(patch)
            watch(patch)
        yield


def bind_kernels(monkeypatch, ops: ModuleType, modules: dict[str, Any], **mix: object) -> None:
    """Gives the ops of a backend these kernels, as where there is a GPU.

    Args:
      mix: Fields of the tiles of `mix` that are not as measured.
    """
    tiles = Tiles.load("pallas_gpu", MEASURED)
    kernels = {field.name: modules.get(field.name) for field in fields(ops.Kernels)}
    kernels |= {"tiles": changed(tiles, "attention_layer", mix)}
    monkeypatch.setattr(ops, "KERNELS", ops.Kernels(**kernels))


def share_arithmetic(patch: pytest.MonkeyPatch) -> None:
    """Interpreted, the hardware functions of a GPU are equal in both languages.

    Functions are XLA's, products of matrices sums in the order of the numbers.
    """
    if not INTERPRET:
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    for name, function in (("exp2", jnp.exp2), ("rsqrt", lax.rsqrt)):
        program = jax.jit(function, compiler_options=AS_WRITTEN)

        def call(_: object, x: Any, program: Callable[..., Any] = program) -> Any:
            return type(x)(np.asarray(program(x.data)), x.dtype.scalar)

        patch.setattr(interpreter.InterpreterBuilder, f"create_{name}", call)
    patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot_in_order)
    patch.setattr(pltriton, "dot", _jax_dot_in_order)


def _dot(_: object, a: Any, b: Any, d: Any, *how: object) -> Any:
    """A product with a fixed order of sums per row, independent of other rows, like a matrix unit.

    The interpreter's own, of numpy in float32, does not.
    """
    product = np.matmul(_numbers(a).astype(np.float64), _numbers(b).astype(np.float64))
    return type(d)((product.astype(np.float32) + d.data).astype(d.data.dtype), d.dtype.scalar)


def _dot_in_order(_: object, a: Any, b: Any, d: Any, *how: object) -> Any:
    x, y, total = _numbers(a), _numbers(b), np.zeros_like(d.data)
    for i in range(x.shape[1]):
        total = total + x[:, i, None].astype(np.float32) * y[i].astype(np.float32)
    return type(d)(total + d.data, d.dtype.scalar)


def _jax_dot_in_order(a: jax.Array, b: jax.Array, **how: object) -> jax.Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        column = lax.dynamic_slice_in_dim(a, i, 1, axis=1)
        return total + column * lax.dynamic_slice_in_dim(b, i, 1, axis=0)

    zeros = jnp.zeros((a.shape[0], b.shape[1]), jnp.float32)
    return lax.fori_loop(0, a.shape[1], add, zeros)


def _numbers(x: Any) -> Any:
    """Returns the numbers of an interpreter's array, which stores bfloat16 as integers."""
    return x.data.view(ml_dtypes.bfloat16) if x.dtype.scalar.is_bf16() else x.data


def _rounding(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Rounds to bfloat16, which the interpreter cuts off to."""

    def converted(x: Any, before: Any, after: Any, mode: Any) -> Any:
        if before.is_fp32() and after.is_bf16():
            return x.astype(ml_dtypes.bfloat16).view(np.uint16)
        return convert(x, before, after, mode)

    return converted


def _numpy_type(look_up: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    """Caches the lookup in a table that the interpreter builds anew in each operation."""
    of_number = cache(look_up)
    return lambda kind: look_up(kind) if kind.scalar.is_ptr() else of_number(kind.scalar)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function of a kernel, where the language has its interpreted operations already.

    The interpreter's own looks for them again in each call, for half of all its time.
    """
    is_builtin, languages = _languages_of(function.fn)
    if any(is_builtin(language.load) for language in languages):
        importlib.import_module("triton.runtime.interpreter")._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


@cache
def _languages_of(function: Callable[..., Any]) -> tuple[Callable[..., bool], list[ModuleType]]:
    """Returns the predicate of built-in operations, and the languages in a function's scope."""
    core = importlib.import_module("triton.language.core")
    languages = (importlib.import_module("triton.language"), core)
    seen = [x for x in function.__globals__.values() if any(x is one for one in languages)]
    return core.is_builtin, seen


def _modules(language: str) -> dict[str, ModuleType]:
    return {name: module_in(f"kernels.{language}_gpu", name) for name in MODULES}


KERNELS = {"pallas": _modules("pallas")}
"""Modules by language and name. Where Triton is missing its cases do not exist; tests/conftest.py
counts them in the summary."""

if importlib.util.find_spec("triton") is not None:
    assert ON_GPU or "kernels.triton_gpu.attention.attention_layer" not in sys.modules, (
        "too late for the interpreter"
    )
    with triton_interpreter():
        KERNELS["triton"] = _modules("triton")
