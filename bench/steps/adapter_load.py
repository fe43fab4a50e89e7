"""Inter-token gaps of running requests while a LoRA adapter is loaded, without HTTP.

    python -m bench.steps.adapter_load --model bench/shapes/qwen3-8b --backend torch jax --out FILE

Requests of the base model decode. An adapter with random weights is read from its files on a
thread, as by `/load_lora_adapter`, then copied to the one adapter slot between steps, and a short
request with it is served; the longest gap of each of these phases is in the last columns. `quiet`
is the same time without a load. Each load is of another adapter.
"""

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.draft_config import Draft, folders_of
from bench.common.dummy_adapters import adapter_flags
from bench.common.environment import versions, write_results
from bench.common.session import Load, Session
from bench.steps.decode_steps import flags, model_options, side_options
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.models.families import config_from_folder
from shared.models.lora_shapes import adaptable, modules
from shared.models.parameters import parameters
from shared.process.adapter_loads import AdapterHandler
from tests.support.lora_files import write_random_adapter

PROMPT, ANSWER, WARM_UP_STEPS = 16, 4, 16
PHASES = ("read", "write", "serve")
HEADER = (
    f"{'side':6}{'batch':>6}{'rank':>6}{'MB':>7}{'load ms':>9}{'quiet: p50':>12}{'longest':>9}"
    f"{'load: p50':>11}{'longest':>9}{'read':>8}{'write':>8}{'serve':>8}  ms"
)
Line = dict[str, Any]


def write_adapters(folder: Path, model: Path, rank: int, count: int) -> list[Path]:
    """Writes adapters of all linear layers with random weights, which have 16 bits."""
    found = adaptable(parameters(config_from_folder(model), False))
    each = [module for parameter in found for module in modules(parameter)]
    shapes = {f"model.{module.name}": module.tensor.shape for module in each}
    how = {"rank": rank, "alpha": rank, "dtype": np.float16}
    return [
        write_random_adapter(folder / f"adapter-{seed}", shapes, seed=seed, **how)
        for seed in range(count)
    ]


class Running:
    """Requests of the base model that decode all the time, and the times of their tokens."""

    def __init__(self, engine: Engine, handler: AdapterHandler, load: Load, vocab: int) -> None:
        self._engine, self._handler, self._next = engine, handler, load.batch
        self._running = load.requests(vocab)[1:]  # a row remains for requests with an adapter
        self.times: list[float] = []
        for request in self._running:
            engine.add(request)

    def step(self) -> set[int]:
        """Runs a step and handles loads; returns the requests that ended.

        Raises:
          RuntimeError: A request failed, or the running requests ended.
        """
        for reply in self._handler.answers() if self._handler.busy else ():
            if reply[3]:
                raise RuntimeError(reply[3])
        events, now = self._engine.step(), time.perf_counter()
        own = {request.request_id for request in self._running}
        for event in events:
            if event.error or event.request_id in own and event.finish_reason is not None:
                raise RuntimeError(event.error or "a running request ended; raise --output")
        if any(event.tokens and event.request_id == min(own) for event in events):
            self.times.append(now)
        return {event.request_id for event in events if event.finish_reason is not None}

    def run(self, is_over: Callable[[set[int]], bool]) -> list[float]:
        """Runs steps until a condition of the ended requests; returns the gaps in ms."""
        first = len(self.times) - 1
        while not is_over(self.step()):
            pass
        return [1e3 * (later - earlier) for earlier, later in pairwise(self.times[first:])]

    def load(self, name: str, folder: Path) -> dict[str, list[float]]:
        """Loads an adapter and serves a short request with it; returns the gaps of each phase in
        ms.
        """
        self._handler.load(0, name, str(folder))
        gaps = {"read": self.run(lambda ended: not self._handler.busy)}
        self._next += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER, lora=name)
        request = Request(request_id=self._next, prompt=(*range(2, 2 + PROMPT),), sampling=sampling)
        self._handler.assign(request)
        self._engine.add(request)
        gaps["write"] = self.run(lambda ended: self._is_written(request))
        gaps["serve"] = self.run(lambda ended: self._next in ended)
        return gaps

    def _is_written(self, request: Request) -> bool:
        return bool(request.adapter_slot) and self._engine.adapters.is_ready(request)


def measured(session: Session, load: Load, rank: int, folders: Sequence[Path]) -> Iterator[Line]:
    """Yields a line for each adapter but the first, which warms up."""
    served = session.served
    handler = AdapterHandler(served.engine.adapters, served.adapter_reader)
    running = Running(served.engine, handler, load, served.backend.capacity.vocab)
    running.run(lambda ended: len(running.times) > WARM_UP_STEPS)
    for number, folder in enumerate(folders):
        began = time.perf_counter()
        phases = running.load(folder.name, folder)
        seconds, gaps = time.perf_counter() - began, [*chain(*phases.values())]
        until = len(running.times) + len(gaps)
        quiet = running.run(lambda ended, until=until: len(running.times) >= until)
        if number:
            pool = served.backend.capacity.adapters
            assert pool is not None
            yield {
                "backend": session.backend,
                "batch": load.batch,
                "rank": rank,
                "adapter_bytes": pool.adapter_bytes,
                "load_ms": round(1e3 * seconds, 2),
                "quiet_p50_ms": round(statistics.median(quiet), 3),
                "quiet_longest_ms": round(max(quiet), 3),
                "load_p50_ms": round(statistics.median(gaps), 3),
                "load_longest_ms": round(max(gaps), 3),
                **{
                    f"{k}_longest_ms": round(max(each, default=0.0), 3)
                    for k, each in phases.items()
                },
            }


def line_of(line: Line) -> str:
    """Returns a line for a terminal."""
    return (
        f"{line['backend']:6}{line['batch']:6}{line['rank']:6}{line['adapter_bytes'] / 1e6:7.1f}"
        f"{line['load_ms']:9.1f}{line['quiet_p50_ms']:12.2f}{line['quiet_longest_ms']:9.2f}"
        f"{line['load_p50_ms']:11.2f}{line['load_longest_ms']:9.2f}"
        + "".join(f"{line[f'{phase}_longest_ms']:8.2f}" for phase in PHASES)
    )


def run(options: argparse.Namespace, command: str) -> Line:
    """Measures everything that the options name."""
    found: Line = {"command": command, "versions": {}, "lines": []}
    size = {"prompt": PROMPT, "output": options.output, "temperature": 0.0, "top_p": 1.0}
    load, rank, plain = Load(batch=options.batch, **size), options.lora_rank, Draft.parse("none")
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        folders = write_adapters(Path(folder), options.model, rank, 1 + options.loads)
        for backend in options.backend:
            more = [*flags(options, None), *adapter_flags(1, rank)]
            none = folders_of(options.model, {})
            session = Session.begin(backend, options.model, plain, none, more, load)
            device = "cuda" if session.served.device == "gpu" else "cpu"
            found["versions"][backend] = versions(backend, device)
            for line in measured(session, load, rank, folders):
                found["lines"].append(line)
                print(line_of(line), flush=True)
                if options.out:
                    write_results(options.out, found)
            session.served.engine.close()
    return found


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command."""
    parser = model_options(__doc__, output=4096)
    side_options(parser)
    parser.add_argument("--batch", type=int, default=8, help="requests at once")
    parser.add_argument("--lora-rank", type=int, default=16, metavar="R")
    parser.add_argument("--loads", type=int, default=5, help="adapters to load")
    return parser.parse_args(words)


if __name__ == "__main__":
    run(options(), shlex.join(["python", "-m", "bench.steps.adapter_load", *sys.argv[1:]]))
