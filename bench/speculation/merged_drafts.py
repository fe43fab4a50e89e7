"""Merged n-gram and model drafts next to each source alone: tokens per step and second.

    python -m bench.speculation.merged_drafts --backend torch --model models/demo/target \
        --drafts NEXTN NGRAM NEXTN+NGRAM --batch 1 8 --out bench/results/FILE.json

Each start serves held-out tasks of each kind: word problems, copying and code greedily, chats at
temperature 1. Outputs are compared: they do not depend on the drafts. Counted are the steps of each
decode program and their tokens. Tokens per second of this machine are those of its own small model.
So the steps are also added up at the measured times of larger models on a GPU (`SIMULATED`). The
choice between programs depends on the outputs and on the share of a step that drafting takes; with
the share of a larger model, the steps are those of that model.
"""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.draft_config import Draft, folders_of, named_folder
from bench.common.environment import versions, write_results
from bench.speculation.adaptive import engine_of
from bench.speculation.recorded_tiers import seconds_by_tier
from models.demo.data import KINDS
from shared.boundary.backend import StepFuture, StepPlan
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.models.families import config_from_folder
from shared.process import engines
from shared.spec.gumbel_noise import derive_seed
from shared.text.tokenizer import Tokenizer
from tests.support import in_process_engine
from tests.support.tasks import prompt_of

Line = dict[str, Any]
RESULTS = Path(__file__).resolve().parents[1] / "results"
HOST_NGRAM = "NGRAM:speculative-ngram-backend=host"
"""NGRAM with the index of merged drafts; its steps wait."""

TEMPERATURES = {"problems": 0.0, "copying": 0.0, "code": 0.0, "chats": 1.0, "tools": 0.0}


@dataclass(frozen=True)
class Costs:
    """Seconds of decode steps on a GPU.

    Attributes:
      drafted: Of a step that a drafter's chain is verified in, by batch.
      fed: Of a step with the same verify rows that extends the drafter without drafting.
      verified: Of a step that drafts nothing, by verify rows.
      nodes: Of the chain.
      waits: That a step takes longer which is planned when the one before has ended.
    """

    drafted: Mapping[int, float]
    fed: Mapping[int, float]
    verified: Mapping[int, float]
    nodes: int
    waits: float

    def of(self, program: Program) -> float:
        """Returns the seconds of a step; merged drafts cost their additional rows."""
        shape = program.shape
        if shape.is_plain or program.has(ProgramFeature.HOST_DRAFT):
            return self._rows(shape.rows) + self.waits
        table = self.fed if shape.drafter.is_plain else self.drafted
        more = self._rows(shape.rows) - self._rows(program.batch * self.nodes)
        return _between(table, program.batch) + more

    def draft_share(self, batch: int) -> float:
        """Share of the drafter's passes in the time of a plain step."""
        fed = _between(self.fed, batch)
        return _between(self.drafted, batch) / fed - 1

    def _rows(self, rows: int) -> float:
        return _between(self.verified, rows)


def _between(table: Mapping[int, float], size: int) -> float:
    """The value at a size, on the line between the two that are known."""
    return float(np.interp(size, list(table), list(table.values())))


def _tiers(file: str, tier: str) -> dict[int, float]:
    """Seconds of a tier by batch, of a report of `bench.speculation.adaptive`."""
    (start,) = json.loads((RESULTS / file).read_text(encoding="utf-8"))["starts"]
    measured = seconds_by_tier(start["seconds"])
    return {batch: of_tiers[tier] for batch, of_tiers in measured.items()}


def _lines(file: str, drafts: str) -> dict[int, float]:
    """Seconds of a drafter's steps by batch, of a report of `bench.steps.decode_steps`."""
    lines = json.loads((RESULTS / file).read_text(encoding="utf-8"))["lines"]
    return {line["batch"]: line["ms"] / 1e3 for line in lines if line["drafts"] == drafts}


def _qwen3_8b(file: str, tier: str, nodes: int, fed: str) -> Costs:
    """With a head of its own; rows are those of NGRAM's trees, whose steps wait.

    Args:
      file, tier, nodes: Of the chain.
      fed: The tier whose drafter makes no pass but the one that feeds it, of two nodes; the
        chain's own where no such one was measured.
    """
    ngram, head = "adaptive_h200_qwen3_8b_ngram_torch.json", _tiers(file, tier)
    waiting, asleep = _tiers(ngram, "none"), _tiers(ngram, "disabled")
    by_rows = {
        batch * nodes: seconds
        for nodes, name in ((1, "none"), (4, "S3"), (12, "S11"))
        for batch, seconds in _tiers(ngram, name).items()
    }
    waits = float(np.mean([waiting[batch] - asleep[batch] for batch in waiting]))
    ascending = dict(sorted(by_rows.items()))
    steady = np.maximum.accumulate([seconds - waits for seconds in ascending.values()])
    rows = dict(zip(ascending, steady.tolist(), strict=True))
    of_fed, own = _tiers(file, fed), nodes if fed == tier else 2
    of_rows = {b: _between(rows, b * nodes) - _between(rows, b * own) for b in of_fed}
    return Costs(head, {b: of_fed[b] + of_rows[b] for b in of_fed}, rows, nodes, waits)


def _qwen3_5_9b() -> Costs:
    """With its mtp layer; rows beyond 32 as a tree has more of them than a chain."""
    plain = _lines("compare_h200_qwen3_5_9b_torch_after.json", "none")
    head = _lines("compare_h200_qwen3_5_9b_torch_after.json", "NEXTN S=3 L=2.5")
    chain = _lines("offline_h200_qwen3_5_9b_wide_torch.json", "NEXTN S=5 L=2.5")
    tree = _lines("offline_h200_qwen3_5_9b_deep_torch.json", "NEXTN S=5 k=4 N=16 L=2.5")
    late = _lines("offline_h200_qwen3_5_9b_overlap0_torch.json", "NEXTN S=3 L=2.5")
    verified, last = dict(plain), max(plain)
    for batch in tree:
        slope = (tree[batch] - chain[batch]) / (batch * (16 - 6))
        rows = batch * 16
        verified[rows] = verified[last] + slope * (rows - last)
        last = rows
    more = {b: _between(verified, 6 * b) - _between(verified, 4 * b) for b in head}
    fed = {b: head[b] - (chain[b] - head[b] - more[b]) for b in head}  # less two passes
    return Costs(head, fed, verified, 4, late[8] - head[8])


def _with_map(costs: Costs, vocab: int, rows: int, hidden: int) -> Costs:
    """Returns the costs of a drafter that reads part of the target's LM head in bfloat16.

    Each of a chain's drafts reads them once, and so does what a fed drafter proposes next.
    """
    file = RESULTS / "compare_h200_qwen3_5_9b_torch_after.json"
    rate = json.loads(file.read_text(encoding="utf-8"))["sides"]["torch"]["copy_gigabytes_per_s"]
    less = 2 * hidden * (vocab - rows) / (1e9 * rate)
    drafted = {
        batch: seconds - (costs.nodes - 1) * less for batch, seconds in costs.drafted.items()
    }
    fed = {batch: seconds - less for batch, seconds in costs.fed.items()}
    return replace(costs, drafted=drafted, fed=fed)


SIMULATED: dict[str, dict[str, Callable[[], Costs]]] = {
    "NEXTN": {
        "Qwen3-8B": lambda: _qwen3_8b("adaptive_h200_qwen3_8b_torch.json", "S3", 4, "S1"),
        "Qwen3.5-9B": _qwen3_5_9b,
        "Qwen3.5-9B with a map": lambda: _with_map(_qwen3_5_9b(), 248_320, 32_768, 4096),
    },
    "DFLASH": {
        "Qwen3-8B": lambda: _qwen3_8b("adaptive_h200_qwen3_8b_dflash_torch.json", "S7", 8, "S7")
    },
}
"""Models of the step costs by drafter, all on an H200. A layer of the
target's, as NEXTN is in the model that ships, costs what an EAGLE-3 head does at Qwen3-8B. Costs
with a map are for drafters that are given one (`--drafts NEXTN:speculative-token-map=FILE`)."""


class Steps:
    """Counts the decode steps that a started engine submits, by program."""

    def __init__(self, served: in_process_engine.Served) -> None:
        self.counts = Counter[Program]()
        self._submit = served.last.submit
        vars(served.last)["submit"] = self

    def __call__(self, plan: StepPlan) -> StepFuture:
        if plan.program.work is StepKind.DECODE:
            self.counts[plan.program] += 1
        return self._submit(plan)


def tasks_of(model: Path, kind: str, batch: int, count: int, most: int) -> list[Request]:
    """Held-out tasks of a kind, other ones for each batch."""
    tokenizer = Tokenizer.from_folder(model)
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ValueError(f"{model} has no tokenizer with a chat template")
    ends, requests = config_from_folder(model).eos_ids, []
    for number, example in enumerate(islice(KINDS[kind]("held_out", batch), count)):
        sampling = SamplingParams(
            temperature=TEMPERATURES[kind],
            seed32=derive_seed(number, 0),
            max_tokens=most,
            stop_token_ids=ends,
        )
        prompt = prompt_of(example, tokenizer)
        requests.append(Request(request_id=number, prompt=prompt, sampling=sampling))
    return requests


def serve(
    backend: str,
    draft: Draft,
    batch: int,
    simulated: Mapping[str, Costs],
    given: argparse.Namespace,
) -> list[Line]:
    """A line for each kind of task that one start serves, the index new for each start."""
    folders = folders_of(given.model, dict(map(named_folder, given.folders)))
    tasks = {
        kind: tasks_of(given.model, kind, batch, max(given.count, 2 * batch), given.max_tokens)
        for kind in TEMPERATURES
    }
    longest = max(len(request.prompt) for requests in tasks.values() for request in requests)
    served = in_process_engine.start(
        backend,
        ["--model-path", str(given.model), *draft.flags(folders)],
        batch=batch,
        context=-(-(longest + given.max_tokens) // 64) * 64,
        radix_cache=False,
    )
    steps, lines, engine = Steps(served), list[Line](), served.engine
    models = [{name: simulated[name]} for name in simulated] if joins(draft) else [simulated]
    for costs, (kind, requests) in product(models, tasks.items()):
        if joins(draft) and kind == next(iter(tasks)):
            (one,) = costs.values()
            engine = _begun_anew(served, one.draft_share(batch))
        before, began, used = steps.counts.copy(), time.perf_counter(), time.process_time()
        outcomes = in_process_engine.serve_all(engine, copy.deepcopy(requests))
        seconds, counts = time.perf_counter() - began, steps.counts - before
        cpu_seconds = time.process_time() - used
        tokens = sum(len(outcome.tokens) for outcome in outcomes)
        accepted = [count for outcome in outcomes for count in outcome.accepted]
        line: Line = {"backend": backend, "drafts": str(draft), "batch": batch, "kind": kind}
        line["tokens_per_step"] = round(1 + sum(accepted) / len(accepted), 3)
        line["tokens"], line["seconds"] = tokens, round(seconds, 2)
        line["cpu_seconds"] = round(cpu_seconds, 2)  # of the process, so other load counts less
        line["steps"] = {str(program): count for program, count in counts.items()}
        line["simulated_tokens_per_s"] = {
            name: round(tokens / sum(each.of(p) * n for p, n in counts.items()), 1)
            for name, each in costs.items()
        }
        line["texts"] = hash_of([outcome.tokens for outcome in outcomes])
        lines.append(line)
        print(f"{backend:6}{draft!s:14} batch {batch} {kind:9}{_format_line(line)}", flush=True)
    served.engine.close()
    return lines


def joins(draft: Draft) -> bool:
    """True if both sources draft."""
    return draft.algorithm != draft.of_files


def _begun_anew(served: in_process_engine.Served, draft_share: float) -> Engine:
    """An engine like the one of the start, which has seen no text, with another share."""
    controller = engines.make_controller(
        served.backend,
        served.memory.settled,
        on_gpu=False,
        has_experts=False,
        draft_share=draft_share,
    )
    return engine_of(served, controller)


def hash_of(texts: Sequence[Sequence[int]]) -> int:
    """Returns a number that identifies a text."""
    return hash(tuple(map(tuple, texts))) & 0xFFFFFFFF  # of whole numbers: the same in every run


def _format_line(line: Line) -> str:
    simulated = ", ".join(f"{name} {n:.0f}/s" for name, n in line["simulated_tokens_per_s"].items())
    return f"{line['tokens_per_step']:7.3f} tokens a step; {simulated}"


def compared(lines: Sequence[Line]) -> list[Line]:
    """For each kind what both sources give against the better of the two alone."""
    found = []
    for both in (line for line in lines if "+" in line["drafts"]):
        same = {key: both[key] for key in ("backend", "batch", "kind")}
        alone = [
            line
            for line in lines
            if line["drafts"].split()[0] in both["drafts"].split()[0].split("+")
            and same.items() <= line.items()
        ]
        best = max(line["tokens_per_step"] for line in alone)
        ratios: Line = {**same, "drafts": both["drafts"]}
        ratios["texts_equal"] = len({line["texts"] for line in (both, *alone)}) == 1
        ratios["tokens_per_step"] = round(both["tokens_per_step"] / best, 3)
        for name, speed in both["simulated_tokens_per_s"].items():
            best = max(line["simulated_tokens_per_s"][name] for line in alone)
            ratios[name] = round(speed / best, 3)
        found.append(ratios)
        print(" ".join(f"{key} {value}" for key, value in ratios.items()), flush=True)
    return found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m bench.speculation.merged_drafts")
    found.add_argument("--backend", nargs="+", choices=("torch", "jax"), default=["torch"])
    found.add_argument("--model", type=Path, required=True, help="folder with a chat template")
    found.add_argument("--drafts", nargs="+", default=["NEXTN", HOST_NGRAM, "NEXTN+NGRAM"])
    found.add_argument("--folders", nargs="*", default=[], metavar="ALGORITHM=DIR")
    found.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    found.add_argument("--count", type=int, default=16, help="tasks of a kind, or two a row")
    found.add_argument("--max-tokens", type=int, default=200)
    found.add_argument("--out", type=Path, help="JSON file, written after every start")
    return found


def main() -> int:
    """Measures as the options specify."""
    given = parser().parse_args()
    report: Line = {
        "command": shlex.join(["python", "-m", "bench.speculation.merged_drafts", *sys.argv[1:]])
    }
    report["lines"] = []
    names = {text.partition(":")[0].partition("+")[0] for text in given.drafts}
    (costs,) = [made for name, made in SIMULATED.items() if name in names] or [{}]
    simulated = {name: made() for name, made in costs.items()}
    report["simulated"] = {name: vars(costs) for name, costs in simulated.items()}
    for backend, batch, text in product(given.backend, given.batch, given.drafts):
        report |= {backend: versions(backend, "cpu")}
        report["lines"] += serve(backend, Draft.parse(text), batch, simulated, given)
        report["compared"] = compared(report["lines"])
        if given.out:
            write_results(given.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
