"""Cache of block types and shapes for Triton's interpreter, which recomputes them per operation.

More than half of its time goes into that, not into the numbers. What is remembered is what Triton
made and checked the first time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest


def remember_types(patch: pytest.MonkeyPatch) -> None:
    """For as long as the interpreter is patched."""
    core = importlib.import_module("triton.language.core")
    semantic = importlib.import_module("triton.language.semantic").TritonSemantic
    patch.setattr(core.block_type, "__init__", _block_type(core.block_type.__init__, core))
    patch.setattr(core.tensor, "__init__", _tensor(core.tensor.__init__))
    patch.setattr(core.dtype, "__eq__", _equal(core.dtype.__eq__))
    for name, remembering in (
        ("broadcast_impl_value", _broadcast),
        ("computation_type_impl", _computation_type),
    ):
        patch.setattr(semantic, name, remembering(getattr(semantic, name)))


def _block_type(make: Callable[..., None], core: Any) -> Callable[..., None]:
    """Types of equal blocks share what they consist of, and all of a shape share that."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def made(self: Any, element_ty: Any, shape: Any) -> None:
        if element_ty.is_ptr():
            return make(self, element_ty, shape)  # named after what it points at, not by where
        sizes = tuple(x.value if isinstance(x, core.constexpr) else x for x in shape)
        key = (element_ty.name, *sizes)
        if key not in known:
            make(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            known[key] = vars(self).copy()
        vars(self).update(known[key])
        return None

    return made


def _tensor(make: Callable[..., None]) -> Callable[..., None]:
    known: dict[str, tuple[Any, Any]] = {}

    def made(self: Any, handle: Any, type: Any) -> None:
        name = type.name if type.is_block() else ""
        if name not in known:
            make(self, handle, type)
            known[name] = (self.numel, self.shape)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known[name]

    return made


def _equal(compare: Callable[..., bool]) -> Callable[..., bool]:
    return lambda self, other: self is other or compare(self, other)


def _broadcast(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Skips the broadcast of two blocks of one shape."""

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        is_done = a.is_block() and b.is_block() and a.shape is b.shape
        return (lhs, rhs) if is_done else broadcast(self, lhs, rhs)

    return broadcasted


def _computation_type(find: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[Any, ...], Any] = {}

    def found(
        self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool
    ) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
        if key not in known:
            known[key] = find(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[key]

    return found
