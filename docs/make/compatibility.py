"""Writes `docs/compatibility.md`: matrices of methods and features, and the rules below them.

`python -m docs.make.compatibility` writes the page; a test compares it. Each cell is the result of
the startup rules (`shared.options.rules`) for a command line with the method and the feature.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.common.markdown import table, wrapped
from shared.drafts.kinds import BLOCK_KINDS, HEADS, KINDS
from shared.models.config import ModelConfig
from shared.models.families import config_from_folder
from shared.options.algorithms import (
    ALGORITHMS,
    JOINED_ALGORITHMS,
    WITH_COPIES,
)
from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.options.rule_context import WORDS, Rule, RuleContext
from shared.options.rules import RULES
from shared.options.unsupported_fields import UNSUPPORTED_FIELDS
from shared.server.protocol.openai_types import ChatRequest, CompletionRequest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
SHAPES = ROOT / "bench" / "shapes"
BLOCK = 8
"""Nodes of the chain of a block drafter."""
PLAIN = "plain"
NOT_APPLICABLE = "-"
"""Cell of a flag that the parser rejects without a drafting method."""
METHODS = (PLAIN, *ALGORITHMS, *JOINED_ALGORITHMS)
DENSE = "qwen3.5-9b"

Flags = Mapping[str, str | None]


def _flags(line: str) -> Flags:
    """Reads a command line of flags, each with at most one value."""
    found: dict[str, str | None] = {}
    for word in line.split():
        if word.startswith("--"):
            found[word] = None
        else:
            found[list(found)[-1]] = word
    return found


@dataclass(frozen=True)
class Feature:
    """A row of the matrix.

    Attributes:
      name: As the page shows it.
      lines: Command lines that use the feature; one that the rules support suffices.
      model: A folder of `bench/shapes`.
    """

    name: str
    lines: tuple[str, ...] = ("",)
    model: str = DENSE


_TREE = "--speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 6"
_REJECTION = "--speculative-accept-rule rejection"
_BLOCK = f"{_REJECTION} --speculative-use-block-verification"
_CORPUS = "--speculative-ngram-external-corpus-path c --speculative-ngram-external-sam-budget 2"
FEATURES = (
    Feature("draft trees of the drafter", (_TREE, "--speculative-num-draft-tokens 6")),
    Feature("rejection sampling", (_REJECTION,)),
    Feature("block verification", (_BLOCK,)),
    Feature("adaptive speculation", ("--speculative-adaptive",)),
    Feature("simulated acceptance", ("--speculative-simulate-accept-length 1.5",)),
    Feature("structured output", ("--grammar-backend llguidance",)),
    Feature("shadow verification", ("--shadow-verify-rate 0.1",)),
    Feature("reduced draft vocabulary", ("--speculative-token-map map.json",)),
    Feature("n-gram index on the device", ("--speculative-ngram-backend device",)),
    Feature("external n-gram corpus", (_CORPUS,)),
    Feature("overlap scheduling, depth 2", ("--overlap-depth 2",)),
    Feature("no overlap scheduling", ("--overlap-depth 0",)),
    Feature("no prefix cache", ("--disable-radix-cache",)),
    Feature("chunked prefill", ("--chunked-prefill-size 64",)),
    Feature("tensor parallelism", ("--tp-size 2",)),
    Feature("FP8 weights", model="qwen3.5-27b-fp8"),
    Feature("FP8 activations", ("--fp8-activations",), "qwen3.5-27b-fp8"),
    Feature("MoE", model="qwen3.5-35b-a3b"),
    Feature("MoE, FP8 weights", model="qwen3.5-35b-a3b-fp8"),
    Feature("latent attention (MLA)", model="glm-4.7-flash"),
    Feature("image input", ("--max-image-tokens 1024",)),
    Feature("model without MTP layer", model="qwen3-8b"),
)
PAIRED = (
    "draft trees of the drafter",
    "rejection sampling",
    "block verification",
    "adaptive speculation",
)
PAIRED = (*PAIRED, "simulated acceptance", "structured output", "shadow verification")
"""Features that the second matrix combines."""
REQUEST_FEATURES = {
    "structured output": ("response_format", "structured_outputs"),
    "tool calls": ("tools", "tool_choice", "parallel_tool_calls"),
    "logprobs": ("logprobs", "top_logprobs", "prompt_logprobs"),
    "penalties": ("presence_penalty", "frequency_penalty", "repetition_penalty"),
    "truncation": ("top_p", "top_k", "min_p"),
    "logit bias": ("logit_bias",),
    "several choices": ("n", "best_of"),
    "seed": ("seed",),
    "stop conditions": ("stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    "bad words": ("bad_words",),
    "beam search": ("use_beam_search",),
    "echo": ("echo",),
}
"""Fields of a request by feature."""


@cache
def _model(name: str) -> ModelConfig:
    return config_from_folder(SHAPES / name)


def setup_of(method: str, flags: Flags, model: str) -> RuleContext:
    """Returns the startup configuration of a method with more flags."""
    own = method.removesuffix(WITH_COPIES)
    line = {"--model-path": str(SHAPES / model)}
    if method != PLAIN:
        line["--speculative-algorithm"] = method
    if own != PLAIN and KINDS[own].needs_folder:
        line["--speculative-draft-model-path"] = "draft"
    words = [word for pair in (line | dict(flags)).items() for word in pair if word is not None]
    head = own if own in HEADS else None
    config, block = _model(model), BLOCK if head in BLOCK_KINDS else None
    options = parse(words)
    return RuleContext(
        options=options, model=config, has_mtp=config.has_mtp, head_kind=head, block=block
    )


def broken(method: str, flags: Flags, model: str) -> list[Rule]:
    """Returns the rules that make a combination an error at startup."""
    setup = setup_of(method, flags, model)
    return [rule for rule in RULES if rule.applies(setup)]


def cell(method: str, feature: Feature) -> str:
    """Returns whether a method supports a feature, with the number of the rule if not."""
    try:
        found = [broken(method, _flags(line), feature.model) for line in feature.lines]
    except ConfigError:
        return NOT_APPLICABLE
    return _answer(min(found, key=len))


def _answer(rules: Sequence[Rule]) -> str:
    return f"no ({RULES.index(rules[0]) + 1})" if rules else "yes"


def matrix() -> list[list[str]]:
    """Returns features by methods; methods with equal columns share one."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for method in METHODS:
        cells = tuple(cell(method, feature) for feature in FEATURES)
        columns.setdefault(cells, []).append(method)
    head = ["feature", *(", ".join(names) for names in columns.values())]
    names = [feature.name for feature in FEATURES]
    return [head, *([name, *(each[row] for each in columns)] for row, name in enumerate(names))]


def pairs() -> list[list[str]]:
    """Returns features by features, for NEXTN."""
    paired = [feature for feature in FEATURES if feature.name in PAIRED]
    rows = [["with `NEXTN`", *PAIRED[:-1]]]
    for number, one in enumerate(paired[1:], 1):
        cells = [_pair(one, other) for other in paired[:number]]
        rows.append([one.name, *cells, *[""] * (len(paired) - 1 - number)])
    return rows


def _pair(one: Feature, other: Feature) -> str:
    flags = {**_flags(one.lines[0]), **_flags(other.lines[0])}
    return _answer(broken("NEXTN", flags, DENSE))


def request_rows() -> list[list[str]]:
    """Returns the fields of each request feature, by whether they are supported."""
    rows = [["feature of a request", "supported fields", "unsupported fields"]]
    known = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    for name, fields in REQUEST_FEATURES.items():
        supported = [field for field in fields if _is_served(field, known)]
        others = [field for field in fields if field not in supported]
        rows.append([name, _code(supported), _code(others)])
    return rows


def _is_served(field: str, known: set[str]) -> bool:
    listed = [each for each in UNSUPPORTED_FIELDS if each.name == field]
    return field in known and not any(len(each.endpoints) > 1 for each in listed)


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _rules() -> Iterator[str]:
    for number, rule in enumerate(RULES, 1):
        item, text = f"{number}. ", f"{rule.sentence(WORDS)}. {_example(rule)}"
        yield wrapped(item + text, " " * len(item))


def _example(rule: Rule) -> str:
    example = rule.example
    if example is None:
        return "This depends on the files."
    model = f" with a {example.model_type} model" if example.model_type else ""
    flags = f" and `{' '.join(example.flags)}`" if example.flags else ""
    return f"Example: `{example.drafter}`{model}{flags}."


def _fields(*, is_advice: bool) -> str:
    rows = [["field", "endpoints", "example"]]
    for field in UNSUPPORTED_FIELDS:
        if field.is_advice == is_advice:
            example = f"`{json.dumps(field.example)}`"
            rows.append([f"`{field.name}`", ", ".join(field.endpoints), example])
    return table(rows)


HEAD = """<!-- Generated by `python -m docs.make.compatibility`; a test compares. -->

# Feature compatibility

Methods are values of `--speculative-algorithm`; `plain` is decoding without drafts. Unsupported
combinations are errors at startup (exit code 2), all of them in one message. The number in a cell
is that of the rule below; `-` needs a drafting method. `GET /capabilities` returns the same rules
and the limits of requests.

## Methods and features"""

PAIRS = """## Features with each other

Cells are for `NEXTN`."""

REQUESTS = """## Features of requests

Every method supports the same fields of a request. Structured output
requires `--grammar-backend`, and images require a model with a vision encoder."""

RULE_HEAD = """## Rules

Capital letters stand for values."""

FIELDS = """## Unsupported fields

These fields of other servers' APIs would change the output. A request that sets one gets HTTP 400
with the name of the field; a neutral value is accepted."""

ADVICE = """## Ignored fields

These fields cannot change a token of the output. The request is served, and the response lists the
field under `ignored`, in a stream in the first event, as does the request log. With
`--strict-fields` they get HTTP 400. `reasoning_effort`, `verbosity`, `enable_thinking` and
`thinking` are passed to a chat template that reads them, and are ignored otherwise."""


def page() -> str:
    """Returns the page."""
    parts = [HEAD, table(matrix()), PAIRS, table(pairs()), REQUESTS, table(request_rows())]
    parts += [RULE_HEAD, "\n".join(_rules())]
    parts += [FIELDS, _fields(is_advice=False), ADVICE, _fields(is_advice=True)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
