"""Digest of the weight files of a startup, sampled."""

import hashlib
import json
from pathlib import Path

from shared.models.checkpoint import Checkpoint
from shared.models.safetensors_file import contents
from shared.process.start import ValidatedStartup

SAMPLE_BYTES = 64
"""Bytes sampled per tensor."""


def weight_files_digest(start: ValidatedStartup) -> str:
    """Returns a digest of the weight files of target and drafter.

    Weights are sampled, as reading them whole takes as long as loading: another training run
    changes most tensors, so its samples differ. A difference outside the samples is not detected.
    """
    opened = (start.opened.checkpoint, start.draft_files.checkpoint)
    parts = [
        _sampled(path) for each in opened if isinstance(each, Checkpoint) for path in each.files
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _sampled(path: Path) -> str:
    """Returns a digest of a weight file: its tensor index and some bytes in the middle of each
    tensor.
    """
    tensors, first = contents(path)
    found = hashlib.sha256(json.dumps(tensors).encode())
    with path.open("rb", buffering=0) as file:
        for name, tensor in tensors.items():
            if name != "__metadata__":
                file.seek(first + sum(tensor["data_offsets"]) // 2)
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()
