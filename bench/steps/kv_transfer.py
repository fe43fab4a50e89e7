"""Milliseconds and bandwidth of the export and the import of a cached prompt.

    python -m bench.steps.kv_transfer --model bench/shapes/qwen3-8b --backend torch jax \
        --drafts none EAGLE3:S=3 --prompt 1024 8192

One prompt is prefilled, exported to host memory, evicted and imported again, on an idle engine and
without transport between processes. The time to the first token after the import is next to that
of the prefill that it saves. Every round must find the record again. `--compare 64` also imports
records of each backend into each, and compares 64 tokens with those without transfer.
"""

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from typing import Any

import numpy as np

from bench.common.draft_config import Draft, folders_of, named_folder
from bench.common.environment import versions, write_results
from bench.common.session import reset_peak
from bench.steps.decode_steps import flags, model_options, side_options, with_lot
from shared.boundary.kv_transfer import TransferRecord
from shared.engine.engine import Engine
from shared.engine.request import CacheNamespace, Request, SamplingParams
from tests.support.in_process_engine import Answer, Served, ask, one_bucket, started

HEADER = (
    f"{'side':6}{'drafts':20}{'prompt':>8}{'tokens':>8}{'MB':>9}{'export ms':>11}{'GB/s':>7}"
    f"{'import ms':>11}{'GB/s':>7}{'crc ms':>8}{'prefill ms':>12}{'hit ms':>9}"
)
Line = dict[str, Any]


def until_idle(engine: Engine) -> None:
    """Runs all jobs and requests to their end."""
    while engine.busy:
        engine.step()


def exported(engine: Engine, prompt: Sequence[int]) -> tuple[float, TransferRecord]:
    """Returns the seconds of an export, and its record."""
    assert engine.transfer is not None
    began = time.perf_counter()
    job = engine.transfer.begin_export(prompt, CacheNamespace(""), ())
    assert job is not None, "the prompt is not cached"
    until_idle(engine)
    assert job.record is not None
    return time.perf_counter() - began, job.record


def imported(engine: Engine, record: TransferRecord) -> float:
    """Returns the seconds of an import into an empty cache."""
    assert engine.transfer is not None
    engine.cache.tree.evict(engine.cache.num_pages)
    began = time.perf_counter()
    job = engine.transfer.begin_import(record, holds=False)
    until_idle(engine)
    assert job.is_done
    return time.perf_counter() - began


def seconds(run: Callable[[], object]) -> float:
    """Returns the seconds of a call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def first_token(served: Served, number: int, prompt: Sequence[int]) -> tuple[float, int]:
    """Returns the seconds of a prompt with one output token, and its cached tokens."""
    answer, cached = answered(served, number, prompt, 1)
    return answer.seconds, cached


def answered(served: Served, number: int, prompt: Sequence[int], tokens: int) -> tuple[Answer, int]:
    """Returns the greedy answer to a prompt, and the prompt's cached tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    request = Request(request_id=number, prompt=tuple(prompt), sampling=sampling)
    return ask(served, request), request.cached_tokens or 0


def measure(served: Served, length: int, rounds: int) -> Line:
    """Returns the line of one prompt length; its first round warms up."""
    engine, vocab, found = served.engine, served.backend.capacity.vocab, []
    for round_ in range(1 + rounds):
        rng = np.random.default_rng((length, round_))
        prompt = rng.integers(2, vocab - 2, length).tolist()
        prefill_s, _ = first_token(served, 2 * round_, prompt)
        export_s, record = exported(engine, prompt)
        checksum_s = seconds(record.checksum)
        import_s = imported(engine, record)
        hit_s, cached = first_token(served, 2 * round_ + 1, prompt)
        assert 0 < cached <= record.num_tokens
        found.append((export_s, import_s, checksum_s, prefill_s, hit_s))
    medians = [statistics.median(times) for times in zip(*found[1:], strict=True)]
    export_s, import_s, checksum_s, prefill_s, hit_s = medians
    return {
        "prompt": length,
        "transferred_tokens": record.num_tokens,
        "record_bytes": record.num_bytes,
        "export_ms": round(1e3 * export_s, 3),
        "export_gb_per_s": round(record.num_bytes / export_s / 1e9, 3),
        "import_ms": round(1e3 * import_s, 3),
        "import_gb_per_s": round(record.num_bytes / import_s / 1e9, 3),
        "checksum_ms": round(1e3 * checksum_s, 3),
        "prefill_ms": round(1e3 * prefill_s, 3),
        "hit_ms": round(1e3 * hit_s, 3),
    }


def compared(sides: dict[str, Served], length: int, tokens: int) -> Iterator[Line]:
    """Yields a line for each pair of backends: whether the outputs of the second with a record of
    the first equal those without transfer.
    """
    for number, (source, sink) in enumerate(product(sides, repeat=2)):
        rng, vocab = np.random.default_rng((length, number)), sides[sink].backend.capacity.vocab
        prompt, first = rng.integers(2, vocab - 2, length).tolist(), (1 << 20) + 3 * number
        wanted, _ = answered(sides[sink], first, prompt, tokens)
        first_token(sides[source], first + 1, prompt)
        _, record = exported(sides[source].engine, prompt)
        imported(sides[sink].engine, record)
        found, cached = answered(sides[sink], first + 2, prompt, tokens)
        assert 0 < cached <= record.num_tokens
        yield {
            "from": source,
            "into": sink,
            "prompt": length,
            "transferred_tokens": record.num_tokens,
            "compared_tokens": len(wanted.outcome.tokens),
            "tokens_are_equal": found.outcome.tokens == wanted.outcome.tokens,
            "acceptance_is_equal": found.outcome.accepted == wanted.outcome.accepted,
        }


def line_of(line: Line) -> str:
    """Returns a line for a terminal."""
    return (
        f"{line['backend']:6}{line['drafts']:20}{line['prompt']:8}{line['transferred_tokens']:8}"
        f"{line['record_bytes'] / 1e6:9.1f}{line['export_ms']:11.2f}{line['export_gb_per_s']:7.2f}"
        f"{line['import_ms']:11.2f}{line['import_gb_per_s']:7.2f}{line['checksum_ms']:8.2f}"
        f"{line['prefill_ms']:12.2f}{line['hit_ms']:9.2f}"
    )


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures everything that the options name.

    Raises:
      ValueError: An option is wrong, or a start is unsupported; one sentence.
    """
    drafts = [with_lot(Draft.parse(text), options.accept_length) for text in options.drafts]
    folders = folders_of(options.model, dict(map(named_folder, options.folders)))
    found: dict[str, Any] = {"command": command, "versions": {}, "lines": [], "pairs": []}
    bounds = ["--max-running-requests", "1", "--grammar-backend", "none"]
    bounds += ["--context-length", str(64 + options.compare + max(options.prompt))]
    print(HEADER)
    for draft in drafts:
        sides: dict[str, Served] = {}
        for backend in options.backend:
            reset_peak(backend)
            line = ["--model-path", str(options.model), *draft.flags(folders)]
            line += [*flags(options, None), *bounds]
            served = started(backend, line, one_bucket, has_transfer=True)
            device = "cuda" if served.device == "gpu" else "cpu"
            found["versions"][backend] = versions(backend, device)
            for length in options.prompt:
                fields = {"backend": backend, "drafts": str(draft)}
                found["lines"].append(fields | measure(served, length, options.rounds))
                print(line_of(found["lines"][-1]), flush=True)
                if options.out:
                    write_results(options.out, found)
            if options.compare:
                sides[backend] = served
            else:
                served.engine.close()
        for pair in chain.from_iterable(
            compared(sides, n, options.compare) for n in options.prompt
        ):
            found["pairs"].append({"drafts": str(draft)} | pair)
            print(found["pairs"][-1], flush=True)
            if options.out:
                write_results(options.out, found)
        for served in sides.values():
            served.engine.close()
    return found


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command."""
    parser = model_options(__doc__, output=1)
    side_options(parser)
    parser.add_argument("--prompt", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compare", type=int, default=0, metavar="TOKENS")
    return parser.parse_args(words)


if __name__ == "__main__":
    run(options(), shlex.join(["python", "-m", "bench.steps.kv_transfer", *sys.argv[1:]]))
