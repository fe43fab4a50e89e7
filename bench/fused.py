"""A decode step in one device program beside the same step in three, and both beside plain steps.

    python -m bench.fused --model bench/shapes/qwen3-8b --backend torch --batch 1 32 \
        --drafts EAGLE3:S=1,L=1.7 EAGLE3:S=3,L=2.5

Three are what an engine runs that drafts, verifies and extends the drafter in turn, each by a graph
of its own. The two take turns in one engine, and must give the same text. Then a closed loop: as
many requests as the batch has rows are always there, each followed by another as it ends; requests
a second of plain decoding, of three programs and of one.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from bench.compare import figures_of, ratio, told_ratio, written
from bench.drafting import PLAIN, Draft
from bench.offline import Report, begun, common_options, with_lot
from bench.session import Load, Session
from shared.boundary.backend import Program, Work
from shared.engine.request import Request
from tests.support.op_sides import SIDES

WAYS = ("none", "split", "fused")
ROUNDS_OF_LOOP = 4
"""Requests of a closed loop for each row of the batch."""


def split(session: Session) -> Iterator[None]:
    """Between two calls of `next` the steps run in three parts.

    Raises:
      ValueError: The step cannot be cut; one sentence.
    """
    backend, program = session.served.backend, program_of(session)
    swap = import_module(f"bench.split_{session.backend}").swap
    other = swap(backend, program, None)
    while True:
        yield
        other = swap(backend, program, other)


def program_of(session: Session) -> Program:
    """The decode program of a session.

    Raises:
      ValueError: Nothing drafts on the device.
    """
    wanted = session.shape
    for program in session.served.backend.limits.programs:
        if program.work is Work.DECODE and program.shape == wanted and program.drafts_on_device:
            return program
    raise ValueError(f"{session.draft} drafts nothing on the device")


def closed_loop(session: Session, load: Load) -> float:
    """Requests a second; their outputs are of different length, so that rows end at any time."""
    engine, batch = session.served.engine, load.batch
    lengths = np.random.default_rng(0).integers(
        load.output // 2, load.output + 1, ROUNDS_OF_LOOP * batch
    )
    many = replace(load, batch=ROUNDS_OF_LOOP * batch).requests(session.served.backend.limits.vocab)
    waiting: list[Request] = [
        replace(request, sampling=replace(request.sampling, max_tokens=int(length)))
        for request, length in zip(many, lengths, strict=True)
    ]
    running: list[Request] = []
    began = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop())
            engine.add(running[-1])
        engine.step()
        running = [request for request in running if request.finish_reason is None]
    while engine.busy:
        engine.step()
    return len(many) / (time.perf_counter() - began)


def measure(backend: str, draft: Draft, load: Load, given: argparse.Namespace) -> dict[str, Any]:
    """One line: both ways in turn, and the closed loop of both.

    Raises:
      ValueError: The side cannot be served so; one sentence.
    """
    found: dict[str, Any] = {"backend": backend, "drafts": str(draft), "batch": load.batch}
    with begun(backend, draft, load, given, None) as session:
        ways, texts = split(session), {}
        turns: dict[str, list[dict[str, float]]] = {"split": [], "fused": []}
        loops: dict[str, list[float]] = {"split": [], "fused": []}
        for turn in range(given.turns + 1):
            for way in turns:
                next(ways)
                served = session.round(load)
                texts[way] = served.texts
                if turn:  # the first warms up
                    turns[way].append(figures_of(served, load.batch, given.steps))
                    loops[way].append(closed_loop(session, load))
        found["texts_are_equal"] = texts["split"] == texts["fused"]
        found["simulated_accept_length"] = session.served.backend.limits.simulated_accept_length
    for way in turns:
        found[f"{way}_ms"] = statistics.median(turn["ms"] for turn in turns[way])
        found[f"{way}_requests_per_s"] = statistics.median(loops[way])
    return found | {"split_to_fused": ratio(turns["fused"], turns["split"], "ms")}


def plain_loop(backend: str, load: Load, given: argparse.Namespace) -> float:
    """Requests a second of plain decoding."""
    with begun(backend, Draft.parse(PLAIN), load, given, None) as session:
        closed_loop(session, load)
        return statistics.median(closed_loop(session, load) for _ in range(given.turns))


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Serves everything that the options name, and prints a line of each."""
    report = Report("", None)
    lines: list[dict[str, Any]] = []
    for backend in sorted(given.backend, key=list(SIDES).index):
        report.add_side(backend)
        for batch in given.batch:
            load = Load(
                batch=batch, prompt=given.input, output=given.output, temperature=0, top_p=1
            )
            plain = plain_loop(backend, load, given)
            for text in given.drafts:
                draft = with_lot(Draft.parse(text), given.accept_length)
                line = measure(backend, draft, load, given) | {"none_requests_per_s": plain}
                lines.append(line)
                print(told(line), flush=True)
    return report.found | {"lines": lines}


def told(line: dict[str, Any]) -> str:
    """A line for a terminal."""
    steps = f"split {line['split_ms']:.3f} ms, fused {line['fused_ms']:.3f} ms"
    ratios = told_ratio(line["split_to_fused"])
    loops = ", ".join(f"{way} {line[f'{way}_requests_per_s']:.2f}" for way in WAYS)
    text = "equal texts" if line["texts_are_equal"] else "THE TEXTS DIFFER"
    named = f"{line['backend']} {line['drafts']} {line['batch']}"
    return f"{named}: {steps}, {ratios}, requests/s: {loops}, {text}"


def options() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = common_options((__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--drafts", nargs="+", required=True, metavar="SPEC")
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--turns", type=int, default=3)
    return parser


def main() -> int:
    """Prints and writes the lines; the exit code is 1 where texts differ."""
    found = written("bench.fused", run, options().parse_args())
    return 0 if found and all(line["texts_are_equal"] for line in found["lines"]) else 1


if __name__ == "__main__":
    sys.exit(main())
