"""Generates the pages on performance, their chart, and two blocks of the README.

python -m bench.performance
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from bench.common.markdown import wrapped
from bench.pages import host, tables
from bench.pages.chart import svg
from bench.pages.results import Found, Subject, measured, subjects_of
from bench.pages.side_by_side import side_by_side, slower
from bench.pages.summary import rows_of, speed
from bench.quality.accuracy_table import insert

ROOT = Path(__file__).parents[1]
DOCS, README = ROOT / "docs", ROOT / "README.md"
CHART = "images/performance.svg"
MADE = "<!-- Written by `python -m bench.performance`; a test compares. -->"

SUMMARY = """# Performance

Tandem decodes faster than SGLang in most measured settings on H200; the first table names the
settings, and the sentence below it every cell in which SGLang is faster."""

READING = """## Reading the tables

- Cells of the summary are milliseconds per decode step at batch 1 / 8 / 32, greedy, after prompts
  of 512 tokens. Lower is better.
- Weights are random (`--load-format dummy`), so acceptance is simulated: `L` is the acceptance
  length. Without `L` no draft is accepted.
- S, k and N are the values of `--speculative-num-steps`, `--speculative-eagle-topk` and
  `--speculative-num-draft-tokens`.
- The limit is the time that the bytes of a step take at the rate of a large copy on the same GPU.
  For MoE models it counts the experts that a step reads, where `bench.steps.experts_read` measured
  them. Elsewhere it assumes even choices; tokens that share experts read fewer bytes, so such a
  share can exceed 100 %.
- `outputs` compares tokens with those that are guaranteed to be equal, if both ran together.
- A revision is the commit that was measured. One with `*` is the commit that recorded the file.
- Ratios compare lines of one revision only. A table without a ratio mixes revisions."""

PEERS = """## Other engines

SGLang 0.5.17 and both backends ran in one call on one card, with different prompts per request. All
had prompts of 512 tokens, outputs of 192, dummy weights and simulated acceptance. They are single
runs, and their commands were not recorded. SGLang's steps of qwen3.5-35b-a3b-fp8 with NEXTN at
batch 1 wait for its host, so they have no ratio.

vLLM 0.26.0 ran with equal prompts in all requests. Equal rows make GEMMs about 20 % faster and let
n-grams match, so these columns only show an order of magnitude and are in no comparison. Its
acceptance lengths were set to 3.0 (EAGLE-3), 6.4 (DFLASH), 2.9 (NGRAM) and 3.4 (NEXTN). Measure
your own with `python -m bench.serving`, which works with any OpenAI-compatible server."""

PAGES = """## More measurements

| page | contents |
| --- | --- |
| [Decode steps](performance_decode.md) | sampling, overlap, long contexts, kernels, idle time |
| [Prefill](performance_prefill.md) | time to first token, prefix-cache hits |
| [MoE and FP8](performance_moe_fp8.md) | mixture-of-experts models, FP8 weights and activations |
| [Tensor parallelism](performance_tp.md) | decode steps and prefill on two and four GPUs |
| [Adaptive speculation and host](performance_adaptive.md) | draft shapes, host time, HTTP |
| [Single measurements](performance_details.md) | kernels, images and comparisons |

`python -m bench.steps.decode_steps` measures such steps without a checkpoint. The result files in
`bench/results` contain commands and versions."""

DECODE = """# Performance: decode steps

Decode steps of dense models on one GPU: with sampling, without overlap, after long prompts, and in
one or three device programs. [Performance](performance.md) explains the columns. A change in
parentheses is relative to the greedy step with overlap 1 of the same revision."""

PREFILL = """# Performance: prefill

Time to first token of one prompt, without and with a prefix-cache hit. `GEMMs` is the time of the
layers' matrix products by the framework's own routines. `torch, eager` runs without CUDA graphs."""

MOE_FP8 = """# Performance: MoE and FP8

Decode steps and prefill of mixture-of-experts models and of FP8 checkpoints on one GPU. FP8 weights
are dequantised in registers (W8A16); `--fp8-activations` multiplies in FP8 (W8A8), which gives
other outputs. [Performance](performance.md) explains the columns."""

TP = """# Performance: tensor parallelism

Decode steps and prefill by number of GPUs of one host. The speedup over one GPU is in parentheses,
for lines of one revision. The limit is the time of the bytes of one GPU."""

ADAPTIVE = """# Performance: adaptive speculation and host

Throughput of `--speculative-adaptive` relative to the best static draft shape, and the share of the
host in a step.

## Adaptive speculation

Phases of different work run on one engine: with each draft shape, without drafts, and adaptively.
A share is throughput relative to the best static shape, or to plain decoding, over all phases;
`worst phase` is the lowest share of a phase. `greedy` always uses the shape that it estimates to be
fastest, and `probe` spends 3 % of the steps on other shapes; each has its worst phase beside it.
NGRAM explores nothing: its drafts are known before a step, so its own policy is greedy.

- *served*: tasks of the demo model, which is so small that host time counts.
- *imposed*: simulated time with measured step times; acceptance rates are high, low or random.
- *own outputs*: outputs of the model in simulated time, or with the host in real time.

The table of block heads has simulated acceptance of maths, code and chats, and of a head that is
seldom right off the first path of a tree. Adaptive speculation chooses among plain decoding, chains
of 7 and 15 drafts and the tree, so it can exceed both. The table after it has heads of the demo
model, which were trained differently (`training_drafts.md`), on its own tasks: a step takes about a
millisecond, so the host counts, most of all in JAX."""

HOST = """## Host

The host plans, submits and retires a step while the device runs the previous one."""


def _themes(found: Found) -> dict[str, list[Subject]]:
    """Returns the models of each theme that has decode steps or prompts on one GPU."""
    every = subjects_of([*found.decode, *found.long, *found.prefill])
    special = [s for s in every if "-a3b" in s.model or "fp8" in s.model]
    return {"dense": [s for s in every if s not in special], "moe_fp8": special}


def _chapters(subjects: Sequence[Subject], *made: Callable[[Subject], list[str]]) -> list[str]:
    """Returns a chapter for each model and card that has at least one table."""
    parts = []
    for subject in subjects:
        found = [part for make in made for part in make(subject)]
        parts += [f"## {subject.model}, {subject.card}", *found] if found else []
    return parts


def pages(found: Found) -> dict[str, str]:
    """Returns the generated files by their path in `docs`."""
    themes = _themes(found)
    each = {
        "performance.md": _main_page(found, themes["dense"]),
        "performance_decode.md": [DECODE, *_decode(found, themes["dense"])],
        "performance_prefill.md": [PREFILL, *_prefill(found, themes["dense"])],
        "performance_moe_fp8.md": [MOE_FP8, *_moe_fp8(found, themes["moe_fp8"])],
        "performance_tp.md": [TP, *_tp(found)],
        "performance_adaptive.md": _adaptive(found),
    }
    texts = {name: "\n\n".join([MADE, *parts]) + "\n" for name, parts in each.items()}
    return {**texts, CHART: svg(rows_of(found))}


def _main_page(found: Found, dense: Sequence[Subject]) -> list[str]:
    lines = [line for row in rows_of(found) for side in row.own.values() for line in side.values()]
    cards = dict.fromkeys(row.asked.card for row in rows_of(found))
    head = [SUMMARY, wrapped(measured(lines, cards)), speed(found, in_readme=False), slower(found)]
    chart = f"![Milliseconds per decode step by engine, batch size and method]({CHART})"
    steps = _chapters(dense, lambda subject: tables.greedy_steps(found, subject))
    return [*head, chart, PAGES, READING, PEERS, *side_by_side(found), *steps]


def _decode(found: Found, dense: Sequence[Subject]) -> list[str]:
    return _chapters(
        dense,
        lambda subject: tables.variants(found, subject),
        lambda subject: tables.long_contexts(found, subject),
        lambda subject: tables.fused(found, subject),
        lambda subject: tables.activity(found, subject),
    )


def _prefill(found: Found, dense: Sequence[Subject]) -> list[str]:
    return _chapters(
        dense,
        lambda subject: tables.prompts(found, subject),
        lambda subject: tables.hits(found, subject),
    )


def _moe_fp8(found: Found, special: Sequence[Subject]) -> list[str]:
    return _chapters(
        special,
        lambda subject: tables.greedy_steps(found, subject),
        lambda subject: tables.prompts(found, subject),
    )


def _tp(found: Found) -> list[str]:
    return _chapters(
        subjects_of([*found.tp, *found.tp_prefill]),
        lambda subject: tables.tp_steps(found, subject),
        lambda subject: tables.tp_prompts(found, subject),
    )


def _adaptive(found: Found) -> list[str]:
    parts = [ADAPTIVE, *host.adaptive(found), *host.block_trees(found), *host.block_heads(found)]
    return [*parts, HOST, *host.host_times(found), *host.http_shares(found)]


def main() -> None:
    """Writes the pages, the chart and the README's blocks."""
    found = Found.of_results()
    for name, text in pages(found).items():
        (DOCS / name).write_text(text, encoding="utf-8")
    insert(README, speed(found, in_readme=True), "speed")
    insert(README, slower(found), "slower")


if __name__ == "__main__":
    main()
