"""Digest of a rank's model, weights, programs and pools, compared between ranks at the start."""

import hashlib
import json
from pathlib import Path

from shared.models.checkpoint import Checkpoint
from shared.models.safetensors_file import contents
from shared.process.start import ValidatedStartup

SAMPLE_BYTES = 64
"""Bytes sampled per tensor."""


def digest_of(start: ValidatedStartup) -> str:
    """Returns a digest that is equal on ranks with equal model, weights, programs and pools.

    Weights are sampled, as reading them whole takes as long as loading: another training run
    changes most tensors, so its samples differ. A difference outside the samples is not detected.
    """
    blueprint = start.memory.blueprint
    opened = (start.opened.checkpoint, start.draft_files.checkpoint)
    parts = (
        blueprint.config,
        blueprint.drafts,
        blueprint.capacity,
        blueprint.dtype,
        blueprint.on_gpu,
        blueprint.captured,
        sorted(blueprint.formats.items(), key=lambda each: each[0]),
        [_sampled(path) for each in opened if isinstance(each, Checkpoint) for path in each.files],
    )
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
