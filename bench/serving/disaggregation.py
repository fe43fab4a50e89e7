"""Remote prefill between two engines, next to one engine alone, without HTTP servers.

    python -m bench.serving.disaggregation --model bench/shapes/qwen3-8b bench/shapes/qwen3.5-9b \\
        --backend torch jax --gpus --flags "--max-running-requests 20" --out FILE

`bench.serving.remote_prefill` measures servers; this measures their engine processes on machines
without the packages of the HTTP server. With --gpus the decode engine uses GPU 0 and the prefill
engine GPU 1. Measurements of a decode engine:

- TTFT of one prompt after the other. `alone` prefills it here, `shm` and `tcp` fetch its record.
  `cached` is the TTFT of the same prompt again, which a record cannot be faster than.
- Inter-token latency of running requests while other prompts arrive, all at once. The window ends
  with the last prompt, or after --window-s.

Output tokens of both sides are compared. All engines start side by side, and then are measured one
after the other.
"""

import argparse
import json
import math
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from bench.common.environment import versions, write_results
from bench.common.staggered_processes import Wait, in_turns
from bench.serving.prefill_load import Load, add_options
from bench.serving.transfer_engines import HOST, LIMIT_S, TransferLoop, serve_prefill, use_gpu
from shared.engine.request import FinishReason, Request, SamplingParams
from tests.support.child_process import Spawned

BACKENDS = ("torch", "jax")
TRANSFERS = ("shm", "tcp")
WARM_UP_STEPS = 16
RECEIVED = 'direction="received"'
Line = dict[str, Any]


@dataclass(eq=False)
class Stream:
    """Output of a request.

    Attributes:
      request_id: Id of the request.
      sent: Time of its arrival.
      tokens: Output tokens.
      times: Time of each event with tokens.
      is_over: True after the last one.
    """

    request_id: int
    sent: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    is_over: bool = False

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return 1000 * (self.times[0] - self.sent)


class Clients:
    """Clients of a decode engine, in its process and on its thread."""

    def __init__(self, loop: TransferLoop, vocab: int) -> None:
        self.loop, self._vocab, self._ids = loop, vocab, count(1)
        self._streams: dict[int, Stream] = {}

    def prompt(self, seed: int, length: int) -> list[int]:
        """Returns random tokens, which no other prompt begins with."""
        rng = random.Random(seed)
        return [rng.randrange(2, self._vocab) for _ in range(length)]

    def send(self, prompt: list[int], max_tokens: int) -> Stream:
        """Sends a request that only its length ends."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        request = Request(request_id=next(self._ids), prompt=tuple(prompt), sampling=sampling)
        stream = self._streams[request.request_id] = Stream(request.request_id, time.perf_counter())
        self.loop.add(request)
        return stream

    def run(self, is_over: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Runs the engine until a condition, or for a time."""
        until = time.perf_counter() + limit_s
        while not is_over() and time.perf_counter() < until:
            events, _ = self.loop.step()
            now = time.perf_counter()
            for event in events:
                if event.finish_reason is FinishReason.ERROR:
                    raise RuntimeError(f"request {event.request_id}: {event.error}")
                stream = self._streams[event.request_id]
                stream.tokens += event.tokens
                stream.is_over = event.finish_reason is not None
                if event.tokens:
                    stream.times.append(now)

    def end(self) -> None:
        """Aborts all requests."""
        for stream in self._streams.values():
            if not stream.is_over:
                self.loop.abort(stream.request_id)
        self._streams.clear()
        self.loop.evict()


@dataclass(frozen=True, kw_only=True)
class WindowedLoad(Load):
    """Load of all measurements.

    Attributes:
      window_s: Longest measurement of inter-token latency.
    """

    window_s: float

    @property
    def least(self) -> int:
        """Tokens from which a prompt is prefilled remotely."""
        return min(self.prompt_tokens // 2, 512)


def first_token_times(clients: Clients, load: WindowedLoad) -> tuple[Line, list[int]]:
    """Returns median TTFT in ms of new prompts and of the same again, and their first tokens."""
    found: dict[str, list[float]] = {"new": [], "cached": []}
    tokens = []
    for number in range(load.rounds + 1):
        prompt = clients.prompt(number, load.prompt_tokens)
        for times in found.values():
            stream = clients.send(prompt, 1)
            clients.run(lambda stream=stream: stream.is_over)
            tokens += stream.tokens
            if number:  # the first round warms up
                times.append(stream.ttft_ms)
    clients.end()
    return {name: round(statistics.median(times), 3) for name, times in found.items()}, tokens


def gaps_meanwhile(clients: Clients, load: WindowedLoad) -> tuple[Line, dict[int, list[int]]]:
    """Returns inter-token latency in ms while long prompts arrive, and all output tokens."""
    running = [
        clients.send(clients.prompt(10**6 + number, 16), load.max_tokens)
        for number in range(load.num_running)
    ]
    clients.run(lambda: all(len(stream.times) > WARM_UP_STEPS for stream in running))
    arrived = time.perf_counter()
    prompts = [
        clients.prompt(10**7 + number, load.prompt_tokens) for number in range(load.num_prompts)
    ]
    long = [clients.send(prompt, 1) for prompt in prompts]
    clients.run(lambda: all(stream.is_over for stream in long), load.window_s)
    ended = time.perf_counter()
    if any(stream.is_over for stream in running):
        raise ValueError("the running requests ended before the prompts; raise --max-tokens")
    gaps = sorted(
        1000 * (later - earlier)
        for stream in running
        for earlier, later in pairwise(stream.times)
        if later > arrived
    )
    first = [stream.ttft_ms for stream in long if stream.is_over]
    texts = {stream.request_id - running[0].request_id: stream.tokens for stream in running + long}
    clients.end()
    return {
        "itl_p50_ms": round(statistics.median(gaps), 3),
        "itl_p99_ms": round(gaps[math.ceil(0.99 * len(gaps)) - 1], 3),
        "itl_max_ms": round(gaps[-1], 3),
        "gaps": len(gaps),
        "window_s": round(ended - arrived, 3),
        "prompts_ended": len(first),
        "ttft_p50_ms": round(statistics.median(first), 3) if first else None,
    }, texts


def transferred(loop: TransferLoop, tokens_before: float, num_prompts: int) -> Line:
    """Returns parts, size, time and bandwidth of what was received for each prompt, and failures.

    Args:
      loop: Engine that has received the records.
      tokens_before: Imported tokens before.
      num_prompts: Prompts since.

    Raises:
      ValueError: There is no record.
    """
    assert loop.transfers is not None
    found = {k.removeprefix("kv_transfer_"): v for k, v in loop.transfers.snapshot().items()}
    sums = {
        name: sum(v for key, v in found.items() if key.startswith(f"{name}_") and RECEIVED in key)
        for name in ("records", "bytes", "seconds")
    }
    if not sums["records"]:
        raise ValueError(f"no record was transferred: {found}")
    return {
        "records": round(sums["records"]),
        "prompt_parts": round(sums["records"] / num_prompts, 3),
        "prompt_tokens": round((imported_tokens(loop) - tokens_before) / num_prompts),
        "prompt_bytes": round(sums["bytes"] / num_prompts),
        "transfer_ms": round(1000 * sums["seconds"] / num_prompts, 3),
        "gb_per_s": round(sums["bytes"] / sums["seconds"] / 1e9, 3),
        "failures": {name: v for name, v in found.items() if name.startswith("failures")},
    }


def imported_tokens(loop: TransferLoop) -> float:
    """Returns the tokens of all records that the engine has imported."""
    return loop.served.engine.metrics.snapshot().get("kv_transfer_imported_tokens_total", 0.0)


def compared(
    wait: Wait, model: Path, backend: str, load: WindowedLoad, flags: list[str], gpus: bool
) -> Iterator[Line]:
    """Process of a decode engine: starts both engines, and yields the line of a model.

    The line is yielded after each measurement, with all before it.
    """
    base = ["--model-path", str(model), "--grammar-backend", "none", *flags]
    use_gpu(None)
    prefill = Spawned.begin(
        serve_prefill, backend, [*base, "--disaggregation-mode", "prefill"], 1 if gpus else None
    )
    try:
        use_gpu(0 if gpus else None)
        port = said(prefill, "listening")
        decode = [*base, "--disaggregation-mode", "decode", "--prefill-servers"]
        decode += [f"http://{HOST}:{port}", "--remote-prefill-min-tokens", str(load.least)]
        decode += ["--remote-prefill-timeout", str(round(LIMIT_S))]
        loop = TransferLoop(backend, decode, load.num_running)
        said(prefill, "ready")
        wait()
        named = versions(backend, "cuda" if loop.served.device == "gpu" else "cpu")
        line: Line = {"model": model.name, "backend": backend, "versions": named}
        try:
            for _ in measure(line, loop, decode, prefill, load):
                yield line
        except Exception as error:
            yield line | {"error": f"{type(error).__name__}: {error}"}
        loop.close()
        prefill.line.close()
        prefill.end()
    finally:
        prefill.process.kill()


def said(process: Spawned, kind: str) -> Any:
    """Returns the value of the next message of a process.

    Raises:
      RuntimeError: It has another kind.
    """
    found, value = process.heard(time.monotonic() + LIMIT_S)
    if found != kind:
        raise RuntimeError(f"the prefill engine has failed: {value}")
    return value


def measure(
    line: Line, loop: TransferLoop, flags: list[str], prefill: Spawned, load: WindowedLoad
) -> Iterator[None]:
    """Adds the measurements of a decode engine, alone and with each transfer backend.

    Yields:
      None after each addition.
    """
    clients = Clients(loop, loop.served.backend.capacity.vocab)
    loop.connect(None)
    times, first = first_token_times(clients, load)
    gaps, texts = gaps_meanwhile(clients, load)
    line["alone"] = {"ttft_ms": times, "interference": gaps}
    line["prefill_saved_ms"] = round(times["new"] - times["cached"], 3)
    yield
    is_equal = True
    for name in TRANSFERS:
        loop.connect([*flags, "--disaggregation-transfer-backend", name])
        before = imported_tokens(loop)
        times, tokens = first_token_times(clients, load)
        line[name] = {"ttft_ms": times, **transferred(loop, before, load.rounds + 1)}
        prefill.line.send("evict")
        line[name]["ticket_ms"] = round(1000 * said(prefill, "evicted"), 3)
        is_equal &= tokens == first
        yield
    loop.connect([*flags, "--disaggregation-transfer-backend", TRANSFERS[0]])
    before = imported_tokens(loop)
    gaps, separate = gaps_meanwhile(clients, load)
    line[TRANSFERS[0]]["interference"] = gaps | transferred(loop, before, load.num_prompts)
    shared = [(texts[key], separate[key]) for key in texts]
    is_equal &= all(a[: len(b)] == b[: len(a)] for a, b in shared)
    line["tokens_are_equal"] = is_equal
    line["compared_tokens"] = sum(min(len(a), len(b)) for a, b in shared) + 2 * len(first)
    yield


def main(arguments: list[str] | None = None) -> int:
    """Prints and writes what was measured."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m bench.serving.disaggregation")
    add = parser.add_argument
    add("--model", type=Path, nargs="+", required=True, help="folders with a config.json")
    add("--backend", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    add("--flags", default="--load-format dummy", help="flags of all engines, as one quoted word")
    add("--gpus", action="store_true", help="one GPU for each engine of a pair")
    add_options(parser, max_tokens=3000, rounds=3)
    add("--window-s", type=float, default=20.0, help="longest window of inter-token latency")
    add("--out", type=Path, help="JSON file, written after every measurement")
    options = parser.parse_args(words)
    load = WindowedLoad.of(options)
    works = [
        (model, backend, load, shlex.split(options.flags), options.gpus)
        for model in options.model
        for backend in options.backend
    ]
    command = shlex.join(["python", "-m", "bench.serving.disaggregation", *words])
    lines: dict[int, Line] = {}
    for number, line in in_turns(compared, works, len(works)):
        if isinstance(line, Exception):
            named = {"model": works[number][0].name, "backend": works[number][1]}
            line = lines.get(number, named) | {"error": str(line)}
        lines[number] = line
        if options.out:
            found = {"command": command, "cores": os.cpu_count(), "lines": [*lines.values()]}
            write_results(options.out, found)
    for line in lines.values():
        print(json.dumps(line))
    return int(any("error" in line for line in lines.values()))


if __name__ == "__main__":
    sys.exit(main())
