"""Seconds and main memory of reading a checkpoint onto the device.

    python -m bench.steps.weight_loading --shape bench/shapes/qwen3-8b --out FILE

A checkpoint of the shape with one repeated number is written first. Then a separate process reads
it with each backend, repeatedly. The files are in the page cache by then if it has room, so the
disk is not measured. Memory is the process's own; pages of the files belong to the system.

`--tree` lists folders with other sources of this project, to compare revisions: a process imports
`shared` and its backend from there.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from bench.common.environment import versions, write_results
from shared.models.checkpoint import INDEX_FILE, open_checkpoint
from shared.models.families import config_from_folder
from shared.models.parameters import parameters

ROOT = Path(__file__).resolve().parents[2]
SHARD_BYTES = 1_000_000_000
"""Bytes after which a file of the checkpoint is written, so that memory never holds all of it."""

OWN = (("/proc/self/status", "RssAnon:"), ("/proc/self/smaps", "Anonymous:"))
"""Files and lines with the anonymous resident memory of this process; gVisor has the second
only.
"""

MOST_LOOKING = 0.1
"""Share of the time for reading memory counters."""

Line = dict[str, Any]


def write(shape: Path, folder: Path) -> dict[str, float]:
    """Writes a checkpoint in bfloat16; gives its bytes, and those of its largest tensor."""
    text = (shape / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(text, encoding="utf-8")
    sizes: list[int] = []
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(_shards(shape), start=1):
        file = folder / f"model-{number:05}.safetensors"
        save_file(tensors, file)
        with file.open("rb") as written:
            os.fsync(written.fileno())  # or it is written while another reads
        sizes += [tensor.nbytes for tensor in tensors.values()]
        weight_map |= dict.fromkeys(tensors, file.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    return {"checkpoint_gb": sum(sizes) / 1e9, "largest_tensor_gb": max(sizes) / 1e9}


def _shards(shape: Path) -> Iterator[dict[str, np.ndarray]]:
    """The tensors of each file."""
    tensors: dict[str, np.ndarray] = {}
    for parameter in parameters(config_from_folder(shape), with_mtp=False):
        for source in parameter.sources:
            prefix = "" if source.name.startswith("lm_head.") else "model."
            tensors[prefix + source.name] = np.full(source.shape, 0.01, ml_dtypes.bfloat16)
            if sum(tensor.nbytes for tensor in tensors.values()) >= SHARD_BYTES:
                yield tensors
                tensors = {}
    if tensors:
        yield tensors


def own_gigabytes() -> float:
    """Returns the private memory of the process.

    Raises:
      RuntimeError: The system does not report it.
    """
    for path, name in OWN:
        text = Path(path).read_text(encoding="utf-8")
        if found := [int(line.split()[1]) for line in text.splitlines() if line.startswith(name)]:
            return sum(found) * 1024 / 1e9
    raise RuntimeError(f"none of {OWN} is there, so that memory cannot be measured")


class Peak(threading.Thread):
    """Within it the highest of `own_gigabytes`, looked at every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest, self._ended = own_gigabytes(), threading.Event()

    def run(self) -> None:
        """Looks until it is ended, and seldom where looking takes long."""
        pause = 0.003
        while not self._ended.wait(pause):
            began = time.perf_counter()
            self.highest = max(self.highest, own_gigabytes())
            pause = max(0.003, (time.perf_counter() - began) / MOST_LOOKING)

    def __enter__(self) -> "Peak":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def measure(backend: str, folder: Path) -> Line:
    """Loads the checkpoint once, in bfloat16, and reports the time and memory."""
    weights, config = import_module(f"{backend}_impl.weights"), config_from_folder(folder)
    framework = import_module(backend)
    where = "cpu"
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
        read = weights.load(checkpoint, config, False, *placement, lambda num_bytes: None, {})
        if backend == "jax":
            framework.block_until_ready(framework.live_arrays())
        elif where == "cuda":
            framework.cuda.synchronize()
        seconds = time.perf_counter() - began
    del read
    return {
        "seconds": round(seconds, 3),
        "peak_gb": round(peak.highest - before, 3),
        **versions(backend, where),
    }


def _measured_apart(tree: Path, backend: str, folder: Path) -> Line:
    """`measure` in a process of its own, with the sources of a tree."""
    paths = [str(tree.resolve()), str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, __file__, "--read", str(folder), "--backend", backend],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _line(tree: Path, backend: str, rounds: Sequence[Line]) -> Line:
    """Returns the result of one backend's rounds."""
    seconds = [each["seconds"] for each in rounds]
    return {
        **rounds[0],
        "backend": backend,
        "tree": str(tree),
        "seconds": round(statistics.median(seconds), 3),
        "seconds_low": min(seconds),
        "seconds_high": max(seconds),
        "peak_gb": max(each["peak_gb"] for each in rounds),
    }


def run(options: argparse.Namespace, command: str) -> Line:
    """Writes the checkpoint, and reads it with everything that the options name, in turn.

    Raises:
      RuntimeError: See `own_gigabytes`.
    """
    own_gigabytes()
    sides = [(tree, backend) for tree in options.tree for backend in options.backend]
    found: dict[tuple[Path, str], list[Line]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        sizes = write(options.shape, Path(folder))
        for _ in range(options.rounds):
            for side in sides:
                found[side].append(_measured_apart(*side, Path(folder)))
    lines = [_line(*side, found[side]) for side in sides]
    for each in lines:
        where = each["device"] or "cpu"
        print(
            f"{each['backend']:6}{where}, {each['tree']}: {each['seconds']:.2f} s "
            f"({each['seconds_low']:.2f} to {each['seconds_high']:.2f}), "
            f"at most {each['peak_gb']:.2f} GB of main memory"
        )
    rounded = {name: round(size, 3) for name, size in sizes.items()}
    return {"command": command, **rounded, "lines": lines}


def main() -> None:
    """Measures what is named, and writes what it found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", type=Path, help="folder with a config.json")
    what.add_argument("--read", type=Path, help="checkpoint to read once in this process")
    parser.add_argument("--backend", nargs="+", choices=("torch", "jax"), required=True)
    parser.add_argument(
        "--tree", nargs="+", type=Path, default=[Path()], help="folders of sources to compare"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    if options.read:
        print(json.dumps(measure(options.backend[0], options.read)))
        return
    found = run(options, shlex.join(["python", "-m", "bench.steps.weight_loading", *sys.argv[1:]]))
    if options.out:
        write_results(options.out, found)


if __name__ == "__main__":
    main()
