"""Device selection of the torch backend."""

import os

import torch

from shared.process.device import Device, check_gpu_environment


def find_device() -> Device:
    """Returns the first GPU, or the CPU if there is none.

    Raises:
      ConfigError: The environment names a GPU that is not there.
    """
    if not torch.cuda.is_available():
        check_gpu_environment(os.environ)
        return Device.cpu()
    return Device("gpu", torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0])
