"""A short word for what a start will serve, to be compared between ranks."""

import hashlib
import json
from pathlib import Path

from shared.models.checkpoint import Checkpoint
from shared.models.safetensors_file import contents
from shared.process.start import Start

SAMPLE_BYTES = 64
"""Of each tensor."""


def digest_of(start: Start) -> str:
    """The same where model, weights, programs and pools are the same, whatever the process.

    Weights are told by a sample, as reading them whole takes as long as loading: another training
    changes most tensors, and its sample differs. A file that differs elsewhere alone is not seen.
    """
    blueprint = start.memory.blueprint
    opened = (start.checkpoint, start.draft_files.checkpoint)
    said = (
        blueprint.config,
        blueprint.drafts,
        blueprint.capacity,
        blueprint.dtype,
        blueprint.on_gpu,
        blueprint.captured,
        sorted(blueprint.in_words),
        sorted(blueprint.in_codes),
        [_sampled(path) for each in opened if isinstance(each, Checkpoint) for path in each.files],
    )
    return hashlib.sha256(repr(said).encode()).hexdigest()


def _sampled(path: Path) -> str:
    """Stands for a file: what it says of its tensors, and some bytes in the middle of each."""
    tensors, first = contents(path)
    found = hashlib.sha256(json.dumps(tensors).encode())
    with path.open("rb", buffering=0) as file:
        for name, tensor in tensors.items():
            if name != "__metadata__":
                file.seek(first + sum(tensor["data_offsets"]) // 2)
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()
