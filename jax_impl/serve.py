"""`python -m jax_impl.serve`: serves a checkpoint with JAX, on a GPU if there is one."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from shared.process.launch import launch

SERVE = "jax_impl.serve"
GPU_SHARE = "0.95"
"""Fraction of GPU memory that JAX reserves at its first use, unless the environment sets another;
the default of JAX is 0.75."""


def platform() -> Any:
    """Returns the `Platform` of JAX, which is imported once flags and files are right."""
    from jax_impl.platform import PLATFORM

    return PLATFORM


def main(argv: Sequence[str]) -> int:
    """Runs the server until it is stopped; returns the exit code of the process."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_SHARE)
    return launch(argv, platform, packages=("jax", "jaxlib"), serve_module=SERVE)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
