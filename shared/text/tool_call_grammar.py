"""Grammars of outputs with tool calls: forced calls, and calls next to text or another format."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from shared.text.call_formats.call_format import CallableFunction, CallFormat
from shared.text.call_formats.registry import FORMATS
from shared.text.grammar_source import literal, serialized

TEXT = r"/(.|\n)*/"


def arguments_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the argument schema of a constrained call; without parameters it allows none."""
    return parameters or {"properties": {}, "additionalProperties": False}


def grammar_of(
    style: str,
    tools: Sequence[CallableFunction],
    *,
    many: bool,
    free: str | None,
    answer: str | None,
) -> str:
    """Builds the grammar of an output with tool calls.

    Args:
      style: A name of `FORMATS`.
      tools: Functions that may be called.
      many: Several calls may follow one another.
      free: "text": any text is allowed next to calls. "answer": the output follows `answer`
        instead of calling. None: a call is required.
      answer: Grammar of an output without calls.

    Raises:
      InvalidGrammarError: A schema is too large, or has a keyword that the format cannot enforce.
    """
    call_format = FORMATS[style]
    rules = [*call_format.rules(tools, many), *_calls(call_format, many)]
    others: list[dict[str, Any]] = []
    start = "calls"
    if free == "text":
        start, text_rules = _beside_text(call_format, many)
        rules += text_rules
    elif free == "answer":
        assert answer is not None
        first, *others = json.loads(answer)["grammars"]
        others = [{**first, "name": "answer"}, *others]
        start = "calls | @answer"
    return serialized([{"lark_grammar": "\n".join([f"start: {start}", *rules])}, *others])


def without_calls(style: str) -> str:
    """Builds the grammar of any text that begins no tool call.

    Args:
      style: A name of `FORMATS`.
    """
    call_format = FORMATS[style]
    tags = (*call_format.openings, *call_format.loose_openings)
    if not call_format.openings:
        rules = ["start: other_text |", call_format.other_text]
    else:
        rules = ["start: TEXT", rf"TEXT: {TEXT} & ~/(.|\n)*({_any_of(tags)})(.|\n)*/"]
    return serialized([{"lark_grammar": "\n".join(rules)}])


def _any_of(tags: Sequence[str]) -> str:
    """Returns the expression of one of several tags."""
    return "|".join(re.escape(tag).replace("/", r"\/") for tag in tags)


def _calls(call_format: CallFormat, many: bool) -> list[str]:
    """Returns the rules of one or several openings, each with its calls."""
    if not call_format.openings:
        return []  # the format has a rule of the whole output
    opening = f"tagged: ({' | '.join(map(literal, call_format.openings))}) inner"
    if not many or call_format.separator is None:
        return ["calls: tagged", opening]
    if not call_format.separator:
        return ["calls: tagged+", opening]
    return ["calls: tagged (MORE tagged)*", f"MORE: /{call_format.separator}/", opening]


def _beside_text(call_format: CallFormat, many: bool) -> tuple[str, list[str]]:
    """Returns the start rule of outputs that may be text; text that begins like a call is one."""
    if not call_format.openings:
        return "calls | other_text |", [call_format.other_text]
    suffix = _any_of(call_format.openings)
    rules = [f"text: {TEXT}", f"lead[suffix=/{suffix}/]: {TEXT}", "spoken: lead inner"]
    return ("spoken* text" if many else "spoken text | text"), rules
