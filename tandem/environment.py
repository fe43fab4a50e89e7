"""Versions of an installation, for bug reports: no path, host name or setting of the user's."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from shared import VERSION

FRAMEWORKS = ("torch", "triton", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")
LIBRARIES = (
    *("numpy", "numba", "safetensors", "tokenizers", "llguidance", "transformers"),
    *("huggingface-hub", "fastapi", "starlette", "uvicorn", "httptools", "pydantic", "pillow"),
)
GPU_FIELDS = "name,driver_version,memory.total,compute_cap"
TIMEOUT_S = 20.0


def lines() -> Iterator[str]:
    """Yields a line for each fact: `name: value`."""
    yield f"tandem: {VERSION}"
    yield f"python: {platform.python_version()} ({platform.python_implementation()})"
    yield f"system: {platform.system()} {platform.release()} {platform.machine()}"
    yield f"libc: {' '.join(platform.libc_ver())}"
    yield f"processor: {_processor()}, {_usable_cores()} cores"
    yield f"memory: {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    yield from (f"gpu: {gpu}" for gpu in _gpus())
    yield from (f"{name}: {_version(name)}" for name in (*FRAMEWORKS, *LIBRARIES))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def _gpus() -> list[str]:
    """One line for each GPU that the driver lists, or the reason why there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ["none (nvidia-smi was not found)"]
    command = [program, f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"unknown (nvidia-smi failed: {type(error).__name__})"]
    names = done.stdout.split("\n") if done.returncode == 0 else []
    found = [f"{name} (name, driver, memory, compute capability)" for name in names if name.strip()]
    return found or [f"none (nvidia-smi ended with code {done.returncode})"]
