"""Agent sessions with every drafter on servers of their own, and the table of the results."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from bench.common.draft_config import PLAIN, Draft, folders_beside
from bench.common.waiting import progress
from bench.soak.clients import Answer
from bench.soak.resources import MODEL, SAMPLE_S, Growth, Sample, Watch, judge, own_server
from bench.soak.runs import Line, Record, Run, line_of, table
from bench.soak.sessions import Session, sessions

DRAFTS = (
    *("none", "NEXTN:S=3", "STANDALONE:S=3", "EAGLE:S=5,k=4,N=16", "EAGLE3:S=5,k=4,N=16"),
    *("DFLASH", "DFLASH:k=8,N=16", "NGRAM:N=8", "NEXTN+NGRAM:S=3"),
)
JUDGED = 16
"""Fewest samples of a run from which growth is judged."""

RESOURCES = ("rss_bytes", "threads", "files")

TABLE = ("--speculative-ngram-capacity", "65536")
"""Size of n-gram tables. The pages of the default one, 100 MB, are mapped as it fills, which would
count as growth.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of agent sessions."""
    group = parser.add_argument_group("agent sessions")
    group.add_argument("--sessions", type=int, default=0, help="number of agent sessions")
    group.add_argument(
        "--rounds",
        type=int,
        nargs=2,
        default=(30, 60),
        metavar=("LOW", "HIGH"),
        help="of a session",
    )
    group.add_argument(
        "--drafts", nargs="+", default=list(DRAFTS), help="as in bench.quality.accuracy"
    )
    group.add_argument("--model", type=Path, default=MODEL, help="folder of the target model")
    group.add_argument("--backend", choices=("torch", "jax"), default="torch")
    group.add_argument("--at-once", type=int, default=8, help="sessions at the same time")
    group.add_argument("--context-length", type=int, default=16384, help="positions of a request")
    group.add_argument("--seed", type=int, default=0, help="seed of the sessions")
    group.add_argument("--flags", default="", help="more flags of the servers, in one word")
    group.add_argument(
        "--cache-flags", default="", help="more flags of the servers with a prefix cache"
    )


def measure(args: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Plays the sessions with plain decoding and with every drafter; prints the table.

    Args:
      args: See `add_options`.
      save: Receives the results so far after each drafter, as a run may take hours.

    Returns:
      The command, the lines of the table, and the failed checks as sentences.

    Raises:
      ValueError: An option is invalid.
      RuntimeError: A server did not start.
    """
    low, high = args.rounds
    if args.sessions < 1 or not 1 <= low <= high or args.at_once < 1:
        raise ValueError(
            "--sessions, --rounds and --at-once must be positive, and LOW at most HIGH"
        )
    played = sessions(args.sessions, (low, high), args.seed)
    lines: list[Line] = []
    faults: list[str] = []
    growths: dict[str, Any] = {}
    plain: Run | None = None
    report: dict[str, Any] = {
        "command": f"python -m bench.soak {shlex.join(sys.argv[1:])}",
        "versions": {name: version(name) for name in ("numpy", args.backend)},
        "lines": [],
        "resources": growths,
        "faults": faults,
    }
    for drafts, cached in ((PLAIN, False), *((each, True) for each in args.drafts)):
        answers = plain.answers if plain else {}
        run, samples, accept_length = play(args, played, Draft.parse(drafts), cached, answers)
        plain = plain or run
        line = line_of(drafts, cached, run, run.records, plain.records, accept_length)
        name = f"{drafts} {'with' if cached else 'without'} prefix cache"
        faults += [f"{name}: {fault}" for fault in line.faults]
        faults += [
            f"{name}: {fault}" for fault in examples_of_faults(run.records, plain.records, cached)
        ]
        growths[name] = _growth(name, samples, faults)
        lines.append(line)
        report["lines"].append(asdict(line))
        save(report)
    print(table(lines))
    return report


def play(
    args: argparse.Namespace,
    played: Sequence[Session],
    draft: Draft,
    cached: bool,
    plain: Mapping[tuple[int, int], Answer],
) -> tuple[Run, list[Sample], float]:
    """Plays the sessions on a server of their own.

    Returns:
      The run, samples of the server, and its mean acceptance length.

    Raises:
      RuntimeError: The server did not start.
    """
    flags = [*draft.flags(folders_beside(args.model)), *shlex.split(args.flags)]
    # The pool of state snapshots grows with the requests. Aborted streams leave some there, which
    # must not evict those of other sessions.
    flags += ["--max-running-requests", str(2 * args.at_once), "--log-level", "warning"]
    flags += TABLE if "NGRAM" in draft.algorithm else []
    flags += shlex.split(args.cache_flags) if cached else ["--disable-radix-cache"]
    with own_server(args.model, args.backend, args.context_length, flags) as (url, pid):
        num_rounds = sum(len(session.rounds) for session in played)
        with progress(f"rounds of {draft}", num_rounds) as done:
            run = Run(url, args.model, args.at_once, done, plain)
            samples, accept_length = asyncio.run(_played(run, played, url, pid))
    return run, samples, accept_length


async def _played(
    run: Run, played: Sequence[Session], url: str, pid: int
) -> tuple[list[Sample], float]:
    """Plays the sessions, and samples the server meanwhile and at the end."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        watch, samples = Watch(pid), list[Sample]()
        playing = asyncio.create_task(run.play(played))
        while not playing.done():
            await asyncio.wait([playing], timeout=SAMPLE_S)
            samples.append(await watch.sample(client))
        await playing
    return samples, watch.accept_length


def _growth(name: str, samples: Sequence[Sample], faults: list[str]) -> dict[str, Any]:
    """Returns the resources of a run; adds a fault if one of them grew."""
    if len(samples) < JUDGED:
        return {"samples": len(samples)}
    try:
        return judge(samples, RESOURCES)
    except Growth as growth:
        faults.append(f"{name}: {growth}")
        return {"samples": len(samples)}


def examples_of_faults(
    records: Sequence[Record], plain: Sequence[Record], cached: bool
) -> list[str]:
    """Returns the first invalid output, lost prefix and changed output as sentences."""
    found = []
    for record in records:
        if cached and record.cached_tokens < record.at_least:
            place = f"session {record.session}, round {record.round}"
            found.append(f"{place}: {record.cached_tokens} cached tokens, not {record.at_least}")
            break
    for record in records:
        if record.fault:
            found.append(f"session {record.session}, round {record.round}: {record.fault}")
            break
    for record, want in zip(records, plain, strict=True):
        if record.output != want.output:
            place = f"session {record.session}, round {record.round}"
            found.append(f"{place}: {want.output:.200} became {record.output:.200}")
            break
    return found
