"""Decode steps without a server: milliseconds, GPU activity, and equal outputs.

    python -m bench.steps.decode_steps --backend torch jax --model bench/shapes/qwen3-8b \
        --batch 1 8 32 --drafts none EAGLE3:S=3 DFLASH --out bench/results/FILE.json

Every line is a batch that one drafter serves on one backend; all batches share an engine's start.
A line's limits are the time of the bytes
that a step must read, at the rate of a large copy on the same device, and the time of its
multiplications, at the rate of a large GEMM; the share is of both one after the other. Weights are
random, so no draft is accepted; `--accept-length` simulates acceptance. Outputs that are guaranteed
to be equal are compared: between backends, and with plain decoding. An n-gram drafter has seen the
previous round. On a CPU there are no kernels, clock and power. `--kernels` lists the longest
kernels. `--adapters 0 1 8 --lora-rank 16` times requests of that many LoRA adapters, which have
random weights, and shows how much longer their steps take; a start has one rank. `--tp-size 1 2`
also serves with two ranks and compares outputs; its limits are those of a rank. `--at-once 6`
starts six engines side by side, which must fit into GPU memory together, and times them one by one.
`--temperature 0 0.8 --top-p 0.95` also times sampled steps and shows how much longer they take than
greedy ones. `--model` takes several folders, each with a file of its own: `--out` contains
`{model}`.
"""

import argparse
import os
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import NamedTuple

from bench.common import gpu_clock
from bench.common.draft_config import PLAIN, Draft, folders_of, named_folder
from bench.common.dummy_adapters import adapter_flags
from bench.common.session import Load, Session, peak_bytes
from bench.common.staggered_processes import Wait, in_turns
from bench.steps.report import HEADER, Line, Rates, Report, SideFacts, Texts, side_facts
from shared.boundary.shm_allgather import AllGatherTimeout
from shared.process.tp.workers import RankError
from tests.support.op_sides import SIDES

LONGEST = 40
"""Kernels that a line names, by the time that they take."""
LONGEST_WARM_UP = 4096
"""Tokens of a prompt: a longer one runs the same programs."""
LOT = "L"
"""Setting of the simulated acceptance length of a drafter."""


def measure(session: Session, load: Load, rates: Rates, options: argparse.Namespace) -> Line:
    """One line, and the texts of its last round under `texts`."""
    # Warms up; drafters that remember texts learn them.
    prompt = load.prompt if session.draft.remembers else min(load.prompt, LONGEST_WARM_UP)
    session.round(replace(load, prompt=prompt))
    made = session.made
    with gpu_clock.watched(session.served.device == "gpu") as watched:
        rounds = [session.round(load) for _ in range(options.rounds)]
    blocks = [ms for each in rounds for ms in each.blocks(options.steps)]
    if not blocks:
        raise ValueError(f"a round has fewer than {options.steps} steps; raise --output")
    steps = sum(len(each.step_s) for each in rounds)
    tokens, seconds = sum(r.tokens for r in rounds), sum(sum(r.step_s) for r in rounds)
    median, limit = statistics.median(blocks), 1e3 * session.bytes_of(load) / rates.copied
    products = 1e3 * session.products_of(load) / rates.multiplied
    memory = session.served.memory
    ranks = memory.blueprint.ranks.count
    limit, products = limit / ranks, products / ranks
    return {
        "backend": session.backend,
        "drafts": str(session.draft),
        **asdict(load),
        "ranks": ranks,
        "overlap": memory.capacity.overlap,
        "dtype": memory.settled.dtype,
        "load_format": memory.settled.options.model.load_format,
        "simulated_accept_length": memory.capacity.simulated_accept_length,
        "ms": round(median, 4),
        "ms_low": round(min(blocks), 4),
        "ms_high": round(max(blocks), 4),
        "blocks": len(blocks),
        "steps": steps,
        "tokens_per_s": round(tokens / seconds, 1),
        "accept_length": round(tokens / steps / load.batch, 3),
        "limit_ms": round(limit, 4),
        "products_ms": round(products, 4),
        "share_of_limit": round(limit / median, 4),
        "share_of_both": round((limit + products) / median, 4),
        "programs_made_while_timed": session.made - made,
        "rounds_are_equal": all(r.texts == rounds[0].texts for r in rounds),
        "card": watched,
        "trace": _trace(session, load, min(len(r.step_s) for r in rounds), median, options),
        "texts": rounds[-1].texts,
    }


def _trace(
    session: Session, load: Load, steps: int, step_ms: float, options: argparse.Namespace
) -> Line | None:
    """Kernels and idle share of a step; None on a CPU, and without a trace."""
    if session.served.device != "gpu" or options.no_trace:
        return None
    try:
        found = session.activity(load, max(1, steps // 3))
    except Exception as error:  # a profiler that fails must not cost a run its times
        return {"error": f"{type(error).__name__}: {error}"}
    rounded = {n: round(getattr(found, n), 4) for n in ("kernels", "copies", "busy_ms")}
    longest = {n: [round(x, 4) for x in each] for n, each in found.longest(LONGEST).items()}
    return rounded | {"idle_share": round(1 - found.busy_ms / step_ms, 4), "longest": longest}


def start_facts(session: Session) -> Line:
    """Returns startup times and memory; in JAX the peak counts from the first start of the
    process.
    """
    served = session.served
    return {
        "load_s": round(served.load_s, 2),
        "prepare_s": round(served.prepare_s, 2),
        "programs": len(served.memory.blueprint.capacity.programs),
        "planned_bytes": served.memory.total_bytes,
        "peak_bytes": peak_bytes(session.backend),
    }


@contextmanager
def begun(
    backend: str,
    draft: Draft,
    load: Load,
    options: argparse.Namespace,
    overlap: int | None,
    ranks: int,
    wait: Wait = lambda: None,
    more: Sequence[str] = (),
    batches: Sequence[int] = (),
) -> Iterator[Session]:
    """A session that ends.

    Args:
      batches: See `Session.begin`.
      overlap: None leaves it to the flags.
      wait: See `Session.begin`.
      more: Further flags of the server.
    """
    folders = folders_of(options.model, dict(map(named_folder, options.folders)))
    server_flags = [*flags(options, overlap), "--tp-size", str(ranks), *more]
    session = Session.begin(
        backend, options.model, draft, folders, server_flags, load, wait, batches
    )
    try:
        yield session
    finally:
        session.end()


def flags(options: argparse.Namespace, overlap: int | None) -> list[str]:
    """Returns the flags of the server."""
    found = ["--load-format", options.load_format]
    found += [] if overlap is None else ["--overlap-depth", str(overlap)]
    return found + ["--dtype", options.dtype, *shlex.split(options.flags)]


def with_lot(draft: Draft, length: str | None) -> Draft:
    """Returns the drafter with simulated acceptance, unless it has none or its own setting."""
    if length is None or draft.algorithm == PLAIN or LOT in dict(draft.settings):
        return draft
    return replace(draft, settings=(*draft.settings, (LOT, length)))


def run(options: argparse.Namespace, command: Sequence[str]) -> list[Report]:
    """Serves everything that the options name, and returns a report for each model.

    Args:
      command: Words that were called; the report of a model names no other.

    Raises:
      ValueError: An option is wrong; one sentence.
    """
    models: list[Path] = options.model
    reports = {model: _report_of(model, options, command) for model in models}
    drafts = [with_lot(Draft.parse(text), options.accept_length) for text in options.drafts]
    if options.at_once > 1:  # JAX would take most of a GPU's memory when it starts
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # In one process JAX does so, and torch goes first.
    backends = sorted(options.backend, key=list(SIDES).index)
    starts = [
        Start(model, backend, draft, rank, overlap, ranks)
        for model in models
        for rank, backend, draft in product(options.lora_rank, backends, drafts)
        for overlap, ranks in product(options.overlap_depth, options.tp_size)
    ]
    if options.at_once > 1:
        _side_by_side(reports, backends, starts, options)
    else:
        _one_by_one(reports, backends, starts, options)
    return [*reports.values()]


def _report_of(model: Path, options: argparse.Namespace, command: Sequence[str]) -> Report:
    others = set(options.model) - {model}
    if not others:
        return Report(shlex.join(command), options.out, options.kernels)
    name = model.name.replace("-", "_").replace(".", "_")
    words = [word.replace("{model}", name) for word in command if Path(word) not in others]
    out = options.out and Path(str(options.out).replace("{model}", name))
    if out and out == options.out:
        raise ValueError("--out contains {model} if there are several models")
    return Report(shlex.join(words), out, options.kernels, model.name)


class Start(NamedTuple):
    """An engine that is to be started, once for all batches, temperatures and adapters."""

    model: Path
    backend: str
    draft: Draft
    lora_rank: int
    overlap: int
    ranks: int


Reports = Mapping[Path, Report]
"""The report of each model."""


def _one_by_one(
    reports: Reports, backends: Sequence[str], starts: Sequence[Start], options: argparse.Namespace
) -> None:
    """Serves each in this process, backend by backend."""
    for backend in backends:
        with operations(options.ops, backend):
            rates = _add_side(reports, backend, side_facts(backend))
        print(HEADER, flush=True)
        for start in (each for each in starts if each.backend == backend):
            report = reports[start.model]
            try:
                for found in _served(lambda: None, start, rates, options):
                    report.add(*found)
            except (ValueError, RankError, AllGatherTimeout) as error:
                report.refuse(backend, start.draft, error)


def _side_by_side(
    reports: Reports, backends: Sequence[str], starts: Sequence[Start], options: argparse.Namespace
) -> None:
    """Serves each in a process of its own; whatever fails, the others are served."""
    rates = dict[str, Rates]()
    asked = [(backend, options.ops) for backend in backends]
    for number, facts in in_turns(_facts, asked, len(asked)):
        if isinstance(facts, Exception):
            raise facts
        rates[backends[number]] = _add_side(reports, backends[number], facts)
    print(HEADER, flush=True)
    works = [(start, rates[start.backend], options) for start in starts]
    for number, found in in_turns(_served, works, options.at_once):
        report = reports[starts[number].model]
        if isinstance(found, Exception):
            report.refuse(starts[number].backend, starts[number].draft, found)
        else:
            report.add(*found)


def _add_side(reports: Reports, backend: str, facts: SideFacts) -> Rates:
    for report in reports.values():
        report.add_side(backend, facts)
    return facts.rates


def _facts(wait: Wait, backend: str, ops: str) -> Iterator[SideFacts]:
    wait()
    with operations(ops, backend):
        yield side_facts(backend)


def _served(
    wait: Wait, start: Start, rates: Rates, options: argparse.Namespace
) -> Iterator[tuple[Line, Texts, bool]]:
    """A line for each batch and temperature, its texts, and whether they equal plain decoding's."""
    model, backend, draft, lora_rank, overlap, ranks = start
    options = argparse.Namespace(**(vars(options) | {"model": model}))
    batches = sorted(options.batch)
    sampled = [*zip(options.temperature, _top_ps(options), strict=True)]
    load = Load(
        batch=batches[-1], prompt=options.input, output=options.output, temperature=0, top_p=1
    )
    more = adapter_flags(min(max(options.adapters), load.batch), lora_rank)
    with (
        operations(options.ops, backend),
        begun(backend, draft, load, options, overlap, ranks, wait, more, batches) as session,
    ):
        for batch in batches:
            counts = [*dict.fromkeys(min(adapters, batch) for adapters in options.adapters)]
            times: dict[tuple[int, float], float] = {}  # by the adapters and the temperature
            for adapters, (temperature, top_p) in product(counts, sampled):
                asked = replace(
                    load, batch=batch, temperature=temperature, top_p=top_p, adapters=adapters
                )
                line: Line = measure(session, asked, rates, options) | {"lora_rank": lora_rank}
                texts, ms = line.pop("texts"), line["ms"]
                times[adapters, temperature] = ms
                if temperature and (greedy := times.get((adapters, 0))):
                    line["over_greedy"] = round(ms / greedy - 1, 4)
                if adapters and (base := times.get((0, temperature))):
                    line["over_base"] = round(ms / base - 1, 4)
                keeps_text = session.served.keeps_text_at(temperature)
                yield line | start_facts(session), texts, keeps_text


def _top_ps(options: argparse.Namespace) -> list[float]:
    """One for each temperature; greedy rows have no use for any."""
    return [options.top_p if temperature else 1.0 for temperature in options.temperature]


def model_options(
    description: str | None, output: int, models: str | None = None
) -> argparse.ArgumentParser:
    """Returns a parser with the options of all step benches: model, startup and output file.

    Args:
      description: Docstring; its first line is printed.
      output: Default of the tokens of an answer.
      models: How many there may be, as argparse's `nargs`; None: one.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    text = "folder with a config.json"
    parser.add_argument("--model", type=Path, nargs=models, required=True, help=text)
    parser.add_argument("--load-format", choices=("dummy", "auto"), default="dummy")
    parser.add_argument("--output", type=int, default=output, help="tokens of an output")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--accept-length", help="value of --speculative-simulate-accept-length")
    parser.add_argument("--folders", nargs="*", default=[], metavar="ALGORITHM=DIR")
    parser.add_argument("--flags", default="", help="more server flags, as one quoted word")
    parser.add_argument("--out", type=Path, help="JSON file, written after every line")
    return parser


def decode_options(description: str | None, models: str | None = None) -> argparse.ArgumentParser:
    """Returns a parser with the options shared with `bench.steps.compare`; see `model_options`."""
    parser = model_options(description, output=128, models=models)
    parser.add_argument("--input", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=16, help="steps of a timed block")
    return parser


def side_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for backends and drafters."""
    parser.add_argument("--backend", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--drafts", nargs="+", default=[PLAIN], metavar="SPEC")


def options() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    parser = decode_options(__doc__, models="+")
    side_options(parser)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--overlap-depth", nargs="+", type=int, choices=(0, 1, 2), default=[1])
    parser.add_argument("--tp-size", nargs="+", type=int, default=[1], help="GPUs")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0])
    parser.add_argument("--top-p", type=float, default=1.0, help="top-p of sampled rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-trace", action="store_true", help="do not trace kernels")
    parser.add_argument("--kernels", action="store_true", help="list the longest kernels")
    parser.add_argument("--ops", choices=("bound", "plain"), default="bound")
    text = "LoRA adapters that requests take in turn, with random weights"
    parser.add_argument("--adapters", nargs="+", type=int, default=[0], metavar="N", help=text)
    parser.add_argument("--lora-rank", nargs="+", type=int, default=[16], metavar="R")
    text = "engines to start side by side, each in its own process"
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help=text)
    return parser


@contextmanager
def operations(ops: str, backend: str) -> Iterator[None]:
    """Within it the operations of a backend are plain, or what `ops` has bound."""
    if ops == "bound":
        yield
        return
    with import_module(f"{backend}_impl.ops").reference_ops():
        yield


def main() -> int:
    """Prints and writes the lines; the exit code is 1 where texts differ or nothing was served."""
    given = options().parse_args()
    reports = run(given, ["python", "-m", "bench.steps.decode_steps", *sys.argv[1:]])
    has_other_texts = any(report.has_other_texts for report in reports)
    if has_other_texts:
        print("THE TEXTS ARE NOT EQUAL", file=sys.stderr)
    return 1 if has_other_texts or not all(report.found["lines"] for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
