"""HELP texts of the metrics."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.server.engine_link.metric_texts import HELP
from shared.server.engine_link.server_metrics import ServerMetrics

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"[a-z]+[a-z0-9_]*")
OWN = {
    *("prompt_image_tokens_total", "malformed_tool_calls_total"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_prompt_tokens", "request_generation_tokens"),
}
"""Metrics of the HTTP server itself."""


def heads(node: ast.AST) -> Iterator[str]:
    """Yields the strings of a syntax tree, without labels."""
    for each in ast.walk(node):
        first = each.values[0] if isinstance(each, ast.JoinedStr) and each.values else each
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value.partition("{")[0]


def keys(node: ast.AST) -> Iterator[str]:
    """Yields the keys of dictionaries with lambdas as values."""
    for each in ast.walk(node):
        if isinstance(each, ast.Dict):
            for key, value in zip(each.keys, each.values, strict=True):
                if key is not None and isinstance(value, ast.Lambda):
                    yield from heads(key)


def metrics_of_sources() -> set[str]:
    found: set[str] = set()
    for room in ("engine", "process", "boundary", "cluster"):
        for path in (ROOT / "shared" / room).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
            found |= {head for head in heads(tree) if head.endswith("_total")}
            if "auges" in source or "metrics.show" in source:
                found |= set(keys(tree))
                functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
                shown = [f for f in functions if "gauges" in f.name]
                found |= {
                    head
                    for function in shown
                    for head in heads(ast.Module(function.body[1:], []))
                    if "_" in head
                }
    return {name for name in found if NAME.fullmatch(name)}


def test_help_texts_equal_metrics_of_sources():
    found = metrics_of_sources()
    composed = {name for name in HELP if name.startswith("spec_decode_source_")}
    assert found - {"spec_decode_source_"} == HELP.keys() - OWN - composed


@pytest.mark.parametrize("name", HELP)
def test_help_text_is_sentence_with_unit(name: str):
    text = HELP[name]
    assert text[0].isupper()
    assert text.endswith(".")
    assert len(text.split()) >= 4
    assert text.lower().rstrip(".") != name.replace("_", " ")
    unit = {"seconds": "econds", "bytes": "Bytes", "tokens": "oken", "perc": "from 0 to 1"}
    for word, needed in unit.items():
        if word in name.split("_"):
            assert needed in text, word


def test_metrics_page_has_help_texts():
    page = ServerMetrics("it").render({"kv_pages_free": 3.0, "tp_size": 2.0}).decode()
    assert f"# HELP tandem:kv_pages_free {HELP['kv_pages_free']}" in page
    counter = HELP["prompt_image_tokens_total"]
    assert f"# HELP tandem:prompt_image_tokens_total {counter}" in page
