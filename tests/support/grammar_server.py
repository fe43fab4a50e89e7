"""Server of a tiny model with grammars, a tool-call parser and a reasoning parser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.text.call_formats.registry import marks_of
from tests.support.http_fixtures import save_tokenizer, serving
from tests.support.special_token_tokenizer import marked_tokenizer
from tests.support.tiny_models import write_tiny

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools or '' }}"
    "{% if enable_thinking is defined and enable_thinking %}<think>{% else %}<think></think>"
    "{% endif %}"
)
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "maximum": 9, "minimum": 1},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **more}}


def start(folder: Path) -> Any:
    write_tiny(folder, "llama", 5)
    marks = marks_of("qwen3_coder", "qwen3")  # the vocabulary has no room for those of all formats
    save_tokenizer(folder, marked_tokenizer(special=True, marks=marks))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    line = ["--port", "0", "--model-path", str(folder), "--speculative-algorithm", "NGRAM"]
    line += ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    line += ["--grammar-backend", "llguidance", "--max-running-requests", "4"]
    return serving(["-m", "torch_impl.serve", *line])
