"""Arguments and results of operations that are records, a specification's or a framework's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

from shared.models.formats.fp8_w8a16 import FP8W8A16
from shared.models.formats.plain import Plain
from shared.models.formats.weight_format import SCALES
from shared.spec import linear
from shared.spec.lora import AdapterWeights, RowAdapters

_ADAPTERS = AdapterWeights | RowAdapters
T = TypeVar("T")


def mapped(
    value: Any,
    leaf: Callable[[Any], Any],
    module: ModuleType,
    wide: Callable[[Any], Any] | None = None,
) -> Any:
    """`value` with `leaf` of each of its arrays; its records are `module`'s, if that has them.

    Fields that records of the other module lack, for example of ranks, are omitted. `wide` is used
    instead of `leaf` for arrays that are float32 in every dtype.
    """
    again = partial(mapped, leaf=leaf, module=module, wide=wide)
    if isinstance(value, AdapterWeights):
        own = partial(mapped, leaf=wide or leaf, module=module)
        record = getattr(_home(value, module), AdapterWeights.__name__)
        scales, factors = own(value.scales), own(value.factors)
        return record(again(value.a), again(value.b), scales, factors, value.parts)
    if isinstance(value, linear.Matrix):
        bias, planes = again(value.bias), {name: again(x) for name, x in value.planes.items()}
        if isinstance(value.format, FP8W8A16) and value.format.scale_dtype == "float32":
            planes[SCALES] = (wide or leaf)(value.planes[SCALES])
        matrix, lora = module_matrix(module), again(value.lora)
        if isinstance(value.format, Plain):  # of the dtype of the mapped values
            plain = matrix.plain(planes["values"], bias=bias)
            return matrix(plain.format, plain.planes, bias=bias, lora=lora)
        return matrix(value.format, planes, bias=bias, lora=lora)
    if names := _field_names(value):
        record = getattr(_home(value, module), type(value).__name__, type(value))
        known = inspect.signature(record).parameters
        return record(**{name: again(getattr(value, name)) for name in names if name in known})
    if isinstance(value, tuple):
        return tuple(map(again, value))
    return leaf(value)


def _home(value: Any, module: ModuleType) -> ModuleType:
    """The module of a record's twin: adapters of weights are records of `lora`."""
    if not isinstance(value, _ADAPTERS) or hasattr(module, type(value).__name__):
        return module
    return import_module(module_matrix(module).__module__.replace("matrix", "lora"))


def module_matrix(module: ModuleType) -> Any:
    """The `Matrix` of the operations of a module, which may be records of another one."""
    return getattr(module, "Matrix", linear.Matrix)


def _field_names(value: Any) -> tuple[str, ...]:
    """Fields of a dataclass or a named tuple; none for anything else."""
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(field.name for field in fields(value))
    return getattr(value, "_fields", ())


def leaves(kind: type[T], record: Any) -> Iterator[T]:
    """Returns the values of a type in a record and its nested records, in order."""
    if isinstance(record, kind):
        yield record
        return
    names = _field_names(record)
    within = [getattr(record, name) for name in names] if names else record
    within = [*within.values()] if isinstance(within, Mapping) else within
    if isinstance(within, list | tuple):
        for each in within:
            yield from leaves(kind, each)
