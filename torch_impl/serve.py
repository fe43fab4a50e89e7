"""`python -m torch_impl.serve` serves a checkpoint with torch, on a GPU where there is one."""

import sys
from collections.abc import Sequence

import torch

from shared.backend import Limits
from shared.checkpoint import Checkpoint, open_checkpoint
from shared.config import Options
from shared.draft_checkpoint import ModelFiles
from shared.memory_plan import Device
from shared.model_config import ModelConfig
from shared.server.launch import DraftFiles, ProgressCall, launch
from torch_impl.backend import Drafter, TorchBackend
from torch_impl.model import Model
from torch_impl.weights import load, load_head


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
    graphs = device.type == "cuda"
    return TorchBackend(
        model, weights, limits, drafter, dtype=dtype, device=device, cuda_graphs=graphs
    )


def main(argv: Sequence[str]) -> int:
    """Serves until it is told to stop; returns the process's exit code."""
    return launch(argv, load_backend, open_checkpoint=open_checkpoint, find_device=find_device)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
