"""`python -m tests.support.reference_serve --model-path ...` serves the numpy reference backend."""

from __future__ import annotations

import sys

import numpy as np

from shared.boundary.backend import Limits
from shared.drafts.checkpoint import ModelFiles, load_head
from shared.models.checkpoint import Checkpoint, load_all, open_checkpoint
from shared.models.config import ModelConfig
from shared.options.options import Options
from shared.process.launch import DraftFiles, ProgressCall, launch
from shared.process.memory_plan import Device
from shared.reference.backend import ReferenceBackend
from shared.spec.standalone import SmallModel


def load(
    options: Options,
    checkpoint: Checkpoint,
    model: ModelConfig,
    head: DraftFiles,
    limits: Limits,
    progress: ProgressCall,
) -> ReferenceBackend:
    """Reads the weights in one go."""
    with_mtp = options.speculative.with_mtp
    weights = load_all(options.model.model_path, model, with_mtp)
    drafter = "NEXTN" if with_mtp else "none"
    if isinstance(head, ModelFiles):
        own = load_all(options.speculative.head_path, head.config, False)
        drafter = SmallModel(head.config, own, model.vocab)
    elif head is not None:
        drafter = load_head(head.checkpoint, head.config, np.float32)
    return ReferenceBackend(model, weights, limits, drafter)


if __name__ == "__main__":
    raise SystemExit(
        launch(sys.argv[1:], load, open_checkpoint=open_checkpoint, find_device=Device.cpu)
    )
