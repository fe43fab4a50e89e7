"""`python -m jax_impl.serve` serves a checkpoint with JAX, on a GPU where there is one."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_impl import convert
from jax_impl.backend import Drafter, JaxBackend
from jax_impl.weights import LoadedModel, load, load_head
from shared.boundary.backend import Limits
from shared.drafts.checkpoint import ModelFiles
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.options.options import Options
from shared.process.launch import DraftFiles, ProgressCall, launch
from shared.process.memory_plan import Device

CACHE_FOLDER = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tandem" / "xla"
"""Compiled programs are kept here from one start to the next."""


def find_device() -> Device:
    """The first GPU, or else the processor."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return Device.cpu()
    stats = device.memory_stats()
    return Device("gpu", device.device_kind, stats["bytes_limit"] - stats["bytes_in_use"])


def load_backend(
    options: Options,
    checkpoint: Checkpoint | convert.OrbaxCheckpoint,
    model: ModelConfig,
    head: DraftFiles,
    limits: Limits,
    progress: ProgressCall,
) -> JaxBackend:
    """Reads the weights onto the device and makes the backend."""
    with_mtp, dtype, device = options.speculative.with_mtp, options.model.dtype, jax.devices()[0]
    jax.config.update("jax_compilation_cache_dir", str(CACHE_FOLDER))
    kind = jnp.dtype(dtype)
    weights = load(checkpoint, model, with_mtp, kind, device, progress)
    drafter: Drafter = "NEXTN" if with_mtp else "none"
    if isinstance(head, ModelFiles):
        small = load(head.checkpoint, head.config, False, kind, device, progress)
        drafter = LoadedModel(head.config, small)
    elif head is not None:
        drafter = load_head(head.checkpoint, head.config, kind, device, progress)
    return JaxBackend(
        model, weights, limits, drafter, dtype=dtype, device=device, quick_compile=False
    )


def main(argv: Sequence[str]) -> int:
    """Serves until it is told to stop; returns the process's exit code."""
    return launch(
        argv, load_backend, open_checkpoint=convert.open_checkpoint, find_device=find_device
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
