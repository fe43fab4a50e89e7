"""Throughput over HTTP relative to the engine alone, measured in turn.

    python -m bench.serving.http_overhead --backend torch --drafts NEXTN --rounds 7 --out FILE

A round serves all requests, `--batch` of them at a time: once by the engine in this process, as in
`bench.steps.decode_steps`, and once streamed over HTTP from a server on this machine. `--streams`
limits the open streams. The order changes between rounds. The result is the median of the rounds'
shares, with the lowest and the highest. Both sides must return the same number of tokens, and
neither has a prefix cache.

Other work on the machine takes time from either side. So the seconds in which an engine's thread
was ready and waited for a core are reported and subtracted. `wall` is the share with them, `best`
that of the fastest rounds, and `steps` the server's number of steps relative to the engine's. CPU
seconds of engine, HTTP server and client are reported too. Both engines have the programs of a
server. On a GPU they hold memory at the same time: use `--flags "--mem-fraction-static 0.4"`. A
shape without weights is served with `--words models/demo/target` and `--flags "--load-format
dummy"`. The exit code is 1 if the median is below `--least`.
"""

import argparse
import asyncio
import math
import os
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.common.draft_config import Draft, folders_of, named_folder
from bench.common.environment import versions, write_results
from bench.common.session import CONTEXT_MULTIPLE
from bench.serving.client import Client, Run, run_load
from bench.serving.prompt_sets import NAMES, RANDOM, Ask, asks
from bench.serving.with_tokenizer import worded
from shared.engine.request import Request, SamplingParams
from shared.text.tokenizer import Tokenizer
from tests.support.http_fixtures import Server, serving
from tests.support.in_process_engine import Served, started, timed

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"
TIMEOUT_S = 600.0
STEPS = "engine_steps_total{"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Work:
    """The same work for both sides.

    Attributes:
      requests: For the engine.
      asks: Requests for the server.
      context: Most tokens of a request.
    """

    requests: list[Request]
    asks: list[Ask]
    context: int

    @classmethod
    def of(cls, model: Path, options: argparse.Namespace) -> "Work":
        """Shipped tasks, greedy.

        Raises:
          ValueError: The model has no tokenizer with a chat template.
        """
        tokenizer = Tokenizer.from_folder(model)
        if tokenizer is None or not tokenizer.has_chat_template:
            raise ValueError(f"{model} has no tokenizer with a chat template; give --words")
        found = asks(options.dataset_name, options.num_prompts, options.seed, None)
        fields = {"temperature": 0, "max_tokens": options.max_tokens, "ignore_eos": True}
        prompts = [tuple(tokenizer.encode_chat(ask.body["messages"])) for ask in found]
        sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
        requests = [
            Request(request_id=index, prompt=prompt, sampling=sampling)
            for index, prompt in enumerate(prompts)
        ]
        longest = max(map(len, prompts)) + options.max_tokens
        context = -(-longest // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
        return cls(requests, [ask.with_fields(**fields) for ask in found], context)

    @property
    def tokens(self) -> int:
        """Number of output tokens of all requests; each output ends by its length."""
        return sum(request.sampling.max_tokens for request in self.requests)


@dataclass(frozen=True)
class Offline:
    """The engine in this process."""

    served: Served
    work: Work

    def round(self) -> dict[str, Any]:
        """Serves everything once."""
        requests = [
            Request(request_id=each.request_id, prompt=each.prompt, sampling=each.sampling)
            for each in self.work.requests
        ]
        clocks, before = Clocks({"engine": os.getpid()}), self._steps()
        run = timed(self.served, requests)
        tokens = sum(len(outcome.tokens) for outcome in run.outcomes)
        return {"steps": self._steps() - before, **clocks.found(tokens, run.seconds)}

    def _steps(self) -> int:
        counters = self.served.engine.metrics.snapshot()
        return int(sum(v for name, v in counters.items() if name.startswith(STEPS)))


@dataclass(frozen=True)
class OverHttp:
    """A server on this machine, and its clients in this process."""

    server: Server
    work: Work
    streams: int | None

    def round(self) -> dict[str, Any]:
        """Serves everything once.

        Raises:
          RuntimeError: A request failed.
        """
        engine, http = self.server.pids()[:2]
        before = self._steps()
        clocks = Clocks({"engine": engine, "http": http, "client": os.getpid()})
        run = asyncio.run(self._load())
        for reply in run.replies:
            if reply.error:
                raise RuntimeError(f"{reply.error}: {reply.reason}")
        found = clocks.found(sum(reply.tokens for reply in run.replies), run.seconds)
        return {"steps": self._steps() - before, **found}

    def _steps(self) -> int:
        page = httpx.get(self.server.url + "/metrics").text
        return int(sum(map(float, re.findall(rf"^\w+[:_]{STEPS}.* (\S+)$", page, re.MULTILINE))))

    async def _load(self) -> Run:
        async with Client(self.server.url, None, TIMEOUT_S) as client:
            how = {"rate": math.inf, "most": self.streams, "seed": 0, "done": lambda: None}
            return await run_load(client, self.work.asks, **how, streams=True)


class Clocks:
    """CPU time of processes from now on.

    Args:
      pids: By name; the thread that a process began with is the engine's in "engine".
    """

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids, self._cpu, self._waited = pids, _each(cpu_s, pids), waited_s(pids["engine"])

    def found(self, tokens: int, seconds: float) -> dict[str, Any]:
        """The numbers of a run that took so long by the wall's clock."""
        waited = waited_s(self._pids["engine"]) - self._waited
        cpu = {f"{name}_cpu_s": s - self._cpu[name] for name, s in _each(cpu_s, self._pids).items()}
        found = {"seconds": seconds, "waited_s": waited, **cpu}
        found = {name: round(value, 4) for name, value in found.items()}
        return {"tokens": tokens, "tokens_per_s": round(tokens / (seconds - waited), 1), **found}


def _each(read: Callable[[int], float], pids: dict[str, int]) -> dict[str, float]:
    return {name: read(pid) for name, pid in pids.items()}


def cpu_s(pid: int) -> float:
    """Seconds of a processor that a process has had, in all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def waited_s(pid: int) -> float:
    """Seconds in which the first thread of a process was ready and had no processor."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def rounds(
    offline: Callable[[], dict[str, Any]], http: Callable[[], dict[str, Any]], count: int
) -> list[dict[str, Any]]:
    """Yields `rounds` rounds of both sides, after a warm-up; the sides alternate in going first."""
    found = []
    for index in range(count + 1):
        sides = {"offline": offline, "http": http}
        order = list(sides) if index % 2 else list(sides)[::-1]
        line = {name: sides[name]() for name in order}
        share = line["http"]["tokens_per_s"] / line["offline"]["tokens_per_s"]
        wall = line["offline"]["seconds"] / line["http"]["seconds"]
        found.append({**line, "share": round(share, 4), "wall": round(wall, 4)})
        speeds = ", ".join(f"{name} {line[name]['tokens_per_s']:.0f} tokens/s" for name in sides)
        note = "" if index else "  (warm-up)"
        print(f"{speeds}, share {share:.3f}, wall {wall:.3f}{note}", flush=True)
    return found[1:]


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns medians of the rounds, and the range of the shares."""
    shares = [line["share"] for line in found]
    middle = {
        side: {key: statistics.median(line[side][key] for line in found) for key in found[0][side]}
        for side in ("offline", "http")
    }
    spread = {"share": statistics.median(shares), "low": min(shares), "high": max(shares)}
    spread["wall"] = statistics.median(line["wall"] for line in found)
    best = {s: max(line[s]["tokens_per_s"] for line in found) for s in ("offline", "http")}
    steps = [line["http"]["steps"] / line["offline"]["steps"] for line in found]
    spread["steps"] = round(statistics.median(steps), 4)
    spread["best"] = round(best["http"] / best["offline"], 4)
    return {**spread, **middle}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Starts both sides, and runs them alternately.

    Raises:
      ValueError: An option is invalid; one sentence.
      RuntimeError: A request failed, or the sides gave different numbers of tokens.
    """
    folders = folders_of(options.model, dict(map(named_folder, options.folders)))
    if options.words is None:
        return _measure(options, options.model, folders)
    with tempfile.TemporaryDirectory() as made:
        model = worded(options.model, options.words, Path(made) / options.model.name)
        return _measure(options, model, folders)


def _measure(
    options: argparse.Namespace, model: Path, folders: Mapping[str, Path]
) -> dict[str, Any]:
    work, draft = Work.of(model, options), Draft.parse(options.drafts)
    flags = ["--model-path", str(model), *draft.flags(folders)]
    flags += shlex.split(options.flags)
    flags += ["--disable-radix-cache", "--max-running-requests", str(options.batch)]
    flags += ["--context-length", str(work.context)]
    served = started(options.backend, flags, lambda capacity: capacity)
    command = ["-m", f"{options.backend}_impl.serve", "--port", "0", *flags]
    try:
        with serving(command, threads=None) as server:
            sides = Offline(served, work).round, OverHttp(server, work, options.streams).round
            found = rounds(*sides, options.rounds)
    finally:
        served.engine.close()
    given = {line[side]["tokens"] for line in found for side in ("offline", "http")}
    if given != {work.tokens}:
        raise RuntimeError(f"the answers have {given} tokens, not {work.tokens}")
    where: dict[str, Any] = {"versions": versions(options.backend, served.device)}
    where |= {"cores": os.cpu_count(), "load": os.getloadavg()}
    return {**where, "summary": summary(found), "rounds": found}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving.http_overhead", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--backend", choices=("torch", "jax"), default="torch")
    add("--model", type=Path, default=DEMO, help=f"default: {DEMO}")
    add("--drafts", default="NEXTN", metavar="SPEC", help="none, NEXTN:S=3, EAGLE3, ...")
    add("--folders", nargs="*", default=[], metavar="ALGORITHM=DIR")
    add("--words", type=Path, metavar="DIR", help="a model's tokenizer, for a shape without one")
    add("--batch", type=int, default=32, help="requests served at once")
    add("--streams", type=int, help="maximum of open streams (default: all requests)")
    add("--num-prompts", type=int, default=64)
    add("--dataset-name", choices=[n for n in NAMES if n != RANDOM], default="problems")
    add("--max-tokens", type=int, default=64, help="exact number of tokens of each output")
    add("--seed", type=int, default=0)
    add("--rounds", type=int, default=5)
    add("--least", type=float, default=0.95, help="lowest median share for exit code 0")
    add("--flags", default="", help="more flags of both engines, as one quoted word")
    add("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    names = ("rounds", "num_prompts", "batch", "max_tokens", "streams")
    if any(number is not None and number < 1 for number in map(vars(options).get, names)):
        flags = ", ".join("--" + name.replace("_", "-") for name in names)
        parser.error(f"{flags} must be above 0")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Prints and writes what was measured."""
    words = sys.argv[1:] if arguments is None else arguments
    options = parse(words)
    try:
        found = measure(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    summary = found["summary"]
    numbers = {
        name: f"{summary[name]:.3f}" for name in ("share", "low", "high", "wall", "best", "steps")
    }
    print(", ".join(f"{name} {number}" for name, number in numbers.items()))
    print(f"{summary['offline']['tokens_per_s']:.0f} tokens/s offline; processor: {_cpu(summary)}")
    command = shlex.join(["python", "-m", "bench.serving.http_overhead", *words])
    if options.out:
        found = {"command": command, **found}
        write_results(options.out, found)
    return 0 if summary["share"] >= options.least else 1


def _cpu(summary: dict[str, Any]) -> str:
    parts = [f"offline {summary['offline']['engine_cpu_s']:.2f} s"]
    parts += [f"{name} {summary['http'][f'{name}_cpu_s']:.2f} s" for name in _PROCESSES]
    return ", ".join(parts)


_PROCESSES = ("engine", "http", "client")

if __name__ == "__main__":
    sys.exit(main())
