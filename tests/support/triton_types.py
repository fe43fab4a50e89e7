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
        ("cast", _cast),
        ("computation_type_impl", _computation_type),
    ):
        patch.setattr(semantic, name, remembering(getattr(semantic, name)))
    patch.setattr(core, "_unwrap_if_constexpr", _unwrap(core._unwrap_if_constexpr, core))


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
    """Skips the broadcast of two blocks of one shape, and remembers the types of other results."""
    known: dict[tuple[str, str], tuple[Any, Any]] = {}

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        both = a.is_block() and b.is_block()
        if both and a.shape is b.shape:
            return lhs, rhs
        found = known.get((a.name, b.name))
        if found is not None:
            return _expanded(self, lhs, found[0]), _expanded(self, rhs, found[1])
        made = broadcast(self, lhs, rhs)
        # The name of a pointer type omits the address space.
        if not (a.scalar.is_ptr() or b.scalar.is_ptr() or (both and len(a.shape) != len(b.shape))):
            known[a.name, b.name] = made[0].type, made[1].type
        return made

    return broadcasted


def _expanded(semantic: Any, value: Any, type: Any) -> Any:
    """Returns a block or a scalar as a block of this type; two blocks have equal ranks."""
    if value.type.name == type.name:
        return value
    if value.type.is_block():
        handle = semantic.builder.create_broadcast(value.handle, type.shape)
    else:
        handle = semantic.builder.create_splat(type, value.handle)
    return semantic.tensor(handle, type)


def _cast(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Skips the cast to the own type."""

    def casted(self: Any, value: Any, to: Any, rounding: str | None = None) -> Any:
        return value if value.dtype is to else cast(self, value, to, rounding)

    return casted


def _unwrap(unwrap: Callable[[Any], Any], core: Any) -> Callable[[Any], Any]:
    """Looks at the types first that most arguments have."""
    plain = {int, float, bool, str, type(None), core.tensor}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    return unwrapped


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
