"""Tool-call and reasoning parsers that fit a checkpoint's chat template.

A template is rendered with a tool and a call of it, in a process of its own with a deadline. The
text that it writes for the call is the form in which the model writes calls.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.text.call_formats.call_format import CallFormat
from shared.text.call_formats.json_calls import read_object
from shared.text.call_formats.registry import FORMATS
from shared.text.chat_template import Conversation
from shared.text.chat_templates import DEFAULT, TOOL_USE, ChatTemplates
from shared.text.delimiters import THINK, THINK_END
from shared.text.parsing.output_parser import OutputBuilder
from shared.text.reasoning_formats import REASONING_FORMATS
from shared.text.template_worker import DEADLINE_S, pack_conversation, pack_templates
from shared.text.text_parsers import new_parser
from shared.text.worker import DONE, frames_of

ROOT = Path(__file__).resolve().parents[2]
STARTING_S = 30.0
"""Limit of the start of the process on a busy machine."""

_QUESTION, _FUNCTION, _KEY, _VALUE = "probe question", "probe_function", "probe_key", "probe value"
_USER = {"role": "user", "content": _QUESTION}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _FUNCTION,
        "description": "probe description",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "probe"}},
            "required": [_KEY],
        },
    },
}
_CALLING: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "probe0001",
            "type": "function",
            "function": {"name": _FUNCTION, "arguments": {_KEY: _VALUE}},
        }
    ],
}
_RESULT = {"role": "tool", "tool_call_id": "probe0001", "content": "probe result"}
_DESCRIBES = "renders no calls, which the server therefore writes into contents, and describes"
_OF_DEEPSEEK = re.compile(r"<[|｜]Assistant[|｜]>")


@dataclass(frozen=True)
class ParserChoice:
    """Automatically selected parser.

    Attributes:
      parser: Its name; None if no parser fits.
      reason: Reason in the template, a clause that follows `the chat template`; may be empty.
      candidates: Parsers that fit equally well.
    """

    parser: str | None
    reason: str = ""
    candidates: tuple[str, ...] = ()


def tool_call_parser_of(templates: ChatTemplates) -> ParserChoice:
    """Selects the parser of the calls that a template writes.

    A parser is selected if it is the only one that reads the rendered call. If the template
    renders no calls, the markers in its source select the parser.
    """
    source = templates.sources.get(TOOL_USE) or templates.sources.get(DEFAULT, "")
    if "tool" not in source:
        return ParserChoice(None)
    question = Conversation([_USER], [_TOOL])
    called = Conversation([_USER, _CALLING], [_TOOL], add_generation_prompt=False)
    answered = Conversation([_USER, _CALLING, _RESULT], [_TOOL], add_generation_prompt=False)
    prompt, *texts = _rendered(templates, [question, called, answered])
    if prompt is None:
        return ParserChoice(None)  # it lists no tools
    unknown = "writes calls in a form that no parser reads"
    for text in texts:
        if text is not None:
            tail, answer = text.rpartition(_QUESTION)[2], _answer_in(text, prompt)
            return _choice(_written_formats(tail, answer), "writes", unknown)
    return _choice(_described_formats(source), _DESCRIBES, "lists tools, but writes no calls")


def reasoning_parser_of(templates: ChatTemplates) -> ParserChoice:
    """Selects the reasoning parser by the tags in a template."""
    source = templates.sources.get(DEFAULT) or templates.sources.get(TOOL_USE, "")
    for name, tags in REASONING_FORMATS.items():
        mark = tags.source or tags.begin
        if tags.begin != THINK and mark in source:
            return ParserChoice(name, f"contains {mark}")
    if THINK in source:
        return ParserChoice("qwen3", f"contains {THINK}")
    if THINK_END not in source:
        return ParserChoice(None)
    if _OF_DEEPSEEK.search(source):
        reason = f"is DeepSeek's and contains {THINK_END} alone: answers begin within reasoning"
        return ParserChoice("deepseek-r1", reason)
    return ParserChoice("qwen3", f"contains {THINK_END}")


def _rendered(templates: ChatTemplates, conversations: Sequence[Conversation]) -> list[str | None]:
    """Returns the prompt of each conversation, or None if rendering fails or times out."""
    asked = b"".join([pack_templates(templates), *map(pack_conversation, conversations)])
    command = [sys.executable, "-m", "shared.text.template_worker"]
    limit_s = STARTING_S + DEADLINE_S * len(conversations)
    try:
        done = subprocess.run(
            command, cwd=ROOT, input=asked, stdout=subprocess.PIPE, timeout=limit_s, check=False
        )
        answers = list(frames_of(done.stdout))
    except subprocess.TimeoutExpired:
        answers = []
    texts = [str(x[1:], "utf-8") if x.startswith(DONE) else None for x in answers]
    return [*texts, *[None] * (len(conversations) - len(texts))]


def _answer_in(text: str, prompt: str) -> str:
    """Returns the assistant's text after a prompt."""
    pairs = enumerate(zip(text, prompt, strict=False))
    begin = next((place for place, (one, other) in pairs if one != other), len(prompt))
    return text[begin:]


def _written_formats(text: str, answer: str) -> list[CallFormat]:
    """Returns the formats in which the rendered call is the only call.

    Args:
      text: The call and everything after the question.
      answer: The assistant's text, with which a call without a tag begins.
    """

    def read(is_constrained: bool) -> list[CallFormat]:
        return [
            each
            for each in FORMATS.values()
            if _calls_in(each, text if each.openings else answer, is_constrained)
            == [(_FUNCTION, {_KEY: _VALUE})]
        ]

    # A parser that reads the call by a loose opening alone would leave its tags in the content.
    return read(is_constrained=False) if read(is_constrained=True) else []


def _calls_in(call_format: CallFormat, text: str, is_constrained: bool) -> list[tuple[str, Any]]:
    schema = _TOOL["function"]["parameters"]
    builder = OutputBuilder({_FUNCTION: schema}, None, is_constrained)
    parser = new_parser(call_format.name, builder, None)
    calls = (parser.push(text) + parser.flush(was_cut=False)).tool_calls
    return [(call.name, read_object(call.arguments)) for call in calls]


def _described_formats(source: str) -> list[CallFormat]:
    """Returns the formats that a template describes to the model, by their markers."""
    found = [each for each in FORMATS.values() if each.markers]
    return [each for each in found if all(marker in source for marker in each.markers)]


def _most_specific(formats: list[CallFormat]) -> list[CallFormat]:
    """Returns formats without those that have only a part of another format's markers."""
    return [
        each
        for each in formats
        if not any(set(each.markers) < set(other.markers) for other in formats if each.markers)
    ]


def _choice(formats: list[CallFormat], verb: str, otherwise: str) -> ParserChoice:
    formats = _most_specific(formats)
    if not formats:
        return ParserChoice(None, otherwise)
    if len(formats) == 1:
        return ParserChoice(formats[0].name, f"{verb} calls as {formats[0].description}")
    names = [each.name for each in formats]
    return ParserChoice(None, f"{verb} calls that several parsers read", tuple(names))
