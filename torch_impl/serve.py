"""`python -m torch_impl.serve`: serves a checkpoint with torch, on a GPU if there is one."""

import sys
from collections.abc import Sequence
from typing import Any

from shared.process.launch import launch

MODULE = "torch_impl.platform"
SERVE = "torch_impl.serve"


def platform() -> Any:
    """Returns the `Platform` of torch, which is imported once flags and files are right."""
    from torch_impl.platform import PLATFORM

    return PLATFORM


def main(argv: Sequence[str]) -> int:
    """Runs the server until it is stopped; returns the exit code of the process."""
    return launch(argv, platform, rank_module=MODULE, packages=("torch",), serve_module=SERVE)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
