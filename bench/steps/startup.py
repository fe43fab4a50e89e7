"""Seconds until a server is ready, and a check that nothing is compiled after it.

    python -m bench.steps.startup --backend jax --requests 200 --out FILE -- \
        --speculative-algorithm NEXTN

The start is the server's own without the HTTP process: plan, weights, every program. Then mixed
requests are served (prompts of all lengths, greedy and sampled, penalties, logprobs, draft limits).
A program that is compiled or captured meanwhile ends the bench with an error.
"""

import argparse
import json
import os
import random
import time
from importlib import import_module
from pathlib import Path

from bench.common.environment import provenance, versions
from shared.boundary.backend import BackendLimits
from shared.engine.request import Request, SamplingParams
from shared.options.command_line import parse
from shared.process import engines
from shared.process.tp.startup import tp_startup
from tests.support.in_process_engine import made_programs, serve_all


def mixed_requests(count: int, capacity: BackendLimits) -> list[Request]:
    """Requests of every kind that a server takes; the same for every backend."""
    rng, made = random.Random(7), []
    for index in range(count):
        longest = min(capacity.context_length - 64, 600)
        length = rng.choice([1, 7, 63, 64, 65, rng.randint(2, longest)])
        sampling = SamplingParams(
            seed32=index,
            max_tokens=rng.randint(1, 40),
            temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([None, 20]),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            logprobs=rng.choice([None, None, None, 2]),
        )
        prompt = tuple(rng.randrange(2, capacity.vocab) for _ in range(length))
        made.append(Request(request_id=index, prompt=prompt, sampling=sampling))
    return made


def measure(framework: str, flags: list[str], requests: int) -> dict:
    """One start; raises AssertionError where something was made after it."""
    began = time.perf_counter()
    module = f"{framework}_impl.platform"
    of_ranks = module if framework == "torch" else None
    platform = lambda: import_module(module).PLATFORM  # noqa: E731
    with tp_startup(parse(flags), platform, of_ranks, print) as ranks:
        start = ranks.prepare()
        backend = ranks.load(start, lambda num_bytes: None)
        loaded = time.perf_counter()
        programs = backend.capacity.programs
        backend.prepare(programs, lambda program: None)
    ready = time.perf_counter()
    engine, made = engines.make_engine(backend, start.memory), made_programs(backend)
    outcomes = serve_all(engine, mixed_requests(requests, backend.capacity))
    served = time.perf_counter()
    line = {
        "backend": framework,
        "flags": " ".join(flags),
        "programs": len(programs),
        "made": made,
        "seconds_to_load": round(loaded - began, 2),
        "seconds_to_prepare": round(ready - loaded, 2),
        "seconds_until_ready": round(ready - began, 2),
        "requests": len(outcomes),
        "seconds_to_serve": round(served - ready, 2),
        "made_after_the_start": made_programs(backend) - made,
    }
    backend.close()
    assert line["made_after_the_start"] == 0, line
    return line


def main() -> None:
    """Measures one start and writes it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("torch", "jax"), required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--out", type=Path, help="JSON file; lines are appended")
    parser.add_argument("flags", nargs="*", help="server flags, after --")
    args = parser.parse_args()
    line = measure(args.backend, args.flags, args.requests)
    command = f"python -m bench.steps.startup --backend {args.backend} --requests {args.requests}"
    if xla := os.environ.get("XLA_FLAGS"):
        command = f"XLA_FLAGS='{xla}' {command}"
    line = {"command": f"{command} -- {' '.join(args.flags)}".rstrip(" -")} | line
    device = (
        "cuda"
        if import_module(f"{args.backend}_impl.devices").find_device().kind == "gpu"
        else "cpu"
    )
    line |= provenance() | versions(args.backend, device) | {"cores": os.cpu_count()}
    print(json.dumps(line))
    if args.out:
        known = json.loads(args.out.read_text()) if args.out.exists() else []
        args.out.write_text(json.dumps([*known, line], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
