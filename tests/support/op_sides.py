"""Execution and timing of operations in the two frameworks, for `bench/kernels/op.py`.

Operations are called as the backends call them, so on a GPU they are the kernels that `ops` has
bound. A framework is imported when its side is made.
"""

import gc
import inspect
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any

import numpy as np

from kernels.kernel_limits import MOST_SEPARATE_BLOCKS
from kernels.rooms import module_in
from tests.support.gpu_activity import traced
from tests.support.implementations import to_jax, to_numpy, to_torch
from tests.support.op_case import Arguments, OpCase, as_list, changed
from tests.support.op_records import mapped

Placed = list[Any]
"""The arguments of an operation in its order: arrays on the device, numbers, records of both."""
Changes = Mapping[str, int]
"""Fields of tile configs, and their replacements."""
Timer = Callable[[int], float]
"""Seconds of one call, from a number of rounds over all sets of arguments."""

GPU_COPY_FLOATS, CPU_COPY_FLOATS = 2**28, 2**24
GPU_WEIGHTS, CPU_WEIGHTS = 2**27, 1
"""Numbers of weights that products take in turn: more than a cache keeps."""
GPU_PRODUCT, CPU_PRODUCT = (4096, 12288, 4096), (64, 512, 512)
"""Rows, outputs and inputs of a product that works to the full."""
ROUND_S = 0.02
SUSTAINED_S = 0.3
"""Seconds of products: a card needs them to reach the clock that its power limit allows."""
WARM_UP_ROUNDS = 10


@dataclass(frozen=True)
class Operation:
    """Function of a case; `in_place` has the indices of the arguments that it changes.

    With `is_counted` its result has counters, which are omitted.
    """

    call: Callable[..., Any]
    in_place: tuple[int, ...]
    is_counted: bool = False

    def __call__(self, *placed: Any) -> Any:
        found = self.call(*placed)
        return changed_record(found, arrivals=None) if self.is_counted else found


class Side(ABC):
    """One framework on the device that it runs on.

    Attributes:
      name: Of the framework.
      device: Name of the device.
      is_gpu: Whether that is a GPU.
    """

    name: str
    device: str
    is_gpu: bool

    def __init__(self) -> None:
        self._ops = import_module(f"{self.name}_impl.ops")

    @property
    def kernels(self) -> list[str]:
        """The operations that are kernels now."""
        return self._ops.kernel_names()

    @property
    def version(self) -> str:
        return version(self.name)

    def with_ops(self, ops: str) -> AbstractContextManager[None]:
        """Context in which the operations are `plain`, or the ones bound by `ops`."""
        return self._ops.reference_ops() if ops == "plain" else nullcontext()

    @contextmanager
    def with_tiles(self, case: OpCase, changes: Changes) -> Iterator[None]:
        """Within it a case has its order, and its kernels the GPU's tiles, some of them changed.

        They are those of the table that it names, else of its function, where it has a table, else
        of its module. A case can have changes of its own.

        Raises:
          ValueError: There are tiles to change and no kernels here that have any.
        """
        bound, changes = self._ops.KERNELS, {**case.tiles, **changes}
        op = case.table_in(bound.tiles) if bound else case.op
        if changes and (bound is None or not hasattr(bound.tiles, op)):
            raise ValueError(f"{op} has no tiles on {self.device}")
        if changes:
            self._ops.KERNELS = replace(bound, tiles=changed(bound.tiles, op, changes))
        try:
            with case.order():
                yield
        finally:
            self._ops.KERNELS = bound

    def operation(self, case: OpCase) -> Operation:
        call = getattr(self._module(case), case.function)
        names = list(inspect.signature(call).parameters)
        in_place = tuple(names.index(name) for name in case.in_place)
        is_counted = case.segments is not None and "stream" in names
        return Operation(call, in_place, is_counted=is_counted)

    def placed(self, case: OpCase, arguments: Arguments) -> Placed:
        order = inspect.signature(self.operation(case).call).parameters
        return [self._argument(case, name, arguments[name]) for name in order if name in arguments]

    def _argument(self, case: OpCase, name: str, value: Any) -> Any:
        leaf = partial(self._array, dtype=case.dtype_of(name))
        wide = partial(self._array, dtype="float32")
        return mapped(value, leaf=leaf, module=self._module(case), wide=wide)

    def _module(self, case: OpCase) -> ModuleType:
        return module_in(f"{self.name}_impl.ops", case.op)

    @abstractmethod
    def run(self, operation: Operation, placed: Placed) -> list[np.ndarray]:
        """The results of one call, or what it has changed if it gives none; bfloat16 as float32."""

    @abstractmethod
    def timer(self, operation: Operation, sets: list[Placed]) -> Timer:
        """Prepares to time calls that take the sets in turn."""

    def copy_rate(self) -> float:
        """Bytes a second, read and written, of a large copy on the device.

        A GPU that idled takes a while to reach its clocks, and one copy is too short to time.
        """
        timer = self._gpu_copies() if self.is_gpu else _cpu_copies()
        floats = GPU_COPY_FLOATS if self.is_gpu else CPU_COPY_FLOATS
        rounds = rounds_for(timer, 1)
        for _ in range(WARM_UP_ROUNDS):
            timer(rounds)
        return 2 * 4 * floats / statistics.median(timer(rounds) for _ in range(7))

    def chain_seconds(self, products: Sequence[tuple[int, int, int]]) -> float:
        """Seconds of products in bfloat16 by the framework, one after the other, sustained.

        Args:
          products: Rows, outputs and inputs of each.
        """
        draw = partial(np.random.default_rng(0).standard_normal, dtype=np.float32)
        numbers = GPU_WEIGHTS if self.is_gpu else CPU_WEIGHTS
        chain = sum(outputs * inputs for _, outputs, inputs in products)
        sets, drawn = [], {}
        for number, (rows, *shape) in enumerate([*products] * math.ceil(numbers / chain)):
            of_rows, of_weight = (rows, shape[1]), tuple(shape)
            for each in (of_rows, of_weight):
                if each not in drawn:
                    drawn[each] = self._array(draw(each), "bfloat16")
            sets.append([drawn[of_rows], drawn[of_weight] + number])
        timer = self.timer(Operation(lambda x, weight: x @ weight.T, ()), sets)
        rounds = rounds_for(timer, len(sets), SUSTAINED_S if self.is_gpu else ROUND_S)
        return len(products) * statistics.median(timer(rounds) for _ in range(3))

    def product_seconds(self, rows: int, outputs: int, inputs: int) -> float:
        """Seconds of a product of rows with a weight in bfloat16 by the framework, sustained."""
        return self.chain_seconds([(rows, outputs, inputs)])

    def product_rate(self) -> float:
        """Multiplications a second of large products in bfloat16 by the framework, sustained."""
        rows, outputs, inputs = GPU_PRODUCT if self.is_gpu else CPU_PRODUCT
        return rows * outputs * inputs / self.product_seconds(rows, outputs, inputs)

    def release(self) -> None:
        """Lets go of the arrays and programs that no one holds, for the next side."""
        gc.collect()

    @abstractmethod
    def _gpu_copies(self) -> Timer:
        """Returns a timer of copies of `GPU_COPY_FLOATS`."""

    @abstractmethod
    def _array(self, value: Any, dtype: str) -> Any:
        """An array on the device, its floats in the dtype; anything else as it is."""


class TorchSide(Side):
    """Runs operations of torch; on a GPU, timed ones form one captured graph."""

    name = "torch"

    def __init__(self) -> None:
        super().__init__()
        self._torch = import_module("torch")
        self.is_gpu = self._torch.cuda.is_available()
        self.device = self._torch.cuda.get_device_name() if self.is_gpu else "CPU"

    def run(self, operation: Operation, placed: Placed) -> list[np.ndarray]:
        results = operation(*placed)
        if results is None:
            results = tuple(placed[place] for place in operation.in_place)
        results = as_list(results)
        return [to_numpy(x.float().cpu() if x.is_floating_point() else x.cpu()) for x in results]

    def timer(self, operation: Operation, sets: list[Placed]) -> Timer:
        def once() -> list[Any]:
            return [operation(*placed) for placed in sets]

        once()
        return self._captured(once, len(sets)) if self.is_gpu else _on_a_clock(once, len(sets))

    def release(self) -> None:
        super().release()
        if self.is_gpu:
            self._torch.cuda.empty_cache()

    def _argument(self, case: OpCase, name: str, value: Any) -> Any:
        """Page tables are long numbers, as those of a step are; a stream has counters."""
        placed = super()._argument(case, name, value)
        if name == "stream" and case.segments is not None:
            counters = np.zeros(MOST_SEPARATE_BLOCKS, np.int32)
            placed = changed_record(placed, arrivals=self._array(counters, "int32"))
        if hasattr(placed, "page_table"):
            return changed_record(placed, page_table=placed.page_table.long())
        return placed.long() if name == "page_table" else placed

    def _gpu_copies(self) -> Timer:
        source = self._torch.ones(GPU_COPY_FLOATS, device="cuda")
        target = self._torch.empty_like(source)
        # Not `copy_`, which a graph gives to the copy engine: a kernel reads and writes faster.
        add = Operation(lambda x: self._torch.add(x, 1, out=target), ())
        return self.timer(add, [[source]])

    def _captured(self, once: Callable[[], Any], count: int) -> Timer:
        cuda = self._torch.cuda
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        # JAX may allocate meanwhile in a thread of its own.
        with cuda.graph(graph, capture_error_mode="thread_local"):
            once()

        def seconds(rounds: int) -> float:
            begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(rounds):
                graph.replay()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3 / rounds / count

        return seconds

    def _array(self, value: Any, dtype: str) -> Any:
        found = to_torch(value)
        if not isinstance(value, np.ndarray):
            return found
        where = "cuda" if self.is_gpu else "cpu"
        is_float = found.is_floating_point()
        return found.to(where, getattr(self._torch, dtype) if is_float else found.dtype)


class JaxSide(Side):
    """Runs operations of JAX; timed ones form one program."""

    name = "jax"

    def __init__(self) -> None:
        super().__init__()
        self._jax = import_module("jax")
        first = self._jax.devices()[0]
        self.is_gpu = first.platform == "gpu"
        self.device = first.device_kind if self.is_gpu else "CPU"

    def run(self, operation: Operation, placed: Placed) -> list[np.ndarray]:
        (results,) = self._program(operation, [placed])()
        return [_widened(to_numpy(x)) for x in self._jax.tree.leaves(results)]

    def timer(self, operation: Operation, sets: list[Placed]) -> Timer:
        program = self._program(operation, sets)
        for _ in range(3):  # plain, then recorded as a command buffer, then replayed
            self._jax.block_until_ready(program())
        wait = self._jax.block_until_ready
        # A program of short kernels is over before its results have been handed out on the host.
        timer = _by_the_device if self.is_gpu else _on_a_clock
        return timer(program, len(sets), wait)

    def _gpu_copies(self) -> Timer:
        source = self._jax.numpy.ones(GPU_COPY_FLOATS)
        return self.timer(Operation(lambda x: x + 1, ()), [[source]])

    def _program(self, operation: Operation, sets: list[Placed]) -> Callable[[], Any]:
        """The calls over all sets, traced as one; what is no array is the same in all.

        What an operation gives back of its arguments is what the next round is given; one that
        gives nothing else is known by it.
        """
        jax = self._jax
        leaves, tree = jax.tree.flatten(sets[0])
        fixed = [None if isinstance(leaf, jax.Array) else (leaf,) for leaf in leaves]

        @jax.jit
        def call(arrays: list[Any], changed: list[Any]) -> tuple[list[Any], list[Any]]:
            given = iter(arrays)
            rebuilt = [next(given) if leaf is None else leaf[0] for leaf in fixed]
            placed = jax.tree.unflatten(tree, rebuilt)
            for place, value in zip(operation.in_place, changed, strict=True):
                placed[place] = value
            results = operation(*placed)
            is_record = len(changed) == 1 and type(results) is type(changed[0])
            found = results if isinstance(results, tuple) and not is_record else (results,)
            own = len(found) - len(changed)
            return as_list(found[:own]), list(found[own:])

        def calls(arrays: list[Any], changed: list[Any]) -> tuple[list[Any], list[Any]]:
            pairs = [call(a, c) for a, c in zip(arrays, changed, strict=True)]
            return [found for found, _ in pairs], [after for _, after in pairs]

        program = jax.jit(calls, donate_argnums=1)
        arrays = [[x for x in jax.tree.leaves(s) if isinstance(x, jax.Array)] for s in sets]
        changed = [[placed[place] for place in operation.in_place] for placed in sets]
        state = [jax.tree.map(jax.numpy.copy, changed)]

        def once() -> Any:
            results, state[0] = program(arrays, state[0])
            return [own or after for own, after in zip(results, state[0], strict=True)]

        return once

    def _array(self, value: Any, dtype: str) -> Any:
        found = to_jax(value)
        is_float = isinstance(value, np.ndarray) and value.dtype.kind == "f"
        return found.astype(dtype) if is_float else found


SIDES: dict[str, type[Side]] = {"torch": TorchSide, "jax": JaxSide}
"""In the order in which they run: JAX takes most of a GPU's memory when it starts."""


def _widened(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype.name == "bfloat16" else x


def _cpu_copies() -> Timer:
    source = np.ones(CPU_COPY_FLOATS, np.float32)
    target = np.empty_like(source)
    np.copyto(target, source)  # its pages exist from now on
    return _on_a_clock(lambda: np.copyto(target, source), 1)


def _on_a_clock(
    once: Callable[[], Any], count: int, wait: Callable[[Any], Any] = lambda results: results
) -> Timer:
    def seconds(rounds: int) -> float:
        begin = time.perf_counter()
        for _ in range(rounds):
            results = once()
        wait(results)
        return (time.perf_counter() - begin) / rounds / count

    return seconds


def _by_the_device(once: Callable[[], Any], count: int, wait: Callable[[Any], Any]) -> Timer:
    """Counts the busy time of a GPU."""

    def seconds(rounds: int) -> float:
        def run() -> None:
            for _ in range(rounds):
                results = once()
            wait(results)

        return traced("jax", run).busy_ms / 1e3 / rounds / count

    return seconds


def changed_record(record: Any, **fields: Any) -> Any:
    """A record of one framework or the other, with some fields changed."""
    return record._replace(**fields) if hasattr(record, "_replace") else replace(record, **fields)


def rounds_for(timer: Timer, count: int, seconds: float = ROUND_S) -> int:
    """Returns the number of rounds over `count` sets that take long enough to measure."""
    return max(1, math.ceil(seconds / max(timer(1) * count, 1e-9)))
