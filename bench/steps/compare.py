"""Alternates two configurations in one run and reports the ratio of their times.

    python -m bench.steps.compare --model bench/shapes/qwen3-8b --batch 8 \
        --a "torch none" --b "torch EAGLE3:S=3,L=2.5 --overlap-depth 0"

A side is a backend, a drafter, and server flags. Both engines stay ready and serve the same batch
alternately, A B A B, so that a temporary slowdown affects both. The ratio of a turn is that of its
two medians, B to A.
"""

import argparse
import os
import shlex
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from bench.common.draft_config import Draft
from bench.common.environment import write_results
from bench.common.session import Load, Round, Session
from bench.steps.decode_steps import begun, decode_options, start_facts, with_lot
from bench.steps.report import Report
from tests.support.op_sides import SIDES

Figures = dict[str, float]


def sides_of(given: argparse.Namespace) -> list[argparse.Namespace]:
    """The options of A and of B.

    Raises:
      ValueError: A side has no backend, or no drafter.
    """
    found = []
    for name in ("a", "b"):
        backend, *rest = shlex.split(getattr(given, name)) or [""]
        if backend not in SIDES or not rest:
            raise ValueError(
                f"--{name} is BACKEND DRAFTS [FLAG ...], BACKEND of {', '.join(SIDES)}"
            )
        draft = with_lot(Draft.parse(rest[0]), given.accept_length)
        own = {"name": name, "backend": backend, "draft": draft}
        own["flags"] = shlex.join([*shlex.split(given.flags), *rest[1:]])
        found.append(argparse.Namespace(**(vars(given) | own)))
    return found


def figures_of(served: Round, batch: int, steps: int) -> Figures:
    """Returns the figures of one turn of one side.

    Raises:
      ValueError: The round has no whole block.
    """
    blocks, seconds = served.blocks(steps), sum(served.step_s)
    if not blocks:
        raise ValueError(f"a round has fewer than {steps} steps; raise --output")
    return {
        "ms": statistics.median(blocks),
        "tokens_per_s": served.tokens / seconds,
        "accept_length": served.tokens / len(served.step_s) / batch,
        "prompt_ms": 1e3 * served.prompt_s,
    }


def ratio(a: list[Figures], b: list[Figures], name: str) -> Figures:
    """B to A, turn by turn."""
    found = [theirs[name] / ours[name] for ours, theirs in zip(a, b, strict=True)]
    return {"median": statistics.median(found), "low": min(found), "high": max(found)}


def format_ratio(part: Figures) -> str:
    """A ratio for a terminal."""
    return f"{part['median']:.4f} ({part['low']:.4f} to {part['high']:.4f})"


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Serves both sides in turn.

    Raises:
      ValueError: An option is wrong, or a side cannot be served; one sentence.
    """
    load = Load(
        batch=given.batch,
        prompt=given.input,
        output=given.output,
        temperature=given.temperature,
        top_p=given.top_p,
    )
    sides = sides_of(given)
    report = Report("", None)
    rates = {
        backend: report.add_side(backend)
        for backend in SIDES
        if any(s.backend == backend for s in sides)
    }
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}
        # JAX may take all of a GPU's memory, so torch begins.
        for side in sorted(sides, key=lambda side: list(SIDES).index(side.backend)):
            flags = begun(side.backend, side.draft, load, side, None, 1)
            sessions[side.name] = stack.enter_context(flags)
        turns: dict[str, list[Figures]] = {"a": [], "b": []}
        for turn in range(given.turns + 1):
            for name in turns:
                figures = figures_of(sessions[name].round(load), load.batch, given.steps)
                if turn:  # the first warms up
                    turns[name].append(figures)
        found = report.found | asdict(load)
        for side in sides:
            found[side.name] = side_facts(sessions[side.name], side, turns[side.name])
            limit = 1e3 * sessions[side.name].bytes_of(load) / rates[side.backend].copied
            found[side.name]["limit_ms"] = limit
    names = ("ms", "tokens_per_s")
    return found | {"b_to_a": {name: ratio(turns["a"], turns["b"], name) for name in names}}


def side_facts(session: Session, side: argparse.Namespace, turns: list[Figures]) -> dict[str, Any]:
    """Returns settings and medians over the turns of one side."""
    capacity = session.served.backend.capacity
    medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    return {
        "side": getattr(side, side.name),
        "overlap": capacity.overlap,
        "dtype": session.served.memory.settled.dtype,
        "simulated_accept_length": capacity.simulated_accept_length,
        **medians,
        "turns": turns,
        **start_facts(session),
    }


def table_of(found: dict[str, Any]) -> str:
    """The result for a terminal."""
    lines = []
    for name in ("a", "b"):
        side, lot = found[name], found[name]["simulated_accept_length"]
        simulated = "" if lot is None else f", simulated {lot:g}"
        lines.append(
            f"{name.upper()}  {side['side']}: {side['ms']:.3f} ms a step, "
            f"{side['tokens_per_s']:.1f} tokens/s, length {side['accept_length']:.3f}{simulated}"
        )
    for name, label in (("ms", "step"), ("tokens_per_s", "tokens/s")):
        lines.append(f"B/A {label}: {format_ratio(found['b_to_a'][name])}")
    return "\n".join(lines)


def options() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    parser = decode_options(__doc__)
    parser.add_argument("--a", required=True, metavar="SIDE", help="BACKEND DRAFTS [FLAG ...]")
    parser.add_argument("--b", required=True, metavar="SIDE")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=5)
    return parser


def written(
    module: str, run: Callable[[argparse.Namespace], dict[str, Any]], given: argparse.Namespace
) -> dict[str, Any] | None:
    """Runs a bench and writes its result with the command; None if a start is unsupported."""
    # Several engines may hold their memory at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        found = run(given)
    except ValueError as error:
        print(error, file=sys.stderr)
        return None
    found["command"] = shlex.join(["python", "-m", module, *sys.argv[1:]])
    if given.out:
        write_results(given.out, found)
    return found


def main() -> int:
    """Prints and writes the comparison."""
    found = written("bench.steps.compare", run, options().parse_args())
    if found is None:
        return 1
    print(table_of(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
