"""Process that builds the grammar of a request and checks that it compiles in time.

See `shared.text.worker`. The engine process compiles a checked grammar again, concurrently with its
steps, because compiled grammars cannot be sent between processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from shared.text import tool_call_grammar, worker
from shared.text.call_formats.call_format import CallableFunction
from shared.text.grammar import (
    Compiler,
    InvalidGrammarError,
    literal,
    of_choices,
    of_lark,
    of_regex,
    of_schema,
    with_prefix,
)
from shared.text.lark_pattern import pattern_of
from shared.text.reasoning_formats import REASONING_FORMATS, ReasoningFormat

DEADLINE_S = 1.0
MAX_MEMORY = 1 << 32

_TEXT = r"/(.|\n)*/"


def _leads(tags: ReasoningFormat) -> dict[str, str]:
    """Returns the prefixes of outputs that begin within reasoning, or may begin with reasoning."""
    if tags.has_channels:
        return {tags.lead("open"): _OPEN_CHANNEL, tags.lead("maybe"): _CHANNELS}
    # Lazy: text that begins with the delimiter is reasoning, as in the parser, and never content.
    opening = rf"opening[lazy]: /\s{{0,4}}{re.escape(tags.begin)}/"
    thought = rf"thought[suffix={literal(tags.end)}]: {_TEXT}"
    gap = r"gap: /\s{0,4}/"
    return {
        tags.lead("open"): f"lead: thought gap\n{thought}\n{gap}",
        tags.lead("maybe"): f"lead: (opening thought gap)?\n{opening}\n{thought}\n{gap}",
    }


_CHANNEL_STEP = (
    'step: "<|channel|>" ("analysis" | "commentary") "<|message|>" body "<|start|>" "assistant"\n'
    f'body[suffix="<|end|>"]: {_TEXT} & ~/(.|\\n)*<\\|(start|channel|call|return)\\|>(.|\\n)*/'
)
"""Message before the last one. Its text has no tag at which the parser ends a message."""

_CHANNELS = f"lead: step*\n{_CHANNEL_STEP}"
_OPEN_CHANNEL = f'lead: body "<|start|>" "assistant" step*\n{_CHANNEL_STEP}'


def _content_lead(tags: ReasoningFormat) -> str | None:
    """Returns the prefix of a content that an output format constrains; None: none."""
    if tags.has_channels:
        return 'lead: "<|channel|>" "final" "<|message|>"'
    begins = " | ".join(map(literal, tags.content_begins))
    return f"lead: ({begins})?" if begins else None


_CONTENT_LEADS = {
    tags.lead(state): lead
    for tags in REASONING_FORMATS.values()
    for state in ("open", "maybe")
    if (lead := _content_lead(tags)) is not None
}
"""Prefixes of a constrained content by the keys of `ReasoningFormat.lead`."""

LEADS = {key: lead for tags in REASONING_FORMATS.values() for key, lead in _leads(tags).items()}
"""Prefixes of outputs by the keys of `ReasoningFormat.lead`."""

NO_CALLS = "no_calls"
"""Kind of the constraint that an output begins no tool call."""

_MAKERS: dict[str, Callable[[Any], str]] = {
    "schema": of_schema,
    "regex": of_regex,
    "choice": of_choices,
    "lark": of_lark,
    NO_CALLS: tool_call_grammar.without_calls,
}


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """Constraint of an output.

    Attributes:
      kind: "schema", "regex", "choice", "lark" or `NO_CALLS`.
      value: The schema, regular expression, list of strings, grammar, or format of the calls.
    """

    kind: str
    value: Any


@dataclass(frozen=True, kw_only=True)
class ToolCallSpec:
    """Required or allowed tool calls of an output.

    Attributes:
      style, many, free: See `tool_call_grammar.grammar_of`.
      tools: Names and schemas.
      inputs: Constraints of functions with one argument, a text: "lark" or "regex", and the value.
    """

    style: str
    tools: list[tuple[str, dict[str, Any] | None]]
    many: bool
    free: str | None
    inputs: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def functions(self) -> list[CallableFunction]:
        """Returns the functions; raises as `lark_pattern.pattern_of`."""
        patterns = {
            name: pattern_of(value) if kind == "lark" else value
            for name, (kind, value) in self.inputs.items()
        }
        return [
            CallableFunction(name=name, schema=schema, pattern=patterns.get(name))
            for name, schema in self.tools
        ]


@dataclass(frozen=True, kw_only=True)
class GrammarRequest:
    """Request for a grammar.

    Attributes:
      form: Constraint of the output; None: tool calls only.
      calls: Tool calls; None: no calls.
      lead: A name of `LEADS`; None: no reasoning.
    """

    form: OutputFormat | None
    calls: ToolCallSpec | None
    lead: str | None

    def pack(self) -> bytes:
        """Packs the message of the request."""
        return worker.pack(asdict(self))

    def grammar(self) -> str:
        """Builds the grammar, without compiling it.

        Raises:
          GrammarRefused: The constraint is invalid or unsupported.
        """
        written = None if self.form is None else _MAKERS[self.form.kind](self.form.value)
        is_content = self.form is not None and self.form.kind != NO_CALLS
        if written is not None and is_content and self.lead in _CONTENT_LEADS:
            written = with_prefix(_CONTENT_LEADS[self.lead], written)
        if self.calls is not None:
            written = tool_call_grammar.grammar_of(
                self.calls.style,
                self.calls.functions(),
                many=self.calls.many,
                free=self.calls.free,
                answer=written,
            )
        assert written is not None  # a request has a form or calls
        return written if self.lead is None else with_prefix(LEADS[self.lead], written)


def begin(given: Any) -> Callable[[Any], str]:
    """Returns the builder of grammars; `given` has the arguments of `Compiler.of_folder`."""
    folder, vocab, marks = given
    compiler = Compiler.of_folder(folder, vocab, marks)
    bits = np.zeros(-(-vocab // 32), np.int32)

    def make(asked: Any) -> str:
        form, calls = asked["form"], asked["calls"]
        wanted = GrammarRequest(
            form=None if form is None else OutputFormat(**form),
            calls=None if calls is None else ToolCallSpec(**calls),
            lead=asked["lead"],
        )
        grammar = wanted.grammar()
        start = compiler.compile(grammar).matcher()
        if not start.fill(bits):
            raise InvalidGrammarError(start.fault)
        return grammar

    return make


if __name__ == "__main__":
    worker.run(begin, read=json.loads, deadline_s=DEADLINE_S, max_memory=MAX_MEMORY)
