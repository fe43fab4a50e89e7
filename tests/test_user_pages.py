"""Names on the pages for users exist in the code: flags, fields, parsers, routes, examples."""

import ast
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from shared.offline.params import SamplingParams
from shared.offline.results import CompletionOutput, RequestOutput
from shared.options.command_line import SHOWN
from shared.options.server import REASONING_PARSERS, TOOL_CALL_PARSERS
from shared.server.protocol import response_types as answers
from shared.server.protocol.openai_types import ChatRequest, CompletionRequest
from shared.text.call_formats.registry import FORMATS
from shared.text.parsing.output_parser import OutputBuilder
from shared.text.text_parsers import new_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("http_api", "structured_output", "python", "install", "clients", "failure_modes")
PAGES += ("troubleshooting", "troubleshooting_requests", "multimodal", "ngram", "quantization")
PAGES += ("adaptive_speculation", "draft_heads", "tensor_parallelism")
OF_OTHER_PROGRAMS = {
    "install": {"--version", "--index-url", "--base-url", "--backend"},
    "http_api": {"--dataset-name", "--request-rate", "--max-concurrency", "--out", "--html"},
    "clients": {
        "--auth-type",
        "--model",
        "--model_args",
        "--openai-api-base",
        "--disallowed-tools",
    },
    "troubleshooting": {"--help"},
    "draft_heads": {"--out", "--size", "--texts"},
    "tensor_parallelism": {"--head"},
}
"""Flags of `tandem`, its benches, pip and clients."""


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    """The text of a page below a heading, up to the next one."""
    return page(name).split(f"# {heading}\n", 1)[1].split("\n#", 1)[0]


def names(text: str) -> set[str]:
    """Identifiers in code spans, without a leading dot or an object."""
    return {word.rpartition(".")[2] for word in re.findall(r"`([\w.\[\]]+)`", text)}


@pytest.mark.parametrize("name", PAGES)
def test_flags_on_page_exist(name: str) -> None:
    named = {*re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9]", page(name))}
    others = OF_OTHER_PROGRAMS.get(name, set())
    assert others <= named
    assert named - others <= SHOWN


@pytest.mark.parametrize("name", PAGES)
def test_examples_on_page_parse(name: str) -> None:
    for language, text in re.findall(r"```(\w+)\n(.*?)```", page(name), re.DOTALL):
        if language == "python":
            ast.parse(text)
        elif language == "json":
            json.loads(text)


def test_http_api_page_request_fields_exist() -> None:
    cells = re.findall(r"^\| (`.+?) \|", section("http_api", "Extra request fields"), re.MULTILINE)
    named = names("\n".join(cells))
    assert len(named) > 12
    assert named <= {*ChatRequest.model_fields, *CompletionRequest.model_fields}


def test_http_api_page_lists_trace_sources_and_origins() -> None:
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \(([^)]+)\)", page("http_api"), re.MULTILINE)
    listed = {(kind, field): names(values) for kind, field, values in rows}
    step = get_args(answers.TracedStep.model_fields["source"].annotation)
    token = get_args(answers.TracedToken.model_fields["origin"].annotation)
    assert listed == {("step", "source"): {*step}, ("token", "origin"): {*token}}


def test_http_api_page_response_fields_exist() -> None:
    cells = re.findall(r"^\| (`.+?) \|", section("http_api", "Extra response fields"), re.MULTILINE)
    kinds = [kind for kind in vars(answers).values() if hasattr(kind, "model_fields")]
    known = {name for kind in kinds for name in kind.model_fields}
    named = names("\n".join(cells))
    assert len(named) >= 8
    assert named <= known


def test_http_api_page_routes_exist() -> None:
    first = page("http_api").split("\n## ")[0]
    cells = re.findall(r"^\| (.+?) \|", first, re.MULTILINE)
    routes = {each for cell in cells for each in re.findall(r"/[\w./]*", cell)}
    code = "\n".join(
        file.read_text(encoding="utf-8") for file in (ROOT / "shared" / "server").rglob("*.py")
    )
    written = {re.sub(r"\{[^}]+\}", "X", each) for each in re.findall(r'"(/[^"\s]*)"', code)}
    assert len(routes) > 12
    assert {re.sub(r"\b(ID|NAME)\b", "X", each) for each in routes} <= written


def test_structured_output_page_lists_all_parsers() -> None:
    spans = {*re.findall(r"`([^`]+)`", section("structured_output", "Parsers"))}
    assert {*REASONING_PARSERS} <= spans


def test_structured_output_page_states_streamed_arguments() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| (\w+) \|$", section("structured_output", "Parsers"), re.MULTILINE
    )
    stated = {name: how for name, how in rows if name in TOOL_CALL_PARSERS}
    assert list(stated) == list(TOOL_CALL_PARSERS)
    for name, how in stated.items():
        text = FORMATS[name].write([("f", {"city": "Rome"})])
        parser = new_parser(name, OutputBuilder({"f": {}}, None, False), None)
        found = parser.push(text[: text.index("Rome")])
        assert how == ("streamed" if found.tool_calls else "whole"), name


def test_python_page_lists_all_sampling_parameters() -> None:
    table = section("python", "SamplingParams")
    spans = names("\n".join(line for line in table.splitlines() if line.startswith("|")))
    options = {"json", "regex", "choice", "grammar"}
    assert spans - options == {item.name for item in fields(SamplingParams)}


def test_python_page_lists_all_result_fields() -> None:
    cells = re.findall(r"^\| (`.+?) \|", section("python", "RequestOutput"), re.MULTILINE)
    named = {re.sub(r"\[i\]$", "", each) for each in names("\n".join(cells))}
    of_output = {item.name for item in fields(CompletionOutput)} - {"index"}
    of_request = {item.name for item in fields(RequestOutput)} - {"outputs"}
    assert named == of_output | of_request
