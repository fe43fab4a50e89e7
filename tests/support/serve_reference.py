"""`python -m tests.support.serve_reference --model-path ...` serves the numpy reference backend."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

import numpy as np

from shared.boundary.backend import BackendSpec
from shared.drafts.checkpoint import DraftFiles, load_head
from shared.models.checkpoint import Checkpoint, Weights, open_checkpoint
from shared.models.config import ModelConfig
from shared.models.parameters import parameters
from shared.models.vision_parameters import vision_encoder_parameters
from shared.process.buckets import ProgramCosts
from shared.process.device import Device
from shared.process.launch import launch
from shared.process.start import Platform
from shared.reference.backend import ReferenceBackend
from shared.reference.workspace import workspace


def load(
    blueprint: BackendSpec,
    checkpoint: Checkpoint,
    draft_files: DraftFiles,
    progress: Callable[[int], None],
) -> ReferenceBackend:
    """Reads the weights in one go."""

    def read_model(files: Checkpoint, config: ModelConfig) -> Weights:
        wanted = parameters(config, config is model and blueprint.drafts.with_mtp)
        return {p.name: files.load(p, np.float32, progress) for p in wanted}

    model = blueprint.config
    draft_weights = draft_files.read(
        lambda files, config: load_head(files, config, np.float32, progress).weights, read_model
    )
    made_for = (blueprint.capacity, blueprint.drafts, draft_weights)
    images, tower = blueprint.capacity.images, None
    if images is not None:
        wanted = vision_encoder_parameters(images.vision)
        tower = {p.name: checkpoint.load(p, np.float32, progress) for p in wanted}
    return ReferenceBackend(model, read_model(checkpoint, model), *made_for, tower)


PLATFORM = Platform(
    find_device=Device.cpu,
    open_checkpoint=open_checkpoint,
    costs=ProgramCosts(workspace=workspace, are_compiled=False),
    kernels=None,
    load=load,
)


def platform_of(framework: str) -> Platform:
    """Returns the platform of `reference`, `torch` or `jax`; imports the framework."""
    if framework == "reference":
        return PLATFORM
    return import_module(f"{framework}_impl.platform").PLATFORM


if __name__ == "__main__":
    raise SystemExit(launch(sys.argv[1:], lambda: PLATFORM, "tests.support.serve_reference"))
