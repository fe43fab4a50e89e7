"""`python -m torch_impl.serve` serves a checkpoint with torch, on a GPU where there is one."""

import os
import sys
from collections.abc import Sequence
from math import prod

import torch

from shared.boundary.backend import Limits
from shared.drafts.checkpoint import ModelFiles
from shared.models.checkpoint import Checkpoint, open_checkpoint, parameters
from shared.models.config import ModelConfig
from shared.options.options import Options
from shared.process.launch import DraftFiles, ProgressCall, launch
from shared.process.memory_plan import Device
from torch_impl.backend import Drafter, TorchBackend
from torch_impl.model import Model
from torch_impl.weights import load, load_head

ALL_THREADS = torch.get_num_threads()

SMALL_MODEL = 50_000_000
"""Parameters below which a CPU's threads wait for each other longer than they compute.

On two cores one thread decodes a model of 9 million parameters 1.4 to 1.8 times as fast as two, and
one of 600 million 0.7 times as fast.
"""


def find_device() -> Device:
    """The first GPU, or else the processor."""
    if not torch.cuda.is_available():
        return Device.cpu()
    return Device("gpu", torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0])


def load_backend(
    options: Options,
    checkpoint: Checkpoint,
    model: ModelConfig,
    head: DraftFiles,
    limits: Limits,
    progress: ProgressCall,
) -> TorchBackend:
    """Reads the weights onto the device and makes the backend; decoding on a GPU is captured."""
    with_mtp, dtype = options.speculative.with_mtp, options.model.dtype
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = load(checkpoint, model, with_mtp, dtype, device, progress)
    drafter: Drafter = "NEXTN" if with_mtp else "none"
    if isinstance(head, ModelFiles):
        small = load(head.checkpoint, head.config, False, dtype, device, progress)
        drafter = Model.of(head.config, small)
    elif head is not None:
        drafter = load_head(head.checkpoint, head.config, dtype, device, progress)
    if device.type == "cpu":
        take_threads(sum(prod(parameter.shape) for parameter in parameters(model, with_mtp)))
    graphs = device.type == "cuda"
    return TorchBackend(
        model, weights, limits, drafter, dtype=dtype, device=device, cuda_graphs=graphs
    )


def take_threads(num_parameters: int) -> None:
    """Gives an operation on a CPU one thread or all; OMP_NUM_THREADS stays what it is."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1 if num_parameters < SMALL_MODEL else ALL_THREADS)


def main(argv: Sequence[str]) -> int:
    """Serves until it is told to stop; returns the process's exit code."""
    return launch(argv, load_backend, open_checkpoint=open_checkpoint, find_device=find_device)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
