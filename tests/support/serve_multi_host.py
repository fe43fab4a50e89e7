"""`python -m tests.support.serve_multi_host ...` serves torch, each rank as if on its own host."""

from __future__ import annotations

import sys
from dataclasses import replace

from shared.process.device import Device
from shared.process.launch import launch
from torch_impl import platform


def find_device() -> Device:
    """Returns the device; afterwards this process reports that it shares no memory with others."""
    main = sys.modules["__main__"]
    if hasattr(main, "Rank"):
        main.boot = lambda: f"the host of {sys.argv[2]}"
    return platform.find_device()


PLATFORM = replace(platform.PLATFORM, find_device=find_device)

if __name__ == "__main__":
    raise SystemExit(launch(sys.argv[1:], lambda: PLATFORM, "tests.support.serve_multi_host"))
