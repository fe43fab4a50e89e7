"""The operations of both backends as functions of numpy arrays, so that one test serves all.

`each_implementation` runs a test once for each framework; the test gets `implementation`, and
`implementation("gated_delta")` has the functions of that framework's `ops/gated_delta`. Arguments
and results are those of the specification: its dataclasses become the framework's own and back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernels.rooms import module_in
from shared.spec import reduction_order
from shared.spec.reduction_order import LinearOrder
from tests.support.op_records import mapped


class Implementation:
    """The operations of one framework."""

    def __init__(self, framework: str) -> None:
        self._framework = framework

    def __str__(self) -> str:
        return self._framework

    def __call__(self, name: str) -> Ops:
        specification = import_module(f"shared.spec.{name}")
        return Ops(self._framework, module_in(f"{self._framework}_impl.ops", name), specification)


each_implementation = pytest.mark.parametrize(
    "implementation", [Implementation("torch"), Implementation("jax")], ids=str
)


class Ops:
    """One module of operations; its functions take and give numpy arrays."""

    def __init__(self, framework: str, module: ModuleType, specification: ModuleType) -> None:
        self._module, self._specification = module, specification
        self._in = {"torch": to_torch, "jax": to_jax}[framework]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.leaving((), name, *args, **kwargs)[0]

    def leaving(self, places: tuple[int, ...], name: str, *args: Any, **kwargs: Any) -> Any:
        """Returns a result, and some arguments after the call, as torch writes in place."""
        function = getattr(self._module, name)
        if self._in is to_jax:
            function = _jitted(function, reduction_order.LINEAR)
        to_device = partial(mapped, leaf=self._in, module=self._module)
        placed, named = [*map(to_device, args)], {k: to_device(v) for k, v in kwargs.items()}
        got = function(*placed, **named)
        left = tuple(placed[place] for place in places)
        return mapped((got, left), leaf=to_numpy, module=self._specification)


@cache
def _jitted(function: Callable[..., Any], order: LinearOrder) -> Callable[..., Any]:
    """The function as one compiled program: eagerly, each of its operations would be one.

    A test that patches the order gets programs of its own.
    """
    del order
    jax, backend = import_module("jax"), import_module("jax_impl.backend")
    options = backend.compiler_options(jax.devices("cpu")[0], quick_compile=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        fixed = tuple(None if isinstance(leaf, jax.Array) else (leaf,) for leaf in leaves)
        return program(tree, fixed)(arrays)

    @cache
    def program(tree: Any, fixed: tuple[tuple[Any] | None, ...]) -> Callable[[list[Any]], Any]:
        """For one structure of the arguments; `fixed` has those that are no arrays."""

        def rebuilt(arrays: list[Any]) -> Any:
            given = iter(arrays)
            leaves = [next(given) if leaf is None else leaf[0] for leaf in fixed]
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return function(*args, **kwargs)

        return jax.jit(rebuilt, compiler_options=options)

    return call


def _narrow(value: np.ndarray) -> np.ndarray:
    """A copy, for operations may write in place; whole numbers as a plan has them."""
    return value.astype(np.int32) if value.dtype == np.int64 else value.copy()


def to_torch(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    torch = import_module("torch")
    narrow = _narrow(value)
    if narrow.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(narrow.view(np.int16)).view(torch.bfloat16)
    if narrow.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(narrow.view(np.uint8)).view(torch.float8_e4m3fn)
    # Unsigned words travel as the bits of an int32.
    return torch.from_numpy(narrow.view(np.int32) if narrow.dtype == np.uint32 else narrow)


def to_jax(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return import_module("jax").numpy.asarray(_narrow(value))


def to_numpy(value: Any) -> Any:
    """Numbers of bfloat16 and of FP8 as the float32 that they are."""
    if not hasattr(value, "shape"):
        return value
    if "bfloat16" in str(value.dtype) or "float8" in str(value.dtype):
        value = value.float() if hasattr(value, "float") else value.astype("float32")
    return np.asarray(value)
