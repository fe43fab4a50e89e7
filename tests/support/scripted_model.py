"""Scripted outputs: a chat template that writes the next output of an agent's session.

The engine without a model repeats its prompt until the end token, so the text that the template
writes first is the output. It is chosen by the number of tool results in the conversation.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.support.http_fixtures import SPECIAL, Server, save_tokenizer, serving

MAX_TOKENS = str(1 << 20)  # agents send prompts of some 100,000 bytes, and a token is a byte
TITLE = '{"title": "Notes"}'
_TEMPLATE = (
    "{% set script = SCRIPT %}"
    "{% set done = messages | selectattr('role', 'equalto', 'tool') | list | length %}"
    "{{ script[[done, script | length - 1] | min] if tools else TITLE }}END"
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}"
    "{{ m.content if m.content is string else m.content | tojson }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
)


def call_of(name: str, **arguments: Any) -> str:
    """Returns the text of a call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def products(num_calls: int) -> list[str]:
    """Returns a script of `multiply` calls with reasoning and text; the last two are parallel."""
    calls = [call_of("multiply", a=number, b=7) for number in range(num_calls)]
    first = f"<think>\nI need the tool.\n</think>\n\nFirst.{calls[0]}"
    last = f"The last two.{calls[-2]}\n{calls[-1]}"
    return [first, *calls[1:-2], last, "", "<think>\nDone?\n</think>\n\nAll done."]


@contextlib.contextmanager
def serving_script(
    folder: Path,
    script: Sequence[str],
    *flags: str,
    tokenizer: Tokenizer | None = None,
    end: str = SPECIAL[0],
) -> Iterator[Server]:
    """Serves a script.

    Args:
      folder: Empty model folder.
      script: Output by number of tool results; the last one ends the session. Requests without
        tools get a title as JSON.
      flags: Further flags of `tests.support.http_fixtures`.
      tokenizer: Tokenizer of the model; None for the one of other tests.
      end: Text of the token that ends an output.
    """
    save_tokenizer(folder, tokenizer, end)
    template = _TEMPLATE.replace("SCRIPT", json.dumps(script)).replace("END", end)
    (folder / "chat_template.jinja").write_text(template.replace("TITLE", json.dumps(TITLE)))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0}))
    limits = ["--context-length", MAX_TOKENS, "--max-request-tokens", MAX_TOKENS]
    parsers = ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"]
    command = ["-m", "tests.support.http_fixtures", str(folder), "--structured-outputs"]
    with serving([*command, *limits, *parsers, *flags]) as running:
        yield running
