"""`python -m tests.support.elsewhere_serve ...` serves torch, each rank as if on its own host."""

from __future__ import annotations

import sys
from dataclasses import replace

from shared.process.device import Device
from shared.process.launch import launch
from torch_impl import serve


def find_device() -> Device:
    """The device, after which this process says that it shares no memory with others."""
    main = sys.modules["__main__"]
    if hasattr(main, "Rank"):
        main.boot = lambda: f"the host of {sys.argv[2]}"
    return serve.find_device()


PLATFORM = replace(
    serve.PLATFORM, find_device=find_device, rank_module="tests.support.elsewhere_serve"
)

if __name__ == "__main__":
    raise SystemExit(launch(sys.argv[1:], PLATFORM))
