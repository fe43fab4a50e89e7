"""Adaptive choice between chains and trees of a block head, in simulated time.

    python -m bench.speculation.adaptive_block_trees --out bench/results/FILE.json

Each profile has the acceptance of a head on one kind of text, see
`tests/support/simulation/block_trees.py`. A chain of 15 drafts, a tree of 32 nodes and the adaptive
choice among plain decoding, two chains and the tree serve the same requests. Steps take the times
that were measured on an H200 (Qwen3-8B, DFLASH).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from bench.common.environment import write_results
from shared.engine.adaptive.policy import ExpectedValuePolicy, Policy, Static
from tests.support.simulation.block_trees import BATCHES, CHAIN, PROFILES, TREE, run

Line = dict[str, Any]
POLICIES: dict[str, Policy] = {
    "chain": Static(CHAIN),
    "tree": Static(TREE),
    "adaptive": ExpectedValuePolicy(),
}
HEADER = (
    f"{'profile':14}{'batch':>6}" + "".join(f"{name:>10}" for name in POLICIES) + f"{'/best':>8}"
)


def measure(profile: str, batch: int, tokens: int) -> Line:
    """Returns the speed with each policy, and that of the adaptive choice by the better shape."""
    served = {
        name: run(policy, PROFILES[profile], batch, tokens)[0] for name, policy in POLICIES.items()
    }
    best = max(served[name].speed for name in ("chain", "tree"))
    return {
        "profile": profile,
        "batch": batch,
        "tokens_per_s": {name: round(each.speed, 1) for name, each in served.items()},
        "adaptive_by_best": round(served["adaptive"].speed / best, 4),
    }


def line_of(line: Line) -> str:
    """A line for a terminal."""
    speeds = "".join(f"{speed:10.1f}" for speed in line["tokens_per_s"].values())
    return f"{line['profile']:14}{line['batch']:6}{speeds}{line['adaptive_by_best']:8.3f}"


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=list(PROFILES))
    parser.add_argument("--batch", nargs="+", type=int, choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--tokens", type=int, default=600, help="output tokens of a request")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args(words)


def main() -> None:
    """Prints and writes the lines."""
    given, lines = options(), list[Line]()
    command = shlex.join(["python", "-m", "bench.speculation.adaptive_block_trees", *sys.argv[1:]])
    print(HEADER)
    for profile, batch in product(given.profiles, given.batch):
        lines.append(measure(profile, batch, given.tokens))
        print(line_of(lines[-1]), flush=True)
    if given.out:
        write_results(given.out, {"command": command, "lines": lines})


if __name__ == "__main__":
    main()
