"""`python -m torch_impl.serve` serves a checkpoint with torch, on a GPU where there is one."""

import sys
from collections.abc import Sequence

from shared.process.launch import launch
from shared.process.start import Platform

MODULE = "torch_impl.platform"


def platform() -> Platform:
    """It brings torch, once flags are right and other ranks have begun."""
    from torch_impl.platform import PLATFORM

    return PLATFORM


def main(argv: Sequence[str]) -> int:
    """Serves until it is told to stop; returns the process's exit code."""
    return launch(argv, platform, rank_module=MODULE)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
