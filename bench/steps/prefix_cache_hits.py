"""Milliseconds to the first token with and without a prefix-cache hit.

    python -m bench.steps.prefix_cache_hits --model bench/shapes/qwen3-8b --backend torch jax \
        --drafts none EAGLE3:S=3 --prefix 4100

One prompt at a time runs on an idle engine, without HTTP. Each round sends two prompts: one without
a hit, and the same one in another cache namespace, after another question with the same prefix.
Both outputs should be equal. If the prefix ends with a page, the cache key of that page contains
the next token for an EAGLE head, which is a miss.
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.common.draft_config import Draft, folders_of, named_folder
from bench.common.environment import versions, write_results
from bench.common.session import reset_peak
from bench.steps.decode_steps import flags, model_options, side_options, with_lot
from shared.engine.request import Request, SamplingParams
from tests.support.in_process_engine import Answer, Served, ask, start

HEADER = (
    f"{'side':6}{'drafts':26}{'prefix':>8}{'cached':>8}{'ms':>9}{'hit ms':>9}{'times':>7}  answer"
)

Line = dict[str, Any]


def ask_for(
    served: Served, number: int, prompt: Sequence[int], tenant: str, output: int
) -> tuple[Answer, int]:
    """Serves one prompt to its end; the answer, and the tokens of it that were there."""
    request = Request(
        request_id=number,
        prompt=tuple(prompt),
        sampling=SamplingParams(temperature=0.0, max_tokens=output),
        tenant=tenant,
    )
    return ask(served, request), request.cached_tokens or 0


def measure(served: Served, prefix: int, question: int, output: int, rounds: int) -> Line:
    """A line of one length of prefix; its first round warms up."""
    vocab, cold, hits = served.backend.capacity.vocab, [], []
    for round_ in range(1 + rounds):
        rng = np.random.default_rng((prefix, round_))
        beginning = rng.integers(2, vocab - 2, prefix).tolist()
        other, own = (rng.integers(2, vocab - 2, question).tolist() for _ in range(2))
        number, user = 3 * round_, f"{prefix} {round_}"
        cold.append(ask_for(served, number, [*beginning, *own], f"{user} cold", output))
        ask_for(served, number + 1, [*beginning, *other], user, 1)
        hits.append(ask_for(served, number + 2, [*beginning, *own], user, output))
    cold_s, hit_s = (
        statistics.median(answer.seconds for answer, _ in asked[1:]) for asked in (cold, hits)
    )
    same = [a.outcome == b.outcome for (a, _), (b, _) in zip(cold, hits, strict=True)]
    return {
        "prefix": prefix,
        "cached_tokens": hits[-1][1],
        "ms": round(1e3 * cold_s, 3),
        "hit_ms": round(1e3 * hit_s, 3),
        "times": round(cold_s / hit_s, 2),
        "rounds_with_the_same_answer": sum(same),
        "is_same": all(same),
    }


def line_of(line: Line) -> str:
    """A line for a terminal."""
    return (
        f"{line['backend']:6}{line['drafts']:26}{line['prefix']:8}{line['cached_tokens']:8}"
        f"{line['ms']:9.2f}{line['hit_ms']:9.2f}{line['times']:7.1f}"
        f"  {'same' if line['is_same'] else 'ANOTHER'}"
    )


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Serves everything that the options name.

    Raises:
      ValueError: An option is wrong, or a start is unsupported; one sentence.
    """
    drafts = [with_lot(Draft.parse(text), options.accept_length) for text in options.drafts]
    folders = folders_of(options.model, dict(map(named_folder, options.folders)))
    found: dict[str, Any] = {"command": command, "versions": {}, "lines": []}
    context = max(options.prefix) + options.question + options.output
    print(HEADER)
    for backend in options.backend:
        for draft in drafts:
            reset_peak(backend)
            line = ["--model-path", str(options.model), *draft.flags(folders)]
            line += flags(options, None)
            how = {"batch": 1, "context": context}
            served = start(backend, line, **how, radix_cache=True)
            device = "cuda" if served.device == "gpu" else "cpu"
            found["versions"][backend] = versions(backend, device)
            for prefix in options.prefix:
                sizes = (options.question, options.output, options.rounds)
                fields = {"backend": backend, "drafts": str(draft)}
                found["lines"].append(fields | measure(served, prefix, *sizes))
                print(line_of(found["lines"][-1]), flush=True)
                if options.out:
                    write_results(options.out, found)
            served.engine.close()
    return found


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the parser of the command."""
    parser = model_options(__doc__, output=32)
    side_options(parser)
    parser.add_argument("--prefix", nargs="+", type=int, default=[4100])
    parser.add_argument("--question", type=int, default=32, help="tokens after the prefix")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(words)


def main() -> int:
    """Prints and writes the lines; the exit code is 1 where an answer is another."""
    found = run(
        options(), shlex.join(["python", "-m", "bench.steps.prefix_cache_hits", *sys.argv[1:]])
    )
    return int(not all(line["is_same"] for line in found["lines"]))


if __name__ == "__main__":
    sys.exit(main())
