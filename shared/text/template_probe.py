"""Tool-call and reasoning parsers that fit a checkpoint's chat template.

A template is rendered with a tool and a call of it, in a process of its own with a deadline. The
text that it writes for the call is the form in which the model writes calls.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.text.chat_template import Conversation
from shared.text.chat_templates import DEFAULT, TOOL_USE, ChatTemplates
from shared.text.delimiters import CALL, PYTHON_TAG, THINK, THINK_END
from shared.text.template_worker import DEADLINE_S, pack_conversation, pack_templates
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
_OF_DEEPSEEK = re.compile(r"<[|｜]Assistant[|｜]>")


@dataclass(frozen=True)
class ParserChoice:
    """Automatically selected parser.

    Attributes:
      parser: Its name; None if no parser fits.
      reason: Reason in the template, a clause that follows `the chat template`; may be empty.
    """

    parser: str | None
    reason: str = ""


def tool_call_parser_of(templates: ChatTemplates) -> ParserChoice:
    """Selects the parser of the calls that a template writes.

    A parser is selected if it is the only one that reads the rendered call.
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
    for text in texts:
        if text is not None:
            return _parser_of_call(text.rpartition(_QUESTION)[2], _answer_in(text, prompt))
    return ParserChoice(None, "lists tools, but writes no calls")


def reasoning_parser_of(templates: ChatTemplates) -> ParserChoice:
    """Selects the reasoning parser by the tags in a template."""
    source = templates.sources.get(DEFAULT) or templates.sources.get(TOOL_USE, "")
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


def _parser_of_call(tail: str, answer: str) -> ParserChoice:
    found = (
        ("hermes", _is_tagged(tail), "writes calls as JSON in <tool_call>"),
        ("qwen3_coder", _is_elements(tail), "writes calls as elements in <tool_call>"),
        ("llama3", _is_bare(answer), "writes calls as JSON with parameters"),
    )
    fitting = {name: reason for name, is_fitting, reason in found if is_fitting}
    if len(fitting) == 1:
        return ParserChoice(*fitting.popitem())
    if fitting:
        return ParserChoice(None, f"fits the parsers {' and '.join(fitting)}")
    return ParserChoice(None, "writes calls in a form that no parser reads")


def _is_tagged(tail: str) -> bool:
    call = _object_after(tail, CALL)
    return call == {"name": _FUNCTION, "arguments": {_KEY: _VALUE}}


def _is_elements(tail: str) -> bool:
    form = rf"<function={_FUNCTION}>\s*<parameter={_KEY}>\s*{_VALUE}\s*</parameter>\s*</function>"
    return re.search(form, tail) is not None


def _is_bare(answer: str) -> bool:
    call = _object_after(answer.lstrip().removeprefix(PYTHON_TAG), "")
    return call == {"name": _FUNCTION, "parameters": {_KEY: _VALUE}}


def _object_after(text: str, mark: str) -> Any:
    """Returns the JSON after the first delimiter, or None without valid JSON."""
    _, found, rest = text.partition(mark) if mark else ("", "", text)
    if mark and not found:
        return None
    try:
        return json.JSONDecoder().raw_decode(rest.lstrip())[0]
    except ValueError:
        return None
