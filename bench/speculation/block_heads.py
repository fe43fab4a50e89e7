"""Block heads of one target as a chain, as trees and with adaptive speculation.

    python -m bench.speculation.block_heads --backend torch jax --model models/demo/target \
        --heads dflash=models/demo/dflash kl=models/demo/dflash_kl jetspec=models/demo/jetspec \
        --batch 1 8 --out bench/results/FILE.json

Each start of a head has the programs of all shapes. Plain decoding, the chain of the whole block,
trees of `--nodes` nodes and the adaptive choice among them serve the same held-out tasks: word
problems and copying greedily, chats at temperature 1. Shapes alternate at each phase, and a fixed
shape has the controller of a server without adaptive speculation. The results are tokens per step
of a request (accepted draft tokens and the bonus token) and tokens per second, prefill included.
The number of tokens must be equal in all shapes, because the output does not depend on the drafts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.common.environment import versions, write_results
from bench.speculation.adaptive import (
    alternating_runs,
    chooser,
    chooser_of_steps,
    engine_of,
    task_phases,
)
from shared.engine.adaptive.tiers import Tier
from shared.engine.branch_calibration import with_branch_calibration
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from tests.support import in_process_engine
from tests.support.simulation.phases import Served

Line = dict[str, Any]
ADAPTIVE = "adaptive"


def tiers_of(folder: Path, nodes: Sequence[int], topk: int) -> Line:
    """Returns the adaptive config of a head: the chain of its block, and the trees over it.

    Raises:
      ValueError: The folder has no block head.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = config.get("block_size") or config.get("dflash_config", {}).get("block_size")
    if not size:
        raise ValueError(f"{folder} has no block_size in its config; give a DFlash head")
    steps = size - 1
    trees = [{"steps": steps, "topk": topk, "draft_tokens": each} for each in nodes]
    return {"candidates": [{"steps": steps}, *trees]}


def measure(backend: str, name: str, folder: Path, given: argparse.Namespace) -> list[Line]:
    """Starts one head, and returns a line for each phase and shape, and for all phases."""
    phases = task_phases(given.model, given.batch, given.count, given.max_tokens)
    longest = max(len(request.prompt) for phase in phases for request in phase.requests)
    with TemporaryDirectory() as scratch:
        config = Path(scratch) / "tiers.json"
        config.write_text(json.dumps(tiers_of(folder, given.nodes, given.topk)), encoding="utf-8")
        flags = ["--model-path", str(given.model), "--speculative-algorithm", "DFLASH"]
        flags += ["--speculative-draft-model-path", str(folder), "--speculative-adaptive"]
        flags += ["--speculative-adaptive-config", str(config)]
        served = in_process_engine.start(
            backend,
            flags,
            batch=max(given.batch),
            context=-(-(longest + given.max_tokens) // 64) * 64,
            radix_cache=False,
            batches=tuple(given.batch),
        )
    begun = chooser_of_steps(served)
    tiers, table = begun.shapes.tiers, begun.costs.table
    shapes: dict[str, Tier | None] = {str(tier): tier for tier in tiers}
    shapes[ADAPTIVE] = None
    starts = {name: partial(engine_with, served, tier) for name, tier in shapes.items()}
    runs = alternating_runs(starts, phases, given.rounds)
    ms = {
        batch: {str(tier): round(1e3 * s, 4) for tier, s in zip(tiers, seconds, strict=False)}
        for batch, seconds in table.items()
    }
    served.engine.close()
    device = versions(backend, "cuda" if served.device == "gpu" else "cpu")
    head = {"backend": backend, "head": name, "device": device["device"]}
    return [head | line for line in lines_of(runs, tiers)] + [head | {"ms_per_step": ms}]


def engine_with(served: in_process_engine.Served, tier: Tier | None) -> Engine:
    """Returns an engine with one shape, as without adaptive speculation, or with the adaptive
    choice.
    """
    if tier is None:
        return engine_of(served, chooser(served, None))
    capacity = served.backend.capacity
    nodes, depth, width = tier.tree
    fixed = StaticController(capacity, nodes=nodes, depth=depth, width=width)
    return engine_of(served, with_branch_calibration(fixed, capacity))


def lines_of(runs: Mapping[str, Sequence[Served]], tiers: Sequence[Tier]) -> list[Line]:
    """Returns a line for each phase, and one for all of them."""
    found = list[Line]()
    for index, first in enumerate(runs[ADAPTIVE]):
        found.append(_line(first.name, {name: [each[index]] for name, each in runs.items()}))
    found.append(_line("all", runs))
    for line in found:
        best = max(line["tokens_per_s"][str(tier)] for tier in tiers)
        line["adaptive_by_best"] = round(line["tokens_per_s"][ADAPTIVE] / best, 4)
    return found


def _line(name: str, runs: Mapping[str, Sequence[Served]]) -> Line:
    tokens = {shape: sum(each.tokens for each in phases) for shape, phases in runs.items()}
    rows = {shape: sum(each.rows for each in phases) for shape, phases in runs.items()}
    accepted = {shape: sum(each.accepted for each in phases) for shape, phases in runs.items()}
    seconds = {shape: sum(each.seconds for each in phases) for shape, phases in runs.items()}
    return {
        "phase": name,
        "tokens_per_step": {s: round(1 + accepted[s] / max(rows[s], 1), 3) for s in runs},
        "tokens_per_s": {s: round(tokens[s] / seconds[s], 1) for s in runs},
        "tokens_are_equal": len(set(tokens.values())) == 1,
    }


def text_of(line: Line) -> str:
    """A line for a terminal."""
    cells = [
        f"{shape} {per_step:.2f}, {line['tokens_per_s'][shape]:.0f}/s"
        for shape, per_step in line["tokens_per_step"].items()
    ]
    head = f"{line['backend']:6}{line['head']:10}{line['phase']:20}"
    return head + "; ".join(cells) + f"; of best {line['adaptive_by_best']:.3f}"


def named_head(text: str) -> tuple[str, Path]:
    """Reads `NAME=DIR` of `--heads`.

    Raises:
      ValueError: The form is invalid.
    """
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ValueError(f"--heads {text}: give NAME=DIR")
    return name, Path(folder)


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.speculation.block_heads")
    parser.add_argument("--backend", nargs="+", choices=("torch", "jax"), default=["torch", "jax"])
    parser.add_argument("--model", type=Path, required=True, help="folder of the target")
    parser.add_argument(
        "--heads",
        nargs="+",
        type=named_head,
        required=True,
        metavar="NAME=DIR",
        help="DFlash heads",
    )
    parser.add_argument(
        "--nodes", nargs="+", type=int, default=[16, 32, 64], help="nodes of a tree"
    )
    parser.add_argument("--topk", type=int, default=8, help="candidates of a depth")
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--count", type=int, default=16, help="tasks of a phase, or four a row")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2, help="number of runs; the fastest counts")
    parser.add_argument("--out", type=Path, help="JSON file, written after every start")
    return parser.parse_args(words)


def main() -> None:
    """Measures as the options specify."""
    given, lines = options(), list[Line]()
    command = shlex.join(["python", "-m", "bench.speculation.block_heads", *sys.argv[1:]])
    for backend, (name, folder) in product(given.backend, given.heads):
        found = measure(backend, name, folder, given)
        print("\n".join(text_of(line) for line in found if "phase" in line), flush=True)
        lines += found
        if given.out:
            write_results(given.out, {"command": command, "lines": lines})


if __name__ == "__main__":
    main()
