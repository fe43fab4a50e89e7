"""One safetensors file: opened with its faults in words, and its header."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from shared.models.file_kind import EMPTY, OTHER, SAFETENSORS, kind_of_file
from shared.models.weight_files import CheckpointError


def open_file(path: Path) -> Any:
    """The library's handle of a file.

    Raises:
      CheckpointError: It is truncated, or no safetensors file; one sentence that says what it is.
    """
    try:
        path.open("rb").close()
        return safe_open(path, framework="numpy")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        kind = kind_of_file(path)
        if kind not in (SAFETENSORS, OTHER, EMPTY):
            raise CheckpointError(f"{path} is {kind.name}; {kind.way_out}") from error
        raise CheckpointError(
            f"{path} is truncated or no safetensors file: {error}; download it again"
        ) from error


def contents(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header of a file and the offset of its tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length
