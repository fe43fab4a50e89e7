"""Compares the outputs of long prompts over chunk sizes, batches, prefix hits and preemption.

    python -m bench.steps.text_independence --model bench/shapes/glm-4.7-flash \
        --backend torch jax --drafts none NEXTN:S=3 --input 32000

Each drafter starts once on each backend, without HTTP. The same requests are served in several
ways, each with an engine of its own on the same programs:

- `alone`: one request at a time, in chunks of `--chunked-prefill-size`;
- `small chunks`: the same in chunks of a quarter of that size, or of the smallest prefill program;
- `batch`: all requests at once;
- `prefix hits`: the requests of `batch` again, with the pages of its prompts in the cache;
- `few pages`: all requests at once with pages for their prompts only, so that some are preempted.

Prompts are random and share their first half. Every second request is sampled. Outputs must equal
those of the first way of the first drafter; on a GPU also in the other backend. The exit code is 1
if an output differs, or if a way had no prefix hit or no preemption where it must have one.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.common.draft_config import Draft, folders_of, named_folder
from bench.common.environment import versions, write_results
from bench.common.session import reset_peak
from bench.steps.decode_steps import flags, model_options, side_options, with_lot
from shared.boundary.backend import BackendLimits
from shared.boundary.program import StepKind
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.process.engines import make_engine
from tests.support.in_process_engine import LastStep, Served, serve_all, start
from tests.support.window_capacity import with_fewer_pages

HEADER = f"{'side':6}{'drafts':22}{'way':14}{'cached':>9}{'preempted':>10}{'s':>8}  outputs"
SMALLER = 4
"""Divisor of the chunk size for small chunks."""

Texts = list[list[int]]
Line = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """One way to serve the requests.

    Attributes:
      tenant: Cache namespace; two ways of one namespace share cached pages.
      divisor: Divisor of the chunk size.
      is_batch: All requests are served at once.
      hits, preempts: The way must have prefix hits, or preemptions.
    """

    name: str
    tenant: str
    divisor: int = 1
    is_batch: bool = False
    hits: bool = False
    preempts: bool = False


WAYS = (
    (Way("alone", "alone"),),
    (Way("small chunks", "small", divisor=SMALLER),),
    (Way("batch", "all", is_batch=True), Way("prefix hits", "all", is_batch=True, hits=True)),
    (Way("few pages", "few", is_batch=True, preempts=True),),
)
"""Ways that share an engine, and therefore a prefix cache."""


def requests_of(options: argparse.Namespace, vocab: int, tenant: str) -> list[Request]:
    """Returns requests of different lengths with a common beginning."""
    rng = np.random.default_rng(1)
    beginning = rng.integers(2, vocab - 2, options.input // 2).tolist()
    made = []
    for number in range(options.count):
        length = options.input - len(beginning) - number * (options.input // 16)
        own = rng.integers(2, vocab - 2, max(1, length)).tolist()
        sampling = SamplingParams(
            temperature=0.8 * (number % 2), seed32=number, max_tokens=options.output
        )
        prompt = (*beginning, *own)
        made.append(Request(request_id=number, prompt=prompt, sampling=sampling, tenant=tenant))
    return made


def engine_of(served: Served, ways: Sequence[Way], requests: Sequence[Request]) -> Engine:
    """Returns an engine for some ways, on the programs of a started one."""
    settled, capacity = served.memory.settled, served.backend.capacity
    sizes = [p.tokens for p in capacity.programs if p.work is StepKind.PREFILL]
    chunk = max(min(sizes), settled.prefill_chunk_size // ways[0].divisor)
    if ways[0].preempts:
        capacity = with_fewer_pages(capacity, _few_pages(capacity, requests), chunk)
    memory = replace(served.memory, settled=replace(settled, prefill_chunk_size=chunk))
    return make_engine(LastStep(served.backend, capacity), memory)


def _few_pages(capacity: BackendLimits, requests: Sequence[Request]) -> int:
    """Returns pages for all prompts, which share their first half, and at least one whole request.

    The pages do not suffice for the outputs of all requests.
    """
    growth = 1 + capacity.overlap * (capacity.max_depth + 1) + capacity.scratch
    # A drafter's cache key contains the next token, so the last shared page may be a miss.
    shared = (len(requests[0].prompt) // 2 - 1) // capacity.page_size * (len(requests) - 1)
    prompts = sum(capacity.num_pages_for(len(r.prompt) + growth) for r in requests) - shared
    longest = max(capacity.num_pages_for(r.max_length + growth) for r in requests)
    return min(capacity.num_pages, 1 + max(prompts, longest))


def serve(engine: Engine, way: Way, requests: Sequence[Request]) -> tuple[Texts, Line]:
    """Serves the requests in one way; returns the outputs and the fields of a line."""
    before, began = engine.scheduler.num_preemptions, time.perf_counter()
    groups = [requests] if way.is_batch else [[request] for request in requests]
    texts = [outcome.tokens for group in groups for outcome in serve_all(engine, group)]
    return texts, {
        "way": way.name,
        "cached_tokens": sum(request.cached_tokens or 0 for request in requests),
        "preemptions": engine.scheduler.num_preemptions - before,
        "s": round(time.perf_counter() - began, 2),
    }


def difference(texts: Texts, expected: Texts) -> str | None:
    """Returns the first position at which an output differs; None without a difference."""
    for number, (text, other) in enumerate(zip(texts, expected, strict=True)):
        if text != other:
            pairs = enumerate(zip(text, other, strict=False))
            at = next((at for at, (a, b) in pairs if a != b), min(len(text), len(other)))
            return f"request {number} differs at token {at}"
    return None


def fault_of(way: Way, line: Line) -> str | None:
    """Returns a reason why a way did not do what its name says; None without one."""
    if way.hits and not line["cached_tokens"]:
        return "no prefix hit"
    if way.preempts and not line["preemptions"]:
        return "no preemption; raise --output"
    return None


def lines_of(served: Served, options: argparse.Namespace) -> Iterator[tuple[Texts, Line]]:
    """Yields the outputs and a line of each way on a started engine."""
    vocab = served.backend.capacity.vocab
    for ways in WAYS:
        engine = engine_of(served, ways, requests_of(options, vocab, ""))
        for way in ways:
            texts, line = serve(engine, way, requests_of(options, vocab, way.tenant))
            yield texts, line | {"fault": fault_of(way, line)}


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Serves everything that the options name.

    Raises:
      ValueError: An option is invalid, or a start is unsupported; one sentence.
    """
    folders = folders_of(options.model, dict(map(named_folder, options.folders)))
    found: dict[str, Any] = {"command": command, "versions": {}, "lines": []}
    expected: dict[str, Texts] = {}
    print(HEADER)
    for backend in options.backend:
        for text in options.drafts:
            draft = with_lot(Draft.parse(text), options.accept_length)
            reset_peak(backend)
            line = ["--model-path", str(options.model), *draft.flags(folders)]
            how = {"batch": options.count, "context": options.input + options.output}
            served = start(backend, [*line, *flags(options, None)], **how, radix_cache=True)
            on_gpu = served.device == "gpu"
            found["versions"][backend] = versions(backend, "cuda" if on_gpu else "cpu")
            for texts, fields in lines_of(served, options):
                # Bits are equal in both backends on a GPU only.
                other = expected.setdefault("gpu" if on_gpu else backend, texts)
                fields["fault"] = difference(texts, other) or fields["fault"]
                found["lines"].append({"backend": backend, "drafts": str(draft), **fields})
                print(line_of(found["lines"][-1]), flush=True)
                if options.out:
                    write_results(options.out, found)
            served.engine.close()
    return found


def line_of(line: Line) -> str:
    """Returns a line for a terminal, under `HEADER`."""
    return (
        f"{line['backend']:6}{line['drafts']:22}{line['way']:14}{line['cached_tokens']:9}"
        f"{line['preemptions']:10}{line['s']:8.1f}  {line['fault'] or 'equal'}"
    )


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = model_options(__doc__, output=160)
    side_options(parser)
    parser.add_argument("--input", type=int, default=32000, help="tokens of the longest prompt")
    parser.add_argument("--count", type=int, default=3, help="requests")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Prints and writes the lines; the exit code is 1 if one has a fault."""
    given = sys.argv[1:] if words is None else words
    command = shlex.join(["python", "-m", "bench.steps.text_independence", *given])
    return int(any(line["fault"] for line in run(options(given), command)["lines"]))


if __name__ == "__main__":
    sys.exit(main())
