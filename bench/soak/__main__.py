"""Long runs of a server of the demo model, to check that nothing grows and no output changes.

    python -m bench.soak --minutes 10 --out FILE.json
    python -m bench.soak --sessions 200 --rounds 30 60 --drafts none NEXTN EAGLE3 --out FILE.json

The first form sends chats, streams, completions, tools, tokens, invalid requests and requests that
are cancelled, until the time is up. The server has NEXTN and few pages. Memory, threads, open files
and acceptance of the last quarter are compared with those of the second; caches fill in the first.

The second form plays agent sessions: conversations with tools and JSON schemas over chat
completions, the Responses API and the Messages API, with aborts, edits of earlier rounds and two
tenants. Plain decoding without a prefix cache runs first, and all conversations continue with its
answers. Each drafter must then return the same outputs, every constrained output must be valid, and
the prefix hits must be within computed bounds. In bfloat16 the outputs are equal only with
`--cache-flags=--disable-output-caching`.

The exit code is 1 if a check fails, and 2 if a run does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

from bench.soak import agents, traffic
from bench.soak.resources import MODEL, Growth, judge, own_server

FLAGS = ["--speculative-algorithm", "NEXTN", "--tool-call-parser", "hermes"]
FLAGS += ["--max-total-tokens", "4096", "--max-running-requests", "4", "--log-level", "warning"]
CONTEXT = 2048
FAILED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the measurements; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="time of the mixed traffic")
    agents.add_options(parser)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args(arguments)
    save = partial(_save, args.out)
    try:
        report = agents.measure(args, save) if args.sessions else _mixed(args.minutes)
    except* (
        RuntimeError,
        ValueError,
        httpx.HTTPError,
        openai.APIError,
        anthropic.APIError,
        AssertionError,
    ) as group:
        error = group.exceptions[0]
        print(f"The soak failed: {error or type(error).__name__}", file=sys.stderr)
        return_code = FAILED
    else:
        save(report)
        return_code = int(bool(report["faults"]))
        for fault in report["faults"]:
            print(fault, file=sys.stderr)
    return return_code


def _save(file: Path | None, report: dict[str, Any]) -> None:
    """Writes the results, if there is a file for them."""
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _mixed(minutes: float) -> dict[str, Any]:
    with own_server(MODEL, "torch", CONTEXT, FLAGS) as (url, pid):
        samples, counts = asyncio.run(traffic.soak(url, pid, 60 * minutes))
    report: dict[str, Any] = {"minutes": minutes, "requests": dict(counts), "faults": []}
    try:
        report["measured"] = judge(samples)
    except Growth as growth:
        report["faults"].append(str(growth))
    print(json.dumps(report, indent=1))
    return {**report, "samples": [asdict(sample) for sample in samples]}


if __name__ == "__main__":
    raise SystemExit(main())
