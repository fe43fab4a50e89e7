"""Random tool calls, and outputs that contain them, for every tool-call format."""

from __future__ import annotations

import json
import random
from typing import Any

from shared.text.call_formats.call_format import Call, CallFormat
from shared.text.call_formats.registry import FORMATS
from shared.text.parsing.delta import Delta
from shared.text.parsing.output_parser import OutputBuilder
from shared.text.reasoning_formats import REASONING_FORMATS, THINKING, ReasoningFormat
from shared.text.text_parsers import new_parser

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "price": {"type": "number"},
        "is_open": {"type": "boolean"},
        "note": {"type": ["string", "null"]},
        "near": {"type": "array", "items": {"type": "string"}},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "name": {"type": "string"}},
            "additionalProperties": False,
        },
    },
    "required": ["city"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS: dict[str, dict[str, Any]] = {"get_weather": PARAMETERS, "stop": EMPTY}
PIECES = [
    *("a", "7", " ", "\n", '"', "'", "\\", "{", "}", "[", "]", ",", ":", "é", "漢", "😀", "<", ">"),
    *("</b>", "[ARGS]", "<tool", "true", "(", ")", "=", "```", "<|", "|>", "#", "%", "/"),
]
"""Parts of strings. None contains the end of a value in any format."""


SPOKEN = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
UNKNOWN = "<|end|><|start|>assistant<|channel|>final oh to=<|message|>"


def drawn_text(chosen: random.Random) -> str:
    return "w" + "".join(chosen.choices(PIECES, k=chosen.randrange(6))) + "w"


def drawn_call(chosen: random.Random) -> Call:
    if chosen.random() < 0.2:
        return "stop", {}
    draw = {
        "days": lambda: chosen.randrange(-9, 1000),
        "price": lambda: chosen.choice([0.5, -1.25, 3, 1e20]),
        "is_open": lambda: chosen.random() < 0.5,
        "note": lambda: chosen.choice([None, drawn_text(chosen)]),
        "near": lambda: [drawn_text(chosen) for _ in range(chosen.randrange(3))],
        "place": lambda: {"x": chosen.randrange(5), "name": drawn_text(chosen)},
    }
    given = {key: value() for key, value in draw.items() if chosen.random() < 0.4}
    return "get_weather", {"city": drawn_text(chosen), **given}


def tags_of(name: str) -> ReasoningFormat:
    """Returns the reasoning of models with a tool-call format."""
    return REASONING_FORMATS.get(name, THINKING)


def drawn_output(call_format: CallFormat, chosen: random.Random) -> str:
    """Returns an output with calls, often with reasoning, and often damaged."""
    calls = [drawn_call(chosen) for _ in range(chosen.randrange(1, 4))]
    text = call_format.write(calls)
    if call_format.openings and chosen.random() < 0.5:
        text = chosen.choice(["Well.\n", " so ", "<", "\n\n"]) + text
    if chosen.random() < 0.3:
        text += chosen.choice(["\n", " and more", text, "<|call|>", "<|end|>so", SPOKEN, UNKNOWN])
    if chosen.random() < 0.4:  # lost or repeated characters
        begin = chosen.randrange(len(text))
        end = begin + chosen.randrange(12)
        text = text[:begin] + text[begin:end] * chosen.choice([0, 2]) + text[end:]
    if chosen.random() < 0.3:
        tags = tags_of(call_format.name)
        border = SPOKEN if tags.has_channels else "\n"
        text = f"{tags.begin}\nhm {chosen.choice(['', text])}{tags.end}{border}{text}"
    return text[: chosen.randrange(len(text) + 1)] if chosen.random() < 0.2 else text


def cut(text: str, chosen: random.Random) -> list[str]:
    """Returns a text cut at random places, as detokenized steps have them."""
    places = sorted(chosen.choices(range(len(text) + 1), k=chosen.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


Parsed = tuple[str, str, list[tuple[str, str]], int]
"""Text, reasoning, names and arguments of calls, number of malformed calls."""


def parsed(
    name: str,
    pieces: list[str],
    *,
    is_constrained: bool = False,
    is_open: bool | None = None,
    was_cut: bool = False,
) -> Parsed:
    """Parses the pieces of an output."""
    builder = OutputBuilder(FUNCTIONS, None, is_constrained)
    parser = new_parser(name, builder, is_open, tags_of(name))
    found = sum(map(parser.push, pieces), Delta()) + parser.flush(was_cut)
    calls = [(call.name, call.arguments) for call in found.tool_calls]
    return found.text, found.reasoning, calls, parser.num_malformed_calls


def read_back(name: str, text: str, *, is_constrained: bool) -> list[Call]:
    """Returns the calls of an output that has nothing else."""
    left, _, calls, malformed = parsed(name, [text], is_constrained=is_constrained)
    assert (left.strip(), malformed) == ("", 0), left
    return [(called, json.loads(arguments)) for called, arguments in calls]


NAMES = tuple(FORMATS)
