"""Opens one safetensors file, with readable errors, and reads its header."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from shared.models.file_kind import EMPTY, OTHER, SAFETENSORS, kind_of_file
from shared.models.weight_files import CheckpointError


def open_file(path: Path) -> Any:
    """Returns the library's handle of a file.

    Raises:
      CheckpointError: The file is truncated, or is not a safetensors file; the message states its
        kind.
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
            f"{path} is truncated or not a safetensors file: {error}; download it again"
        ) from error


def contents(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header of a file and the offset of its tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length
