"""Process that builds the grammar of a request and checks that it compiles in time.

See `shared.text.worker`. The engine process compiles a checked grammar again, concurrently with its
steps, because compiled grammars cannot be sent between processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shared.text import tool_call_grammar, worker
from shared.text.delimiters import THINK, THINK_END
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

DEADLINE_S = 1.0
MAX_MEMORY = 1 << 32

_GAP = r"gap: /\s{0,4}/"
# Lazy: text that begins with the delimiter is reasoning, as in the parser, and never content.
_OPENING = rf"opening[lazy]: /\s{{0,4}}{THINK}/"
_THOUGHT = rf"thought[suffix={literal(THINK_END)}]: /(.|\n)*/"
LEADS = {
    "open": f"lead: thought gap\n{_THOUGHT}\n{_GAP}",
    "maybe": f"lead: (opening thought gap)?\n{_OPENING}\n{_THOUGHT}\n{_GAP}",
}
"""Prefixes of outputs that begin within reasoning, or may begin with reasoning."""

_MAKERS: dict[str, Callable[[Any], str]] = {
    "schema": of_schema,
    "regex": of_regex,
    "choice": of_choices,
    "lark": of_lark,
}


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """Constraint of an output.

    Attributes:
      kind: "schema", "regex", "choice" or "lark".
      value: The schema, regular expression, list of strings or grammar.
    """

    kind: str
    value: Any


@dataclass(frozen=True, kw_only=True)
class ToolCallSpec:
    """Required or allowed tool calls of an output.

    Attributes:
      style, many, free: See `tool_call_grammar.grammar_of`.
      tools: Names and schemas.
    """

    style: str
    tools: list[tuple[str, dict[str, Any] | None]]
    many: bool
    free: str | None


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
        if self.calls is not None:
            written = tool_call_grammar.grammar_of(
                self.calls.style,
                [
                    tool_call_grammar.CallableFunction(name=name, schema=schema)
                    for name, schema in self.calls.tools
                ],
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
