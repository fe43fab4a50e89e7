"""Milliseconds to the first token of a prompt, with CUDA graphs and eagerly.

    python -m bench.steps.prefill --model bench/shapes/qwen3-8b --backend torch jax \
        --drafts none EAGLE3:S=3 --prompt 64 256 1024 2048

One prompt at a time runs on an idle engine, without HTTP. Its output continues for some tokens:
outputs and acceptance must not depend on how prompts are launched. The GEMMs of the layers by the
framework's own routines are timed too, in a chain that runs until the GPU's clock settles, with
their share of the prompt's time. `--kernels` lists the longest kernels.
"""

import argparse
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

from bench.common import gpu_clock
from bench.common.draft_config import Draft, folders_of, named_folder
from bench.common.environment import write_results
from bench.common.session import Load, reset_peak
from bench.steps.decode_steps import flags, model_options, side_options, with_lot
from bench.steps.report import kernels_of
from shared.boundary.program import LaunchMode, StepKind
from shared.models.config import ModelConfig
from shared.models.families import config_from_folder
from shared.models.parameter import EXPERTS
from shared.models.parameters import parameters
from tests.support.gpu_activity import traced
from tests.support.in_process_engine import Answer, Served, ask, start
from tests.support.op_sides import SIDES, Side

EAGER = "--disable-piecewise-cuda-graph"
HEADER = (
    f"{'side':6}{'drafts':26}{'launch':>14}{'tokens':>8}{'ms':>9}{'low':>8}{'high':>8}"
    f"{'products':>10}{'share':>7}{'tokens/s':>10}{gpu_clock.HEADER}  answer"
)
OUTSIDE = ("embed", "lm_head", "gated_delta.conv")
"""Matrices that a prompt has no product with, or only its last token."""

Line = dict[str, Any]


def ask_once(served: Served, load: Load) -> Answer:
    """Serves the one prompt of a load to its end."""
    (request,) = load.requests(served.backend.capacity.vocab)
    return ask(served, request)


def measure(served: Served, load: Load, rounds: int, products: float) -> Line:
    """Prompt of one size, with the seconds of its GEMMs.

    The line's `answer` is what was answered, and what of it was drafted.
    """
    ask_once(served, load)
    with gpu_clock.watched(served.device == "gpu") as watched:
        answers = [ask_once(served, load) for _ in range(rounds)]
    seconds = [each.seconds for each in answers]
    counts, kind = served.engine.metrics.snapshot(), StepKind.PREFILL.value
    launches = {
        launch.value: int(counts[f'engine_steps_total{{kind="{kind}",launch="{launch.value}"}}'])
        for launch in LaunchMode
    }
    last = answers[-1].outcome
    return {
        "prompt": load.prompt,
        "ms": round(1e3 * statistics.median(seconds), 3),
        "ms_low": round(1e3 * min(seconds), 3),
        "ms_high": round(1e3 * max(seconds), 3),
        "products_ms": round(1e3 * products, 3),
        "tokens_per_s": round(load.prompt / statistics.median(seconds), 1),
        "card": watched,
        "prefills_so_far": {name: count for name, count in launches.items() if count},
        "answer": {"tokens": last.tokens, "accepted": last.accepted},
    }


def _kernels_of(served: Served, load: Load, backend: str) -> dict[str, tuple[float, float]]:
    """Returns calls and milliseconds of a prompt's longest kernels."""
    first = replace(load, output=1)
    ask_once(served, first)

    def once() -> None:
        ask_once(served, first)

    return traced(backend, once).longest(12)


def _product_seconds(side: Side, config: ModelConfig, prompt: int) -> float:
    """Returns the seconds of a prompt's GEMMs; all rows are taken to choose the same experts.

    They are timed as a chain, in which each has its share: kernels of many operations and of few
    alternate in a prompt too, and a card's clock follows from all of them. The chain is the
    shortest that repeats, a layer where all are alike.
    """
    counts, experts = Counter[tuple[int, int, int]](), config.experts
    for p in parameters(config, False):
        own = p.shape[p.stacked :]
        if len(own) == 2 and p.name not in OUTSIDE:
            counts[prompt, own[0], own[1]] += prod(p.shape[: p.stacked])
        elif len(own) == 3 and experts is not None and p.name in EXPERTS:
            slots = experts.top_k + experts.shares_stacks
            counts[slots * prompt, own[1], own[2]] += p.shape[0]
    times = gcd(*counts.values())
    places = [
        ((place + 0.5) * times / count, product)
        for product, count in counts.items()
        for place in range(count // times)
    ]
    return times * side.chain_seconds([product for _, product in sorted(places)])


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Serves everything that the options name.

    Raises:
      ValueError: An option is wrong, or a start is unsupported; one sentence.
    """
    drafts = [with_lot(Draft.parse(text), options.accept_length) for text in options.drafts]
    folders = folders_of(options.model, dict(map(named_folder, options.folders)))
    found: dict[str, Any] = {"command": command, "versions": {}, "sides": {}, "lines": []}
    context = max(options.prompt) + options.output + options.output % 2
    answers: dict[tuple[str, int], Line] = {}
    for backend in options.backend:
        side = SIDES[backend]()
        config = config_from_folder(options.model)
        found["versions"][backend] = side.version
        found["sides"][backend] = {"device": side.device, "products": {}}
        print(f"{backend} on {side.device}")
        products = {}
        for prompt in options.prompt:
            with gpu_clock.watched(side.is_gpu) as watched:
                products[prompt] = _product_seconds(side, config, prompt)
            side.release()
            found["sides"][backend]["products"][prompt] = watched
            text = f"products of {prompt} tokens: {1e3 * products[prompt]:.2f} ms, MHz and watts"
            print(f"{text}{gpu_clock.format_card(watched)}", flush=True)
        print(HEADER)
        for draft in drafts:
            for own in _launches(backend, side.is_gpu):
                reset_peak(backend)
                words = ["--model-path", str(options.model), *draft.flags(folders)]
                words += [*flags(options, None), *own]
                how = {"batch": 1, "context": context}
                how["radix_cache"] = False
                served = start(backend, words, **how)
                for prompt in options.prompt:
                    sizes = {"batch": 1, "prompt": prompt, "output": options.output}
                    load = Load(**sizes, temperature=0.0, top_p=1.0)
                    line = {"backend": backend, "drafts": str(draft), "flags": own}
                    line |= measure(served, load, options.rounds, products[prompt])
                    known = answers.setdefault((f"{backend} {draft}", prompt), line["answer"])
                    line["is_same"] = line["answer"] == known
                    if options.kernels:
                        line["kernels"] = _kernels_of(served, load, backend)
                    found["lines"].append(line)
                    print(line_of(line), *kernels_of(line.get("kernels", {})), sep="\n", flush=True)
                    if options.out:
                        write_results(options.out, found)
                served.engine.close()
    return found


def _launches(backend: str, on_gpu: bool) -> list[list[str]]:
    """Flags of the ways to launch a prompt."""
    return [[], [EAGER]] if backend == "torch" and on_gpu else [[]]


def line_of(line: Line) -> str:
    """A line for a terminal."""
    launch = max(line["prefills_so_far"], key=line["prefills_so_far"].get)
    return (
        f"{line['backend']:6}{line['drafts']:26}{launch:>14}{line['prompt']:8}{line['ms']:9.2f}"
        f"{line['ms_low']:8.2f}{line['ms_high']:8.2f}{line['products_ms']:10.2f}"
        f"{line['products_ms'] / line['ms']:7.0%}{line['tokens_per_s']:10.0f}"
        f"{gpu_clock.format_card(line['card'])}  "
        f"{'same' if line['is_same'] else 'ANOTHER'}"
    )


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the parser of the command."""
    parser = model_options(__doc__, output=32)
    side_options(parser)
    parser.add_argument("--prompt", nargs="+", type=int, default=[64, 256, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kernels", action="store_true", help="list the longest kernels")
    return parser.parse_args(words)


def main() -> int:
    """Prints and writes the lines; the exit code is 1 where an answer is another."""
    try:
        found = run(options(), shlex.join(["python", "-m", "bench.steps.prefill", *sys.argv[1:]]))
    except ValueError as error:  # an invalid option; one sentence
        sys.exit(f"unsupported: {error}")
    return int(not all(line["is_same"] for line in found["lines"]))


if __name__ == "__main__":
    sys.exit(main())
