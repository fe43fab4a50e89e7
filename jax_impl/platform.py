"""JAX platform of the server: device, weight loading, program costs and backend."""

import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_impl import convert
from jax_impl.backend import JaxBackend
from jax_impl.devices import find_device
from jax_impl.kernel_limits import KERNEL_LIMITS
from jax_impl.mesh import RankMesh, free_on_each, reserve_host_devices
from jax_impl.weights import Loaded, load, load_head, load_vision_encoder
from jax_impl.workspace import workspace
from kernels.peer_buffers import symmetric_buffer_bytes
from shared.boundary.backend import BackendSpec
from shared.boundary.tp_group import TPGroup
from shared.drafts.checkpoint import DraftFiles
from shared.models.dummy_weights import Stored
from shared.process.buckets import ProgramCosts
from shared.process.start import Platform

CACHE_FOLDER = (
    Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tandem" / "programs"
)
"""Folder of the compilation cache."""


def load_backend(
    blueprint: BackendSpec,
    checkpoint: Stored | convert.OrbaxCheckpoint,
    draft_files: DraftFiles,
    progress: Callable[[int], None],
) -> JaxBackend:
    """Loads the weights to the device of each rank and creates the backend."""
    device, group = jax.devices()[0], blueprint.ranks
    if not group.is_single and isinstance(checkpoint, convert.OrbaxCheckpoint):
        raise ValueError(
            f"--tp-size {group.count} is not supported with an Orbax checkpoint, whose arrays are "
            "read whole; use the Hugging Face folder"
        )
    together = RankMesh.of(device, group)
    loaded = [
        read_weights(blueprint, checkpoint, draft_files, each, progress, rank)
        for each, rank in zip(together.devices, together.ranks, strict=True)
    ]
    towers, images = [], blueprint.capacity.images
    if images is not None:
        assert not isinstance(checkpoint, convert.OrbaxCheckpoint)  # has no vision encoder
        tower_source = (checkpoint, images.vision, jnp.dtype(blueprint.dtype))
        for each in together.devices:  # progress counts the bytes of the first device only
            towers.append(
                load_vision_encoder(*tower_source, each, _ignore_progress if towers else progress)
            )
    draft_weights = [own for _, own in loaded if own is not None]
    return JaxBackend(
        blueprint.config,
        [weights for weights, _ in loaded],
        blueprint.capacity,
        blueprint.drafts,
        draft_weights or None,
        dtype=blueprint.dtype,
        device=device,
        quick_compile=False,
        kept_in=CACHE_FOLDER,
        group=group,
        tower=towers or None,
    )


def _ignore_progress(num_bytes: int) -> None:
    """Ignores the progress of repeated reads."""


def read_weights(
    blueprint: BackendSpec,
    checkpoint: Stored | convert.OrbaxCheckpoint,
    draft_files: DraftFiles,
    device: jax.Device,
    progress: Callable[[int], None],
    group: TPGroup,
) -> tuple[Loaded, Loaded | None]:
    """Loads a rank's shard of the model and of the drafter, if the drafter has weights."""
    placement = (jnp.dtype(blueprint.dtype), device, progress)
    model, with_mtp = blueprint.config, blueprint.drafts.with_mtp
    formats = blueprint.formats
    token_map = blueprint.drafts.token_map
    weights = load(
        checkpoint, model, with_mtp, *placement, formats, group=group, token_map=token_map
    )
    draft_weights = draft_files.read(
        lambda files, config: load_head(files, config, *placement, group=group),
        lambda files, config: load(files, config, False, *placement, {}, group=group),
    )
    return weights, draft_weights


PLATFORM = Platform(
    find_device=find_device,
    open_checkpoint=convert.open_checkpoint,
    costs=ProgramCosts(
        workspace=workspace, are_compiled=True, symmetric_buffer_bytes=symmetric_buffer_bytes
    ),
    kernels=KERNEL_LIMITS,
    load=load_backend,
    take_devices=reserve_host_devices,
    free_on_each=free_on_each,
)
