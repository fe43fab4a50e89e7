"""Kernels of lowered programs, each compiled once for an absent GPU.

A kernel in a program is a call that needs nothing from its surroundings. A program is lowered as a
whole, which finds what Pallas rejects. Then only the calls that no earlier program had are
compiled.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from bench.kernels.aot_target import CALLS, AbsentGpu

_CALL = re.compile(
    r"^\s*%\S+ = stablehlo\.custom_call (@[\w$.]+)\((.*?)\) (\{.*\}) : (\(.*\)) -> (.*)$"
)
_TENSOR = re.compile(r"tensor<([^>]*)>")
_TYPES = {
    **{f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"ui{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{"i1": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32"},
    **{"f8E4M3FN": "float8_e4m3fn"},
}


@dataclass(frozen=True)
class Call:
    """Call of a kernel in a program.

    Attributes:
      target: Compiler of the kernel.
      attributes: Kernel, and layouts of its arrays.
      operands, results: Types of arrays.
    """

    target: str
    attributes: str
    operands: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the kernel in its source."""
        named = re.search(r'\bname = "(\w+)"', self.attributes)
        return named[1] if named else self.target

    @property
    def digest(self) -> str:
        """Key that is equal for calls of the same kernel."""
        return sha256(repr(self).encode()).hexdigest()

    def line(self, number: int, first: int) -> str:
        """Returns the call as StableHLO.

        Args:
          number: Number of its result.
          first: The first argument of the module that is its operand.
        """
        given = ", ".join(f"%arg{first + i}" for i in range(len(self.operands)))
        count = f":{len(self.results)}" if len(self.results) > 1 else ""
        takes, gives = map(_listed, (self.operands, self.results))
        gives = gives if count else gives[1:-1]
        call = f"stablehlo.custom_call {self.target}({given}) {self.attributes}"
        return f"%{number}{count} = {call} : {takes} -> {gives}"


def calls_of(text: str) -> Iterator[Call]:
    """Yields the different kernels of a program in StableHLO.

    Raises:
      ValueError: A call cannot be parsed, so the format of JAX has changed.
    """
    found = set[Call]()
    for line in text.splitlines():
        if "stablehlo.custom_call" not in line or not any(f"@{name}" in line for name in CALLS):
            continue
        if (read := _CALL.match(line)) is None:
            raise ValueError(f"a call of a kernel has another form: {line[:100]}")
        target, _, attributes, takes, gives = read.groups()
        call = Call(target, attributes, tuple(_tensors(takes)), tuple(_tensors(gives)))
        if call not in found:
            found.add(call)
            yield call


def compile_calls(gpu: AbsentGpu, calls: Collection[Call]) -> None:
    """Compiles kernels as one program without other operations.

    Raises:
      jax.errors.JaxRuntimeError: XLA cannot compile a kernel.
    """
    takes = [kind for call in calls for kind in call.operands]
    gives = [kind for call in calls for kind in call.results]
    # A program with the same arrays, whose body is then replaced.
    frame = jax.jit(lambda *arrays: [jnp.zeros(*_shape(kind)) for kind in gives], keep_unused=True)
    where = jax.sharding.SingleDeviceSharding(gpu.devices[0])
    given = [jax.ShapeDtypeStruct(*_shape(kind), sharding=where) for kind in takes]
    lowered = frame.lower(*given)
    lowering = cast(Any, lowered)._lowering
    with lowering.stablehlo().context:
        lowering._hlo = ir.Module.parse(_module(calls, takes, gives))
    lowered.compile()


def _module(calls: Iterable[Call], takes: list[str], gives: list[str]) -> str:
    lines, results, first = [], [], 0
    for number, call in enumerate(calls):
        lines.append(call.line(number, first))
        first += len(call.operands)
        several = len(call.results) > 1
        results += [f"%{number}#{i}" if several else f"%{number}" for i in range(len(call.results))]
    arguments = ", ".join(f"%arg{i}: {kind}" for i, kind in enumerate(takes))
    body = "\n".join([*lines, f"return {', '.join(results)} : {', '.join(gives)}"])
    main = f"func.func public @main({arguments}) -> {_listed(gives)} {{\n{body}\n}}"
    counts = "{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32}"
    return f"module @kernels attributes {counts} {{\n{main}\n}}"


def _listed(kinds: Iterable[str]) -> str:
    return f"({', '.join(kinds)})"


def _tensors(text: str) -> Iterator[str]:
    for read in _TENSOR.finditer(text):
        yield read[0]


def _shape(kind: str) -> tuple[tuple[int, ...], str]:
    *sizes, dtype = kind.removeprefix("tensor<").removesuffix(">").split("x")
    return tuple(map(int, sizes)), _TYPES[dtype]
