"""Unoptimised code of XLA on a CPU, for programs without options of their own.

Optimised code of an interpreted kernel or a small operation takes five times as long to compile,
and runs once.
"""

import os
from importlib.metadata import version
from pathlib import Path

FLAGS = ("--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1")
OLDER_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
"""A flag that XLA has until jaxlib 0.10; later versions end at an unknown flag."""
HAS_GPU = Path("/dev/nvidiactl").exists()
"""True if the level of optimisation would also be that of kernels on a GPU."""


def compile_quickly() -> None:
    """Sets XLA's flags for this process and those that it starts, before JAX has its devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    if HAS_GPU or FLAGS[0] in flags:
        return
    emitters = (OLDER_EMITTERS,) if version("jaxlib").startswith("0.10.") else ()
    os.environ["XLA_FLAGS"] = " ".join([flags, *FLAGS, *emitters]).strip()
