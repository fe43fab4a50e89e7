"""Adaptive NGRAM speculation on the outputs of a model, in simulated time of measured costs.

    python -m bench.speculation.adaptive_ngram_replay --model models/demo/target \
        --costs bench/results/adaptive_h200_ngram_torch.json --out bench/results/FILE.json

Plain decoding answers the tasks of `bench.speculation.adaptive` once, on this machine. The outputs
are then replayed in simulated time, with the costs of each NGRAM start in each report: once for
each tier, once without drafts and once with the adaptive policy. The n-gram index contains the
outputs of earlier phases, so the phases are replayed in several orders and the results are summed.

With `--submit-us` they are also replayed in real time: the host is this machine, and submitting a
step takes the given time. Only this mode includes the cost of the index. Other load on the machine
changes the result, so use many orders.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.environment import versions, write_results
from bench.speculation.adaptive import lines_of, table_of, task_phases
from bench.speculation.recorded_tiers import seconds_by_tier
from shared.engine.adaptive.tiers import Tier
from shared.engine.request import Request, SamplingParams
from tests.support import in_process_engine
from tests.support.simulation.imposed import DISABLED, Runs, merged, real_time_runs, written_runs
from tests.support.simulation.phases import Phase

Line = dict[str, Any]
Texts = dict[int, list[int]]


def outputs_of(model: Path, phases: Sequence[Phase], most: int) -> tuple[list[Phase], Texts]:
    """The phases with requests as long as their answers, and the answers by seed."""
    requests = [request for phase in phases for request in phase.requests]
    longest = max(len(request.prompt) for request in requests)
    served = in_process_engine.start(
        "torch",
        ["--model-path", str(model), "--dtype", "float32"],
        batch=max(phase.batch for phase in phases),
        context=-(-(longest + most) // 64) * 64,
        radix_cache=False,
    )
    outcomes = in_process_engine.serve_all(served.engine, requests)
    served.engine.close()
    texts = {
        r.request_id + 1: outcome.tokens for r, outcome in zip(requests, outcomes, strict=True)
    }

    def again(request: Request) -> Request:
        key = request.request_id + 1
        sampling = SamplingParams(temperature=0.0, seed32=key, max_tokens=len(texts[key]))
        return Request(request_id=key, prompt=request.prompt, sampling=sampling)

    found = [
        replace(phase, requests=[again(r) for r in phase.requests], goes_on=True)
        for phase in phases
    ]
    return found, texts


def in_orders(
    seconds: dict[str, dict[str, float]],
    phases: Sequence[Phase],
    texts: Texts,
    orders: int,
    submit_s: float | None = None,
) -> list[Line]:
    """A line for each phase, over some orders of them.

    Args:
      submit_s: See `real_time_runs`; None: in simulated time.
    """
    measured = seconds_by_tier(seconds)
    table = {batch: list(each.values()) for batch, each in measured.items()}
    names = list(next(iter(measured.values())))
    tiers = tuple(Tier.parse(name) for name in names if name != DISABLED)
    rng, runs = np.random.default_rng(0), list[Runs]()
    for _ in range(orders):
        order = rng.permutation(len(phases))
        work = [phases[i] for i in order], texts
        if submit_s is None:
            found = written_runs(tiers, table, work, 1)
        else:
            found = real_time_runs(tiers, table, work, submit_s)
        back = np.argsort(order)
        runs.append({name: [served[i] for i in back] for name, served in found.items()})
    return lines_of(merged(runs), tiers)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m bench.speculation.adaptive_ngram_replay")
    found.add_argument("--model", type=Path, required=True, help="folder with a chat template")
    found.add_argument(
        "--costs",
        type=Path,
        nargs="+",
        required=True,
        help="result files of bench.speculation.adaptive",
    )
    found.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    found.add_argument("--count", type=int, default=32, help="tasks of a phase, or four a row")
    found.add_argument("--max-tokens", type=int, default=200)
    found.add_argument("--orders", type=int, default=6, help="number of orders of the phases")
    found.add_argument(
        "--submit-us", type=float, help="also in real time, with this time to submit a step"
    )
    found.add_argument("--out", type=Path, help="JSON file")
    return found


def main() -> int:
    """Measures as the options specify."""
    given = parser().parse_args()
    report: Line = {
        "command": shlex.join(
            ["python", "-m", "bench.speculation.adaptive_ngram_replay", *sys.argv[1:]]
        )
    }
    report |= {"texts": versions("torch", "cpu"), "starts": []}
    asked = task_phases(given.model, given.batch, given.count, given.max_tokens)
    phases, texts = outputs_of(given.model, asked, given.max_tokens)
    for path in given.costs:
        for start in json.loads(path.read_text(encoding="utf-8"))["starts"]:
            if start["drafts"] != "NGRAM":
                continue
            own = {key: start[key] for key in ("backend", "drafts", "device", "seconds")}
            lines = in_orders(own["seconds"], phases, texts, given.orders)
            print(table_of(f"{start['backend']}, {path.stem}", lines), flush=True)
            report["starts"].append({**own, "costs": path.name, "own_texts": lines})
            if given.submit_us is not None:
                how = phases, texts, given.orders, given.submit_us / 1e6
                real = in_orders(own["seconds"], *how)
                print(table_of(f"{start['backend']}, {path.stem}, in real time", real), flush=True)
                report["starts"][-1]["real_time"] = real
    if given.out:
        write_results(given.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
