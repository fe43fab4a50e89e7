"""Cases of operations: one table an operation, which its tests and `bench/kernels/op.py` share.

`tests/support/cases/NAME.py` has the `TABLE` of the operations of `ops/NAME.py`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kernels.rooms import module_in
from kernels.tile_tables import Table
from kernels.tiles import Tiles
from shared.boundary.tp_group import TPGroup
from shared.spec import reduction_order
from shared.spec.linear import Matrix

Arguments = dict[str, Any]
"""Arrays, floats as float32, numbers that a program is made for, and records of both, by
parameter."""

# Float32 on both sides: the sums have another order, and a GPU's exp2 errs by some 1e-7. bfloat16
# has 8 bits; intermediate values and results are rounded to it once each.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
MOST_COMPARED = 16


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """One case of an operation: arguments, expected results and moved bytes.

    Attributes:
      op, function: The name of the specification's and the ops' module, and of the function there.
      name: Of the case.
      make: The arguments of the operation for a seed.
      dtype: What the operation gets its floats in.
      wide: Arguments with floats that remain float32.
      in_place: Arguments that torch writes in place, and JAX gives back behind the results.
      is_large: Of a real model's size, for a GPU.
      real_rows: Rows of the result that mean anything; None for all of it.
      row_arguments: Arguments with an entry a row. Rows do not depend on each other, so that a
        large case is compared in some of them.
      specify: The specification's results for some rows, where it takes more than leaving out the
        others' entries in `row_arguments`.
      segments: Segments of the inputs of output projections; None: one, and without counters if
        they are added.
      tiles: Fields of the tiles that are others than in the GPU's file.
      tiled: The table of these, if it is neither that of the function nor that of the module.
      num_bytes: What a call must read and write, for the arguments and the bytes of a float; None
        for all arguments and results.
    """

    op: str
    function: str
    name: str
    make: Callable[[int], Arguments]
    dtype: str = "float32"
    wide: tuple[str, ...] = ()
    in_place: tuple[str, ...] = ()
    is_large: bool = False
    real_rows: Callable[[Arguments], np.ndarray] | None = None
    row_arguments: tuple[str, ...] = ()
    segments: int | None = None
    tiles: Mapping[str, int] = field(default_factory=dict)
    tiled: str = ""
    specify: Callable[[Arguments, np.ndarray], list[np.ndarray]] | None = None
    num_bytes: Callable[[Arguments, int], int] | None = None

    def __str__(self) -> str:
        return f"{self.function}, {self.name}"

    def table_in(self, tiles: Tiles) -> str:
        """The name of its table of tiles."""
        return self.tiled or (self.function if hasattr(tiles, self.function) else self.op)

    @property
    def item_bytes(self) -> int:
        """Bytes of a float of the operation."""
        return {"float32": 4, "bfloat16": 2}[self.dtype]

    def arguments(self, seed: int) -> Arguments:
        """Returns the arguments of the operation; the dtype can represent every float."""
        made = self.make(seed)
        return {name: _rounded(value, self.dtype_of(name)) for name, value in made.items()}

    def dtype_of(self, name: str) -> str:
        """Returns the dtype of an argument's floats."""
        return "float32" if name in self.wide else self.dtype

    def errors(self, arguments: Arguments, got: list[np.ndarray]) -> list[float]:
        """Returns the relative error of each result: the norm of the difference over the expected
        norm; infinite if NaN differs.
        """
        rows = self._compared(arguments)
        wanted = self.specified(arguments, rows)
        pairs = zip(got[: len(wanted)], wanted, strict=True)  # a kernel may leave more behind
        return [_distance(g if rows is None else g[rows], want) for g, want in pairs]

    @contextmanager
    def order(self) -> Iterator[None]:
        """Within it output projections have the case's segments."""
        usual = reduction_order.LINEAR
        reduction_order.LINEAR = replace(usual, segments=self.segments or 1, packed_only=False)
        try:
            yield
        finally:
            reduction_order.LINEAR = usual

    def specified(self, arguments: Arguments, rows: np.ndarray | None) -> list[np.ndarray]:
        """Returns the specification's results, for some rows or for all."""
        if self.specify is not None and rows is not None:
            return self.specify(arguments, rows)
        function = getattr(import_module(f"shared.spec.{self.op}"), self.function)
        names = inspect.signature(function).parameters
        given = {name: arguments[name] for name in names if name in arguments}
        if rows is not None:
            given |= {name: given[name][rows] for name in self.row_arguments if name in given}
        with self.order():
            return as_list(function(**given))

    def bytes_of(self, arguments: Arguments, results: list[np.ndarray]) -> int:
        """Returns the bytes that a call must at least read and write."""
        if self.num_bytes is not None:
            return self.num_bytes(arguments, self.item_bytes)
        given = [x for value in arguments.values() for x in arrays_of(value)]
        arrays = [x for x in (*given, *results) if isinstance(x, np.ndarray)]
        return sum(x.size * (self.item_bytes if _is_float(x) else x.itemsize) for x in arrays)

    def _compared(self, arguments: Arguments) -> np.ndarray | None:
        if self.real_rows is None:
            return None
        rows = self.real_rows(arguments)
        if not self.is_large or len(rows) <= MOST_COMPARED:
            return rows
        return np.sort(np.random.default_rng(0).choice(rows, MOST_COMPARED, replace=False))


def changed(tiles: Tiles, op: str, changes: Mapping[str, int]) -> Tiles:
    """With some fields changed in all lines of a module's table.

    Where the changes do not fit a line, calls that use it raise the fault.
    """
    lines = getattr(tiles, op).lines
    table = Table(tuple(replace(x, tiles=_with_changes(x.tiles, changes)) for x in lines))
    return replace(tiles, **{op: table})


class _InvalidTiles:
    """Tiles of a line that changes do not fit."""

    def __init__(self, fault: ValueError) -> None:
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        raise ValueError(str(self._fault))


def _with_changes(tiles: Any, changes: Mapping[str, int]) -> Any:
    try:
        return replace(tiles, **changes)
    except ValueError as fault:
        return _InvalidTiles(fault)


def tables() -> list[str]:
    """The modules of ops that have cases."""
    return sorted(path.stem for path in (Path(__file__).parent / "cases").glob("*/[!_]*.py"))


def table(op: str) -> list[OpCase]:
    """The cases of an operation's module."""
    return module_in("tests.support.cases", op).TABLE


def as_list(results: Any) -> list[Any]:
    """The results of a function that gives one or several; a record of them as its fields."""
    found = results if isinstance(results, tuple) else [results]
    return [x for each in found for x in arrays_of(each)]


def arrays_of(value: Any) -> list[Any]:
    """The arrays and numbers of records, of planes of weights, or the value itself; without what is
    None, ranks and flags.
    """
    if isinstance(value, Matrix):
        return [
            x for each in (*value.planes.values(), value.bias, value.lora) for x in arrays_of(each)
        ]
    if is_dataclass(value) and not isinstance(value, TPGroup | type):
        return [x for field in fields(value) for x in arrays_of(getattr(value, field.name))]
    return [] if value is None or isinstance(value, TPGroup | bool) else [value]


def _is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def _rounded(value: Any, dtype: str) -> Any:
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        return replace(value, **{name: _rounded(getattr(value, name), dtype) for name in names})
    if dtype == "float32" or not _is_float(value):
        return value
    return value.astype(ml_dtypes.bfloat16).astype(np.float32)


def _distance(got: np.ndarray, want: np.ndarray) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    # Infinities and NaN of both have no difference.
    is_same = (got == want) | (np.isnan(got) & np.isnan(want))
    difference = np.where(is_same, 0, got) - np.where(is_same, 0, want)
    size = np.linalg.norm(np.where(np.isfinite(want), want, 0))
    error = float(np.linalg.norm(difference) / max(size, 1e-30))
    return math.inf if math.isnan(error) else error
