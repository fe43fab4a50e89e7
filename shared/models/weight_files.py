"""Finds the weight files of a checkpoint by name."""

import json
from pathlib import Path

from shared.models.file_kind import INDEX_FILE, SINGLE_FILE, broken_link, without_weights


class CheckpointError(ValueError):
    """A model folder cannot be loaded; the message is one sentence that names the fault."""


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files of a checkpoint; raises CheckpointError if one is missing."""
    if (single := folder / SINGLE_FILE).is_file():
        return [single]
    if not (index := folder / INDEX_FILE).is_file():
        what = without_weights(folder)
        raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: {what}")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        paths = {name: folder / name for name in sorted(set(weight_map.values()))}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not a valid index of shards") from error
    if absent := next((name for name, path in paths.items() if not path.is_file()), None):
        lost = broken_link(paths[absent]) if paths[absent].is_symlink() else "download it too"
        raise CheckpointError(
            f"the shard {absent} is missing from the model folder {folder}; {lost}"
        )
    return list(paths.values())
