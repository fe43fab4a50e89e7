"""Where torch runs."""

import os

import torch

from shared.process.device import Device, check_no_gpu_is_named


def find_device() -> Device:
    """The first GPU, or else the processor.

    Raises:
      ConfigError: The environment names a GPU that is not there.
    """
    if not torch.cuda.is_available():
        check_no_gpu_is_named(os.environ)
        return Device.cpu()
    return Device("gpu", torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0])
