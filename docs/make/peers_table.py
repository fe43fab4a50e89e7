"""Table of vLLM's and SGLang's flags for `docs/coming_from_vllm_or_sglang.md`.

`python -m docs.make.peers_table` writes the table between the markers of the page. The columns
of the peers are data; the column of this server follows from its flags.
"""

from pathlib import Path

from bench.common.markdown import between
from shared.options.command_line import FLAGS
from shared.options.flags import spelling
from shared.options.unsupported_flags import ALWAYS, NEUTRAL, UNSUPPORTED_FLAGS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming_from_vllm_or_sglang.md"
BEGIN, END = "<!-- peer flags -->", "<!-- /peer flags -->"

GROUPS = {
    "Model": (
        ("--model", "--model-path"),
        ("--max-model-len", "--context-length"),
        ("--dtype", "--dtype"),
        ("--load-format", "--load-format"),
        ("--quantization", "--quantization"),
        ("--tokenizer", "--tokenizer-path"),
        ("--trust-remote-code", "--trust-remote-code"),
        ("--hf-overrides", "--json-model-override-args"),
        ("--language-model-only", "--language-model-only"),
        ("--enable-lora", "--lora-paths"),
    ),
    "Scheduler and memory": (
        ("--max-num-seqs", "--max-running-requests"),
        ("--max-num-batched-tokens", "--chunked-prefill-size"),
        ("--gpu-memory-utilization", "--mem-fraction-static"),
        ("--block-size", "--page-size"),
        ("--kv-cache-dtype", "--kv-cache-dtype"),
        ("--cpu-offload-gb", "--cpu-offload-gb"),
        ("--no-enable-prefix-caching", "--disable-radix-cache"),
        ("", "--schedule-policy"),
        ("--enforce-eager", "--disable-cuda-graph"),
        ("", "--disable-overlap-schedule"),
        ("--attention-backend", "--attention-backend"),
        ("", "--enable-deterministic-inference"),
        ("--seed", "--random-seed"),
    ),
    "Parallelism": (
        ("--tensor-parallel-size", "--tp-size"),
        ("--pipeline-parallel-size", "--pp-size"),
        ("--data-parallel-size", "--dp-size"),
        ("--enable-expert-parallel", ""),
        ("--distributed-executor-backend", "--use-ray"),
    ),
    "Speculative decoding": (
        ("--speculative-config", "--speculative-algorithm"),
        ("", "--speculative-draft-model-path"),
        ("", "--speculative-num-steps"),
        ("", "--speculative-eagle-topk"),
        ("", "--speculative-num-draft-tokens"),
        ("", "--speculative-use-rejection-sampling"),
        ("", "--speculative-accept-threshold-single"),
    ),
    "API": (
        ("--served-model-name", "--served-model-name"),
        ("--api-key", "--api-key"),
        ("--generation-config", "--sampling-defaults"),
        ("--tool-call-parser", "--tool-call-parser"),
        ("--enable-auto-tool-choice", ""),
        ("--reasoning-parser", "--reasoning-parser"),
        ("--guided-decoding-backend", "--grammar-backend"),
        ("--ssl-keyfile", "--ssl-keyfile"),
        ("", "--enable-metrics"),
    ),
}
"""Pairs of flags with equal meaning, vLLM's first; empty: the engine has none."""


def table() -> str:
    """Returns the table with a row for each pair of `GROUPS`."""
    lines = ["| vLLM | SGLang | Tandem | note |", "|---|---|---|---|"]
    for heading, pairs in GROUPS.items():
        lines.append(f"| **{heading}** | | | |")
        lines += ["| " + " | ".join(_cells(pair)) + " |" for pair in pairs]
    return "\n".join(lines)


def _cells(pair: tuple[str, str]) -> list[str]:
    """Returns the flags of a pair, the flag of this server, and notes on the other spellings."""
    names = [*dict.fromkeys(name for name in pair if name)]
    found = dict.fromkeys(spelling(FLAGS[name].name) for name in names if name in FLAGS)
    notes: dict[str, list[str]] = {}
    for name in names:
        if name not in FLAGS:
            notes.setdefault(_note(name), []).append(f"`{name}`")
    stated = [f"{', '.join(of)}: {note}" if found else note for note, of in notes.items()]
    flags = [f"`{name}`" if name else "-" for name in (*pair, *(found or [""]))]
    return [*flags, "; ".join(stated)]


def _note(name: str) -> str:
    """Returns the effect of a flag that is accepted without effect or not supported.

    Raises:
      KeyError: The flag is unknown.
    """
    if name in ALWAYS:
        return "accepted, always on"
    values = " or ".join(f"`{value}`" for value in NEUTRAL.get(name, ()))
    return f"{values} is accepted; {UNSUPPORTED_FLAGS[name]}" if values else UNSUPPORTED_FLAGS[name]


def with_table(text: str) -> str:
    """Returns the text of the page with a current table between the markers."""
    return between(text, BEGIN, END, table())


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
