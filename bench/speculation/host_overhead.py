"""Host time to plan, submit and retire a decode step, next to the step of the device.

    python -m bench.speculation.host_overhead --rows 1 32 256 --out bench/results/host.json

The device is a table of numbers (`tests/support/simulation`), and its own time is subtracted. The
rest is scheduler, controller, prefix cache, planner and handling of results. All requests have a
slot and decode; each step tracks a recurrent state and has a drafter with a head. Device times were
measured on an H200. Chains of 256 rows were not, so the shorter plain step of that size is used.
The adaptive policy chooses among `--tiers`; the fixed chain is the first of them that drafts.
"""

import argparse
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.environment import write_results
from shared.boundary.backend import BackendLimits, StepPlan
from shared.engine.adaptive.controller import AdaptiveController
from shared.engine.adaptive.policy import ExpectedValuePolicy
from shared.engine.adaptive.tiers import Tier
from shared.engine.cache_policy import NO_CACHE, CachePolicy
from shared.engine.controller import Controller, StaticController
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from tests.support.simulation.device import (
    MOST_DEPTH,
    Known,
    SimulatedBackend,
    simulated_capacity,
)

PROMPT, WARM_UP, STEPS = 200, 20, 200
DEVICE_MS = {False: {1: 4.4, 32: 6.0, 256: 17.7}, True: {1: 6.5, 32: 10.2, 256: 17.7}}
"""Steps of Qwen3.5-9B (`docs/performance.md`): plain ones, and NEXTN's chains of three drafts."""

HYBRID_HEAD = CachePolicy(
    is_on=True, key_lookahead=1, may_skip_draft_kv=True, draft_reads_kv=False, track_interval=64
)
HEADER = f"{'controller':14}{'cache':8}{'rows':>6}{'host us':>10}{'device ms':>11}{'share':>8}"

Line = dict[str, Any]


class Timed(SimulatedBackend):
    """The table of numbers, with the time of its own lookup."""

    own_seconds = 0.0

    def submit(self, plan: StepPlan) -> Known:
        """See `Backend`."""
        began = time.perf_counter()
        found = super().submit(plan)
        self.own_seconds += time.perf_counter() - began
        return found


def capacity_of(rows: int, tiers: Sequence[Tier]) -> BackendLimits:
    """Returns limits with a program for each tier, and room for every state."""
    return replace(simulated_capacity(tiers, [rows], overlap=1), num_snapshots=1 + 4 * rows)


def measure(
    controller: Controller, capacity: BackendLimits, cache: CachePolicy, rows: int
) -> float:
    """Microseconds of a step, the median of steps in which every request decodes."""

    def law(seeds: Any, places: Any) -> Any:
        return 0.6 + 0.0 * (seeds[:, None] + places[:, None]) * np.ones((1, MOST_DEPTH))

    device = Timed(capacity, lambda batch, tier: seconds_of(tier), law)
    sizes = {"overlap": 1, "chunked_prefill_size": max(capacity.token_sizes), "cache": cache}
    engine = Engine(device, controller, **sizes)
    for number in range(rows):
        prompt = tuple((number + place) % 7 + 2 for place in range(PROMPT))
        params = SamplingParams(max_tokens=4 * (STEPS + WARM_UP), seed32=number)
        engine.add(Request(request_id=number, prompt=prompt, sampling=params))
    while not all(request.output for request in engine.scheduler.running) or not engine.busy:
        engine.step()
    found = []
    for _ in range(WARM_UP + STEPS):
        device.own_seconds, began = 0.0, time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - began - device.own_seconds)
    return 1e6 * statistics.median(found[WARM_UP:])


def seconds_of(tier: Tier) -> float:
    """Returns the step time of a tier for the policy: that of plain steps, and more by nodes."""
    return 0.005 + 0.0003 * (tier.nodes - 1)


def controllers_of(
    capacity: BackendLimits, rows: int, tiers: Sequence[Tier]
) -> dict[str, Controller]:
    """Returns the controllers: plain steps, chains, and adaptive."""
    nodes, depth, width = tiers[1].tree
    table = {rows: list(map(seconds_of, tiers))}
    return {
        "off": StaticController(capacity, nodes=1, depth=0, width=0),
        "chain": StaticController(capacity, nodes=nodes, depth=depth, width=width),
        "adaptive": AdaptiveController(capacity, ExpectedValuePolicy(), table, has_experts=False),
    }


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures every controller with the prefix cache and without."""
    lines: list[Line] = []
    print(HEADER)
    for rows in options.rows:
        capacity = capacity_of(rows, options.tiers)
        for cached, policy in (("off", NO_CACHE), ("on", HYBRID_HEAD)):
            for name, controller in controllers_of(capacity, rows, options.tiers).items():
                took = measure(controller, capacity, policy, rows)
                device = DEVICE_MS[name != "off"][rows]
                line = {
                    "controller": name,
                    "cache": cached,
                    "rows": rows,
                    "host_us": round(took, 1),
                }
                lines.append(line | {"device_ms": device, "share": round(took / device / 1e3, 4)})
                print(line_of(lines[-1]), flush=True)
    found = {"command": command, "python": platform.python_version(), "lines": lines}
    if options.out:
        write_results(options.out, found)
    return found


def line_of(line: Line) -> str:
    """A line for a terminal."""
    return (
        f"{line['controller']:14}{line['cache']:8}{line['rows']:6}{line['host_us']:10.1f}"
        f"{line['device_ms']:11.2f}{line['share']:8.1%}"
    )


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the parser of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument(
        "--tiers",
        nargs="+",
        type=Tier.parse,
        default=[Tier.parse("none"), Tier.parse("S3")],
        metavar="TIER",
        help="names of the tiers, plain decoding and a chain first: none S7 S7k8N16",
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args(words)


def main() -> None:
    """Prints and writes the lines."""
    run(options(), shlex.join(["python", "-m", "bench.speculation.host_overhead", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
