"""Seconds and main memory of reading a checkpoint onto the device.

    python -m bench.steps.loading --shape bench/shapes/qwen3-8b --backend torch --out FILE

A checkpoint of the shape is written first, of one number throughout. What is measured is memory of
the process's own: pages of the file that is read are the system's, which gives them up at need.
"""

import argparse
import gc
import json
import shlex
import sys
import tempfile
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from bench.ground.machine import versions
from shared.models.checkpoint import SINGLE_FILE, open_checkpoint
from shared.models.families import config_from_folder
from shared.models.parameters import parameters

OWN = "RssAnon"
"""Of a process's status: resident memory that no file stands behind."""


def write(shape: Path, folder: Path) -> dict[str, float]:
    """Writes a checkpoint in bfloat16; gives its bytes, and those of its largest tensor."""
    text = (shape / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(text, encoding="utf-8")
    tensors = {}
    for parameter in parameters(config_from_folder(shape), with_mtp=False):
        for source in parameter.sources:
            prefix = "" if source.name.startswith("lm_head.") else "model."
            tensors[prefix + source.name] = np.full(source.shape, 0.01, ml_dtypes.bfloat16)
    save_file(tensors, folder / SINGLE_FILE)
    sizes = [tensor.nbytes for tensor in tensors.values()]
    return {"checkpoint_gb": sum(sizes) / 1e9, "largest_tensor_gb": max(sizes) / 1e9}


def own_gigabytes() -> float:
    """What the process holds by itself."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith(OWN))
    return int(line.split()[1]) * 1024 / 1e9


class Peak(threading.Thread):
    """Within it the highest of `own_gigabytes`, looked at every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest, self._ended = own_gigabytes(), threading.Event()

    def run(self) -> None:
        """Looks until it is ended."""
        while not self._ended.wait(0.003):
            self.highest = max(self.highest, own_gigabytes())

    def __enter__(self) -> "Peak":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def measure(backend: str, folder: Path) -> dict[str, float]:
    """Reads the checkpoint once, in bfloat16."""
    weights, config = import_module(f"{backend}_impl.weights"), config_from_folder(folder)
    framework = import_module(backend)
    if backend == "torch":
        where = "cuda" if framework.cuda.is_available() else "cpu"
        framework.zeros(1, device=where)  # what the framework itself takes is not counted
        placement: tuple[Any, ...] = ("bfloat16", framework.device(where))
    else:
        placement = (ml_dtypes.bfloat16, framework.devices()[0])
        framework.numpy.zeros(1).block_until_ready()
    checkpoint, before = open_checkpoint(folder), own_gigabytes()
    with Peak() as peak:
        began = time.perf_counter()
        read = weights.load(checkpoint, config, False, *placement, lambda num_bytes: None)
        if backend == "jax":
            framework.block_until_ready(framework.tree.leaves(read))
        elif where == "cuda":
            framework.cuda.synchronize()
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak_gb": peak.highest - before}


def main() -> None:
    """Measures each backend that is named, and writes what it found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", type=Path, required=True, help="folder with a config.json")
    parser.add_argument("--backend", choices=("torch", "jax"), required=True)
    parser.add_argument("--out", type=Path, help="JSON file")
    given = parser.parse_args()
    device = import_module(f"{given.backend}_impl.devices").find_device()
    with tempfile.TemporaryDirectory() as folder:
        found = write(given.shape, Path(folder))
        gc.collect()
        found |= measure(given.backend, Path(folder))
    command = shlex.join(["python", "-m", "bench.steps.loading", *sys.argv[1:]])
    rounded = {name: round(value, 2) for name, value in found.items()}
    line = {"command": command, "device": device.name, **rounded}
    line |= versions(given.backend, "cuda" if device.kind == "gpu" else "cpu")
    print(json.dumps(line))
    if given.out:
        given.out.write_text(json.dumps(line, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
