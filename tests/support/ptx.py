"""Evaluation of the PTX that dequantises packed weights, in numpy."""

import re
from typing import Any

import ml_dtypes
import numpy as np

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOATS = {
    "add.rn.bf16x2": lambda x: x[0] + x[1],
    "mul.rn.bf16x2": lambda x: x[0] * x[1],
    "fma.rn.bf16x2": lambda x: x[0] * x[1] + x[2],
}


def evaluated(text: str, operands: list[np.ndarray], results: int) -> list[np.ndarray]:
    """Returns the result registers of inline assembly.

    Args:
      text: Statements; `$0` and later name the result registers, then the operands.
      operands: uint32 registers, equal shapes.
      results: Number of result registers.

    Raises:
      KeyError: An instruction is not known here.
    """
    values: dict[str, Any] = {f"${results + i}": np.uint32(x) for i, x in enumerate(operands)}
    for statement in text.strip("{}\n ").replace("\n", " ").split(";"):
        name, _, rest = statement.strip().partition(" ")
        if not name or name == ".reg":
            continue
        into, *words = re.split(r",\s*", rest.strip())
        given = [values[x] if x in values else np.uint32(int(x, 0)) for x in words]
        values[into] = _result(name, given)
    return [values[f"${i}"] for i in range(results)]


def pairs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Packs two arrays as the lower and upper bfloat16 of registers."""
    low, high = (x.astype(_BFLOAT16).view(np.uint16).astype(np.uint32) for x in (first, second))
    return low | high << np.uint32(16)


def halves(registers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lower and upper bfloat16 of registers as float32."""
    low, high = registers & np.uint32(0xFFFF), registers >> np.uint32(16)
    low, high = (x.astype(np.uint16).view(_BFLOAT16).astype(np.float32) for x in (low, high))
    return low, high


def _result(name: str, given: list[Any]) -> np.ndarray:
    if name in _FLOATS:
        numbers = np.array([halves(np.broadcast_to(x, given[0].shape)) for x in given], np.float64)
        low, high = _FLOATS[name](numbers)
        return pairs(low, high)
    bits = {
        "mov.b32": lambda x: x[0],
        "and.b32": lambda x: x[0] & x[1],
        "shl.b32": lambda x: x[0] << x[1],
        "shr.b32": lambda x: x[0] >> x[1],
        "shr.u32": lambda x: x[0] >> x[1],
        "lop3.b32": _selected_by_table,
        "prmt.b32": _permuted,
    }
    return bits[name](given)


def _selected_by_table(given: list[Any]) -> Any:
    a, b, c, table = given
    found = a & np.uint32(0)
    for index in range(8):
        if int(table) >> index & 1:
            chosen = [x if index >> (2 - i) & 1 else ~x for i, x in enumerate((a, b, c))]
            found = found | chosen[0] & chosen[1] & chosen[2]
    return found


def _permuted(given: list[Any]) -> Any:
    a, b, selector = given
    found = a & np.uint32(0)
    for place in range(4):
        index = int(selector) >> 4 * place & 7
        of, byte = (a, index) if index < 4 else (b, index - 4)
        found = found | (of >> np.uint32(8 * byte) & np.uint32(255)) << np.uint32(8 * place)
    return found
