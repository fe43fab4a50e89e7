"""Changing work with every draft shape, without drafts, and with adaptive speculation.

    python -m bench.speculation.adaptive --backend torch jax --model models/demo/target \
        --drafts NEXTN NGRAM --batch 1 8 --out bench/results/FILE.json

One start of a backend has the programs of all tiers. Each tier, plain decoding with overlap, and
the adaptive policy serve the same phases: word problems and copying greedily, chats at temperature
1, for each batch size. Outputs are compared: they do not depend on the drafts.

The step time of each tier is measured at startup. It is also used in simulated time, for phases
with given acceptance (`tests/support/simulation`). `--imposed` serves only these, so dummy weights
suffice (`--load-format dummy`). `--costs FILE` starts nothing and uses the step times of an earlier
report. `--adaptive-config` lists the tiers, with shares of rows for the column that compares pruned
trees with a tier of the same number of rows for every request.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

from bench.common.draft_config import Draft, folders_of, named_folder
from bench.common.environment import versions, write_results
from bench.speculation.recorded_tiers import seconds_by_tier
from models.demo.data import KINDS
from shared.engine.adaptive.controller import AdaptiveController
from shared.engine.adaptive.policy import ExpectedValuePolicy, Policy, Static
from shared.engine.adaptive.tiers import Tier
from shared.engine.branch_calibration import (
    BranchCalibrationController,
    with_branch_calibration,
)
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import Controller, StaticController
from shared.engine.engine import Engine
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram_controllers.adaptive import AdaptiveNgramController
from shared.engine.ngram_controllers.controller import NgramController
from shared.engine.request import Request, SamplingParams
from shared.models.families import config_from_folder
from shared.spec.gumbel_noise import derive_seed
from shared.text.tokenizer import Tokenizer
from tests.support import in_process_engine
from tests.support.simulation.imposed import (
    DISABLED,
    Runs,
    merged,
    rated_runs,
    rated_work,
    written_runs,
    written_work,
)
from tests.support.simulation.phases import Phase, Served, serve
from tests.support.simulation.policies import Greedy, Probe
from tests.support.tasks import prompt_of

Line = dict[str, Any]
TEMPERATURES = {"problems": 0.0, "copying": 0.0, "chats": 1.0}


def task_phases(model: Path, batches: Sequence[int], count: int, most: int) -> list[Phase]:
    """Phases of held-out tasks, kinds and batches in turn; at least four tasks per row of a batch.

    With fewer a phase would be as long as its longest answer, whatever the others take.
    """
    tokenizer = Tokenizer.from_folder(model)
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ValueError(f"{model} has no tokenizer with a chat template; give --imposed")
    ends = config_from_folder(model).eos_ids
    phases, number = [], 0
    for batch, (kind, temperature) in product(batches, TEMPERATURES.items()):
        requests = []
        for example in islice(KINDS[kind]("held_out", batch), max(count, 4 * batch)):
            prompt = prompt_of(example, tokenizer)
            sampling = SamplingParams(
                temperature=temperature,
                seed32=derive_seed(number, 0),
                max_tokens=most,
                stop_token_ids=ends,
            )
            requests.append(Request(request_id=number, prompt=prompt, sampling=sampling))
            number += 1
        phases.append(Phase(f"{kind}, batch {batch}", batch, requests))
    return phases


def chooser(served: in_process_engine.Served, policy: Policy | None) -> Controller:
    """A controller on a started backend: of a policy, or the adaptive one of the start.

    Args:
      policy: None: what the server would take.
    """
    begun, capacity = chooser_of_steps(served), served.backend.capacity
    if isinstance(begun, AdaptiveNgramController):
        return _of_texts(served, begun, policy)
    chosen_by = policy or ExpectedValuePolicy(), begun.costs.table
    controller = AdaptiveController(capacity, *chosen_by, has_experts=begun.has_experts)
    return with_branch_calibration(controller, capacity)


def chooser_of_steps(
    served: in_process_engine.Served,
) -> AdaptiveController | AdaptiveNgramController:
    """Returns the controller of the start, without the calibration of its trees."""
    begun = served.engine.controller
    begun = begun.inner if isinstance(begun, BranchCalibrationController) else begun
    assert isinstance(begun, AdaptiveController | AdaptiveNgramController)
    return begun


def _of_texts(
    served: in_process_engine.Served, begun: AdaptiveNgramController, policy: Policy | None
) -> Controller:
    """NGRAM with an index of its own, that knows no phase before the first, and is ready as a
    server's: no step takes memory for it from the system."""
    capacity = served.backend.capacity
    if isinstance(policy, Static) and policy.tier == 0:
        return StaticController(capacity, nodes=1, depth=0, width=0)
    tier = begun.shapes.tiers[policy.tier if isinstance(policy, Static) else -1]
    index = NgramIndex(
        served.memory.settled.options.ngram,
        nodes=tier.nodes,
        depth=tier.depth,
        vocab=capacity.vocab,
        chain=False,
    )
    index.warm_up()
    if policy is None:
        return AdaptiveNgramController(capacity, index, begun.costs.table)
    return NgramController(capacity, index)


def engine_of(served: in_process_engine.Served, controller: Controller) -> Engine:
    """An engine like the one of the start, with another controller."""
    settled = served.memory.settled
    return Engine(
        served.last,
        controller,
        overlap=settled.overlap,
        chunked_prefill_size=settled.prefill_chunk_size,
        cache=NO_CACHE,
    )


def alternating_runs(
    starts: Mapping[str, Callable[[], Engine]], phases: Sequence[Phase], rounds: int
) -> Runs:
    """Serves phases with every engine, and returns the fastest of some rounds of each phase.

    The engines alternate at each phase, and every other round in reverse: a slower machine for a
    while slows all of them.

    Args:
      starts: Functions that start the engines of a round.
      phases: The phases.
      rounds: Number of rounds.
    """
    again: dict[str, list[list[Served]]] = {name: [] for name in starts}
    for number in range(rounds):
        engines = {name: start() for name, start in starts.items()}
        for each in again.values():
            each.append([])
        for phase in phases:
            for name in sorted(engines, key=list(engines).index, reverse=number % 2 > 0):
                again[name][-1] += serve(engines[name], [phase], time.perf_counter)
        for name, engine in engines.items():
            seconds = sum(each.seconds for each in again[name][-1])
            print(f"  {name}: {seconds:.1f} s{_used(engine)}", flush=True)
    return {
        name: [min(each, key=lambda s: s.seconds) for each in zip(*runs, strict=True)]
        for name, runs in again.items()
    }


def real_runs(
    served: in_process_engine.Served, tiers: Sequence[Tier], phases: Sequence[Phase], rounds: int
) -> Runs:
    """Every tier, the adaptive choice and simpler ones, alternating."""
    policies: dict[str, Policy | None] = {str(t): Static(n) for n, t in enumerate(tiers)}
    if isinstance(chooser_of_steps(served), AdaptiveController):
        policies |= {"greedy": Greedy(), "probe": Probe()}
    policies["adaptive"] = None
    starts = {
        name: lambda policy=policy: engine_of(served, chooser(served, policy))
        for name, policy in policies.items()
    }
    return alternating_runs(starts, phases, rounds)


def _used(engine: Engine) -> str:
    """Returns the number of steps of each tier."""
    counts = {
        name.split('"')[1]: int(count)
        for name, count in engine.metrics.snapshot().items()
        if name.startswith("spec_decode_adaptive_steps_total") and count
    }
    return "".join(f", {name} {count}" for name, count in counts.items())


def lines_of(runs: Runs, tiers: Sequence[Tier]) -> list[Line]:
    """A line for each phase, and one for as much of each as off had in it."""
    names, count = list(runs), len(runs["adaptive"])
    lines, work = [], [phase.tokens for phase in runs["none"]]
    for phase in (*range(count), None):
        phases = range(count) if phase is None else [phase]
        tokens = sum(work[each] for each in phases)
        speeds = {n: tokens / sum(work[p] / runs[n][p].speed for p in phases) for n in names}
        best = max(speeds[str(tier)] for tier in tiers)
        line: Line = {"phase": "all" if phase is None else runs["adaptive"][phase].name}
        line["tokens_per_s"] = {n: round(speed, 1) for n, speed in speeds.items()}
        line["adaptive_by_best"] = round(speeds["adaptive"] / best, 4)
        line["adaptive_by_off"] = round(speeds["adaptive"] / speeds["none"], 4)
        oracle = speeds.get("oracle")
        line["regret"] = None if oracle is None else round(1 - speeds["adaptive"] / oracle, 4)
        line["ranked_by_equal"] = _ranked_by_equal(speeds, tiers)
        lines.append(line)
    return lines


def _ranked_by_equal(speeds: Mapping[str, float], tiers: Sequence[Tier]) -> float | None:
    """A tier with a share of its rows, and the one with the same number for every request."""
    for tier, same in product(tiers, tiers):
        rows = tier.width, round(tier.nodes * tier.share)
        if tier.share < 1 == same.share and rows == (same.width, same.nodes):
            return round(speeds[str(tier)] / speeds[str(same)], 4)
    return None


def table_of(title: str, lines: Sequence[Line]) -> str:
    """Lines for a terminal."""
    names = list(lines[0]["tokens_per_s"])
    head = f"{title:24}" + "".join(f"{name:>12}" for name in names)
    rows = [head + f"{'/best':>8}{'/off':>8}{'regret':>8}{'ranked':>8}"]
    for line in lines:
        speeds = "".join(f"{line['tokens_per_s'][name]:12.1f}" for name in names)
        rest = f"{line['adaptive_by_best']:8.3f}{line['adaptive_by_off']:8.3f}"
        for key in ("regret", "ranked_by_equal"):
            rest += f"{'-':>8}" if line[key] is None else f"{line[key]:8.3f}"
        rows.append(f"{line['phase']:24}{speeds}{rest}")
    return "\n".join(rows)


def measure(backend: str, draft: Draft, given: argparse.Namespace) -> Line:
    """Measures one start."""
    phases = (
        []
        if given.imposed
        else task_phases(given.model, given.batch, given.count, given.max_tokens)
    )
    longest = max((len(r.prompt) for phase in phases for r in phase.requests), default=64)
    folders = folders_of(given.model, dict(map(named_folder, given.folders)))
    line = ["--model-path", str(given.model), *draft.flags(folders), "--speculative-adaptive"]
    line += ["--load-format", given.load_format, "--dtype", given.dtype]
    if given.adaptive_config:
        line += ["--speculative-adaptive-config", str(given.adaptive_config)]
    context = -(-(longest + given.max_tokens) // 64) * 64
    served = in_process_engine.start(
        backend,
        line,
        batch=max(given.batch),
        context=context,
        radix_cache=False,
        batches=tuple(given.batch),
    )
    begun = chooser_of_steps(served)
    tiers, measured = begun.shapes.tiers, begun.costs.table
    table = {batch: measured[batch] for batch in begun.shapes.batches}
    names = [*map(str, tiers), DISABLED]
    found: Line = {"backend": backend, "drafts": str(draft), "load": os.getloadavg()[0]}
    found |= versions(backend, "cuda" if served.device == "gpu" else "cpu")
    found["seconds"] = {str(b): dict(zip(names, s, strict=False)) for b, s in table.items()}
    if phases:
        runs = real_runs(served, tiers, phases, given.rounds)
        found["lines"] = lines_of(runs, tiers)
        print(table_of(f"{backend} {draft}", found["lines"]), flush=True)
    served.engine.close()
    return found | simulated(found["seconds"], given)


def simulated(seconds: Mapping[str, Mapping[str, float]], given: argparse.Namespace) -> Line:
    """Work with given acceptance, at measured costs by batch and tier."""
    measured = seconds_by_tier(seconds)
    table = {batch: list(each.values()) for batch, each in measured.items()}
    names = list(next(iter(measured.values())))
    tiers = tuple(Tier.parse(name) for name in names if name != DISABLED)
    works = [(list(table), given.imposed_tokens, seed) for seed in given.seeds]
    if DISABLED in names:
        runs = [written_runs(tiers, table, written_work(*work), 1) for work in works]
    else:
        runs = [rated_runs(tiers, table, rated_work(*work), 1) for work in works]
    lines = lines_of(merged(runs), tiers)
    print(table_of("imposed, simulated", lines), flush=True)
    return {"seeds": given.seeds, "imposed": lines}


def again(start: Line, given: argparse.Namespace) -> Line:
    """Returns an earlier result with the simulated work served again."""
    print(f"{start['backend']} {start['drafts']}")
    return start | simulated(start["seconds"], given)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m bench.speculation.adaptive")
    found.add_argument("--backend", nargs="+", choices=("torch", "jax"), default=["torch", "jax"])
    found.add_argument("--model", type=Path, help="folder of the checkpoint")
    found.add_argument("--drafts", nargs="+", default=["NEXTN", "NGRAM"], metavar="SPEC")
    found.add_argument("--folders", nargs="*", default=[], metavar="ALGORITHM=DIR")
    found.add_argument("--adaptive-config", type=Path, help="JSON file of the tiers")
    found.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    found.add_argument("--count", type=int, default=16, help="tasks of a phase, or four a row")
    found.add_argument("--max-tokens", type=int, default=200)
    found.add_argument("--rounds", type=int, default=1, help="number of runs; the fastest counts")
    found.add_argument("--imposed", action="store_true", help="serve only simulated work")
    found.add_argument(
        "--costs", type=Path, help="use the step times of this report; start nothing"
    )
    found.add_argument(
        "--imposed-tokens", type=int, default=400, help="tokens of a simulated request"
    )
    found.add_argument(
        "--seeds", nargs="+", type=int, default=[5, 6], help="seeds of simulated work"
    )
    found.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    found.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    found.add_argument("--out", type=Path, help="JSON file, written after every start")
    return found


def main() -> int:
    """Measures as the options specify."""
    options = parser()
    given = options.parse_args()
    if (given.model is None) == (given.costs is None):
        options.error("give --model or --costs")
    report: Line = {
        "command": shlex.join(["python", "-m", "bench.speculation.adaptive", *sys.argv[1:]])
    }
    report["starts"] = []
    if given.costs:
        before = json.loads(given.costs.read_text(encoding="utf-8"))
        report = {"command": before["command"], "imposed_command": report["command"]}
        report["starts"] = [again(start, given) for start in before["starts"]]
        _write(report, given.out)
        return 0
    for backend, text in product(given.backend, given.drafts):
        report["starts"].append(measure(backend, Draft.parse(text), given))
        _write(report, given.out)
    return 0


def _write(report: Line, out: Path | None) -> None:
    if out:
        write_results(out, report)


if __name__ == "__main__":
    sys.exit(main())
