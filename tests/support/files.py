"""Safetensors files with types that numpy does not have: tensors as the file's type and bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Stored = dict[str, tuple[str, np.ndarray]]
"""Each tensor's type, as a file calls it, and its numbers; codes of eight bits are bytes."""

KINDS: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "I64": np.int64,
}


def read_stored(path: Path) -> Stored:
    """All tensors of a file."""
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    found = {}
    for name, entry in json.loads(whole[8:start]).items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            numbers = np.frombuffer(
                whole[start + first : start + end], KINDS.get(entry["dtype"], np.uint8)
            )
            found[name] = (entry["dtype"], numbers.reshape(entry["shape"]))
    return found


def write_stored(path: Path, tensors: Stored) -> None:
    """Writes a file of them."""
    header, parts, first = {}, [], 0
    for name, (kind, numbers) in tensors.items():
        parts.append(np.ascontiguousarray(numbers).tobytes())
        end = first + len(parts[-1])
        header[name] = {
            "dtype": kind,
            "shape": list(numbers.shape),
            "data_offsets": [first, end],
        }
        first = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))
