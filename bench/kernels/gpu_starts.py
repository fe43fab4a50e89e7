"""Starts models of many sizes on this machine's GPU in both backends and compares outputs.

    python -m bench.kernels.gpu_starts --shipped --random 20 --out bench/results/starts.json

Each start is a process with dummy weights and the first layers of a model, as in
`bench.kernels.aot`. It prepares the programs of the fewest and the most rows and serves a few
prompts. A line reports whether torch and JAX return the same tokens. The exit code is 1 if outputs
differ or a start fails. Random models are those of `bench.kernels.random_configs`.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.environment import versions, write_results
from bench.kernels.aot import add_bounds
from bench.kernels.random_configs import SEED, random_starts
from bench.kernels.starts import Start, chosen, one_of_each
from bench.kernels.workers import Done, shared_out
from shared.boundary.backend import BackendLimits
from shared.boundary.program import ProgramFeature
from shared.engine.request import Request, SamplingParams
from tests.support.in_process_engine import serve_all, started

BACKENDS = ("torch", "jax")
BOUNDS = ("--max-running-requests", "4", "--context-length", "256", "--chunked-prefill-size", "256")
"""Bounds of the shipped models; random ones have their own."""
PROMPTS, OUTPUT = (5, 40, 100, 17), 24
"""Tokens of the prompts, and of each output; the last prompt has a temperature."""


@dataclass(frozen=True)
class Ask:
    """A start of one backend.

    Attributes:
      start: What is started.
      backend: "torch" or "jax".
      flags: Of the server.
      is_brief: Only the programs of the most rows are made ready.
    """

    start: Start
    backend: str
    flags: tuple[str, ...]
    is_brief: bool


def answered(ask: Ask) -> dict[str, Any]:
    """Starts, serves the prompts and returns their tokens."""
    began = time.monotonic()
    served = started(ask.backend, ask.flags, partial(_narrowed, ask.is_brief))
    ready, capacity = time.monotonic() - began, served.backend.capacity
    rng = np.random.default_rng(SEED)
    requests = [
        Request(
            request_id=number,
            prompt=tuple(rng.integers(2, capacity.vocab, length).tolist()),
            sampling=SamplingParams(
                temperature=float(length == PROMPTS[-1]), seed32=number, max_tokens=OUTPUT
            ),
        )
        for number, length in enumerate(PROMPTS)
    ]
    texts = [outcome.tokens for outcome in serve_all(served.engine, requests)]
    served.engine.close()
    device = "cuda" if served.device == "gpu" else "cpu"
    return {
        "texts": texts,
        "programs": len(capacity.programs),
        "ready_s": round(ready, 1),
        "versions": versions(ask.backend, device),
    }


def _narrowed(is_brief: bool, capacity: BackendLimits) -> BackendLimits:
    """With the programs of the fewest and of the most rows; the latter serve all requests."""
    kept = [program for program in capacity.programs if not program.has(ProgramFeature.LOGPROBS)]
    return replace(capacity, programs=tuple(chosen(kept, is_brief)))


def results(asks: Sequence[Ask], options: argparse.Namespace) -> Iterator[Done]:
    """The answers as they come; a process has one, and takes only the memory that it needs."""
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return shared_out(answered, asks, options.jobs, options.limit_s, max_items=1)


def line_of(name: str, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the record of a start that both backends have answered."""
    texts = [answer.get("texts") for answer in found.values()]
    errors = {backend: x["error"] for backend, x in found.items() if "error" in x}
    kept = {
        backend: {name: x[name] for name in ("programs", "ready_s", "versions") if name in x}
        for backend, x in found.items()
    }
    are_equal = not errors and all(text == texts[0] for text in texts)
    return {"start": name, **kept, "errors": errors, "equal": are_equal}


def main() -> int:
    """Prints a line for each start; the exit code is 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shipped", action="store_true", help="all models of the repository")
    parser.add_argument("--random", type=int, default=0, help="random models")
    parser.add_argument("--brief", action="store_true", help="only the programs of the most rows")
    parser.add_argument("--only", nargs="+", default=[""], help="text in the name of a start")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--out", type=Path, help="JSON file")
    add_bounds(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        models = list(one_of_each()) * options.shipped
        starts = [replace(start, flags=(*start.flags, *BOUNDS)) for start in models]
        starts += random_starts(options.random, SEED, scratch, "torch")
        starts = [start for start in starts if any(text in str(start) for text in options.only)]
        asks = [
            Ask(start, backend, tuple(start.all_flags(scratch)), options.brief)
            for start in starts
            for backend in options.backends
        ]
        lines = list(_lines(asks, options))
    found = {
        "command": f"python -m bench.kernels.gpu_starts {shlex.join(sys.argv[1:])}",
        "starts": lines,
    }
    if options.out:
        write_results(options.out, found)
    equal = sum(line["equal"] for line in lines)
    print(f"{equal} of {len(lines)} starts have equal texts in both backends")
    return int(equal < len(lines))


def _lines(asks: Sequence[Ask], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for done in results(asks, options):
        ask: Ask = done.item
        answers = found.setdefault(str(ask.start), {})
        answers[ask.backend] = done.value or {"error": done.error}
        if len(answers) == len(options.backends):
            line = line_of(str(ask.start), answers)
            print(json.dumps(line), flush=True)
            yield line


if __name__ == "__main__":
    sys.exit(main())
