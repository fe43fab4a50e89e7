"""Makes a grammar of what a request asks, and proves that it compiles in time.

It runs in a process of its own; see `shared.text.worker`. The engine's process compiles what was
proved here once more, beside its steps: a compiled grammar does not travel.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shared.text import forced_calls, worker
from shared.text.grammar import (
    Compiler,
    GrammarRefused,
    behind,
    literal,
    of_choices,
    of_lark,
    of_regex,
    of_schema,
)
from shared.text.marks import THINK, THINK_END

DEADLINE_S = 1.0
MAX_MEMORY = 1 << 32

_GAP = r"gap: /\s{0,4}/"
# Lazy: what begins with the mark is a thought, for its parser too, and never a free text.
_OPENING = rf"opening[lazy]: /\s{{0,4}}{THINK}/"
_THOUGHT = rf"thought[suffix={literal(THINK_END)}]: /(.|\n)*/"
LEADS = {
    "open": f"lead: thought gap\n{_THOUGHT}\n{_GAP}",
    "maybe": f"lead: (opening thought gap)?\n{_OPENING}\n{_THOUGHT}\n{_GAP}",
}
"""What comes before an answer whose text begins within its reasoning, or may do so."""

_MAKERS: dict[str, Callable[[Any], str]] = {
    "schema": of_schema,
    "regex": of_regex,
    "choice": of_choices,
    "lark": of_lark,
}


@dataclass(frozen=True, kw_only=True)
class Form:
    """What an answer is held to.

    Attributes:
      kind: "schema", "regex", "choice" or "lark".
      value: What of it.
    """

    kind: str
    value: Any


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Calls of tools that an answer makes, or that it may make.

    Attributes:
      style, many, free: As `forced_calls.grammar_of` has them.
      tools: Names and schemas.
    """

    style: str
    tools: list[tuple[str, dict[str, Any] | None]]
    many: bool
    free: str | None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A grammar that is asked for.

    Attributes:
      form: Of the answer; None where it is of calls alone.
      calls: None where it has none.
      lead: A name of `LEADS`; None where the answer begins at once.
    """

    form: Form | None
    calls: Calls | None
    lead: str | None

    def pack(self) -> bytes:
        """The message that asks for it."""
        return worker.pack(asdict(self))

    def grammar(self) -> str:
        """The grammar, not yet compiled.

        Raises:
          GrammarRefused: There can be none.
        """
        written = None if self.form is None else _MAKERS[self.form.kind](self.form.value)
        if self.calls is not None:
            written = forced_calls.grammar_of(
                self.calls.style,
                [forced_calls.Tool(name=name, schema=schema) for name, schema in self.calls.tools],
                many=self.calls.many,
                free=self.calls.free,
                answer=written,
            )
        assert written is not None  # one of them is asked for
        return written if self.lead is None else behind(LEADS[self.lead], written)


def begin(given: Any) -> Callable[[Any], str]:
    """What makes grammars; `given` is what `Compiler.of_folder` takes."""
    folder, vocab, marks = given
    compiler = Compiler.of_folder(folder, vocab, marks)
    bits = np.zeros(-(-vocab // 32), np.int32)

    def make(asked: Any) -> str:
        form, calls = asked["form"], asked["calls"]
        wanted = Wanted(
            form=None if form is None else Form(**form),
            calls=None if calls is None else Calls(**calls),
            lead=asked["lead"],
        )
        grammar = wanted.grammar()
        start = compiler.compile(grammar).matcher()
        if not start.fill(bits):
            raise GrammarRefused(start.fault)
        return grammar

    return make


if __name__ == "__main__":
    worker.run(begin, read=json.loads, deadline_s=DEADLINE_S, max_memory=MAX_MEMORY)
