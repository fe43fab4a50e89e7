"""Source of a grammar for llguidance: literals, rules and their size limit.

Nothing here imports the library, which servers without structured output do not need.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shared.text.worker import WorkerError

MAX_GRAMMAR_BYTES = 1 << 18
JSON_SPACES = r"[ ]?|\n[ ]{0,32}"
"""White space between parts of JSON: none, a space, or a line break and an indentation.

Without a bound a model may write white space forever.
"""

OF_TEXTS = {"whitespace_pattern": JSON_SPACES}
_OF_CALLS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Separators of JSON in calls: those of `tojson` in chat templates, with which models are trained,
because clients never receive this white space."""


class InvalidGrammarError(WorkerError):
    """Error of an invalid grammar; one sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, "grammar")


def literal(text: str) -> str:
    """Returns a string as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def schema_rule(name: str, schema: dict[str, Any]) -> str:
    """Returns a rule of JSON that matches a schema, with the separators of calls."""
    return f"{name}: {json_body(schema)}"


def json_body(schema: dict[str, Any]) -> str:
    """Returns the body of `schema_rule`."""
    return f"%json {json.dumps(with_settings(schema, _OF_CALLS))}"


def serialized(grammars: Sequence[dict[str, Any]]) -> str:
    """Returns the input of `Compiler.compile`.

    Raises:
      InvalidGrammarError: The grammar is too large.
    """
    return checked(json.dumps({"grammars": grammars}))


def with_settings(schema: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema with settings of the library; unknown keywords are errors."""
    return {**schema, "x-guidance": {**settings, "lenient": False}}


def checked(grammar: str) -> str:
    """Returns a grammar; raises an `InvalidGrammarError` if it is too large."""
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidGrammarError(TOO_LARGE)
    return grammar


TOO_LARGE = f"the grammar has more than {MAX_GRAMMAR_BYTES} bytes"
