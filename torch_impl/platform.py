"""Torch platform of the server: device, weight loading, program costs and backend."""

import os
from collections.abc import Callable
from datetime import timedelta
from math import prod

import torch
import torch.distributed as distributed

from kernels.peer_buffers import symmetric_buffer_bytes
from shared.boundary.backend import BackendSpec
from shared.boundary.tp_group import TPGroup
from shared.drafts.checkpoint import DraftFiles
from shared.models.checkpoint import open_checkpoint
from shared.models.dummy_weights import Stored
from shared.models.parameters import parameters
from shared.process.buckets import ProgramCosts
from shared.process.start import Platform
from torch_impl.backend import TorchBackend
from torch_impl.devices import find_device
from torch_impl.kernel_limits import KERNEL_LIMITS
from torch_impl.weights import load, load_head, load_vision_encoder
from torch_impl.workspace import workspace

ALL_THREADS = torch.get_num_threads()

MEET_S = 10.0
"""Seconds that a rank waits for a rank of another host, at startup and in each all-gather."""

SMALL_MODEL = 50_000_000
"""Parameters below which a CPU's threads wait for each other longer than they compute.

On two cores one thread decodes a model of 9 million parameters 1.4 to 1.8 times as fast as two, and
one of 600 million 0.7 times as fast.
"""


def load_backend(
    blueprint: BackendSpec,
    checkpoint: Stored,
    draft_files: DraftFiles,
    progress: Callable[[int], None],
) -> TorchBackend:
    """Loads the weights to the device and creates the backend; steps on a GPU are captured."""
    _meet(blueprint.ranks, blueprint.on_gpu)
    model, with_mtp = blueprint.config, blueprint.drafts.with_mtp
    device = torch.device("cuda" if blueprint.on_gpu else "cpu")
    placement = (blueprint.dtype, device, progress)
    formats, group = blueprint.formats, blueprint.ranks
    token_map = blueprint.drafts.token_map
    weights = load(
        checkpoint, model, with_mtp, *placement, formats, group=group, token_map=token_map
    )
    draft_weights = draft_files.read(
        lambda files, config: load_head(files, config, *placement, group=group),
        lambda files, config: load(files, config, False, *placement, {}, group=group),
    )
    images, tower = blueprint.capacity.images, None
    if images is not None:
        tower = load_vision_encoder(checkpoint, images.vision, *placement)
    if device.type == "cpu":
        set_cpu_threads(sum(prod(parameter.shape) for parameter in parameters(model, with_mtp)))
    return TorchBackend(
        model,
        weights,
        blueprint.capacity,
        blueprint.drafts,
        draft_weights,
        dtype=blueprint.dtype,
        device=device,
        captured=blueprint.captured if blueprint.on_gpu else (),
        group=group,
        tower=tower,
    )


def _meet(group: TPGroup, on_gpu: bool) -> None:
    """Connects ranks on different hosts; all ranks call it before they load weights."""
    if group.meeting is not None:
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"tcp://{group.meeting}",
            rank=group.rank,
            world_size=group.count,
            timeout=timedelta(seconds=MEET_S),
        )


PLATFORM = Platform(
    find_device=find_device,
    open_checkpoint=open_checkpoint,
    costs=ProgramCosts(
        workspace=workspace,
        are_compiled=False,
        has_shm_all_gather=True,
        captures=True,
        symmetric_buffer_bytes=symmetric_buffer_bytes,
    ),
    kernels=KERNEL_LIMITS,
    load=load_backend,
)


def set_cpu_threads(num_parameters: int) -> None:
    """Sets one thread or all threads per CPU operation; OMP_NUM_THREADS has priority."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1 if num_parameters < SMALL_MODEL else ALL_THREADS)
