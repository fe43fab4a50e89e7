"""Tests that run every program of `examples/`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples import compare_backends, inspect_draft_tree, tool_loop, train_head
from tests.support.http_fixtures import save_tokenizer, serving

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600


def ended(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"examples.{name}", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )


def run(name: str, *words: str) -> str:
    done = ended(name, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_generate():
    assert "#### 78" in run("generate")


def test_stream_http():
    with serving(["-m", "torch_impl.serve", "--port", "0", "--context-length", "256"]) as server:
        assert "#### 78" in run("stream_http", "--base-url", server.url)
        assert "#### 78" in run("stream_http", server.url + "/v1")  # spelling of earlier releases
        done = ended("stream_http", "--base-url", server.url, "--model", "gpt")
    assert done.returncode == 1
    assert f"The server at {server.url} answered 404: the model 'gpt' does not exist" in done.stderr
    assert "Traceback" not in done.stderr


NEWEST_FIRST = (
    "{% for m in messages | reverse %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|end|>"
    "{% if m.role == 'tool' %}{{ m.tool_call_id }}{% endif %}{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
)
"""Template for the engine without a model, which repeats the newest message: call, then result."""


def test_tool_loop(tmp_path):
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(NEWEST_FIRST)
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 13}}</tool_call>'
    command = ["-m", "tests.support.http_fixtures", str(tmp_path), "--tool-call-parser", "hermes"]
    with serving(command) as server:
        for api in tool_loop.LOOPS:
            url = server.url
            out = run("tool_loop", "--api", api, "--question", call, "--base-url", url)
            assert out == "multiply(a=6, b=13): 78\n78\n"


@pytest.mark.matrix
@pytest.mark.parametrize("apis", [["messages"], ["chat", "responses"]])
def test_tool_loop_of_demo_model_calls_twice(apis):
    command = ["-m", "torch_impl.serve", "--port", "0", "--context-length", "1024"]
    with serving(command) as server:
        url = server.url
        outputs = [run("tool_loop", "--api", api, "--base-url", url) for api in apis]
        done = ended("tool_loop", "--api", apis[0], "--model", "gpt", "--base-url", url)
    called = "multiply(a=6, b=13): 78\nsubtract(a=78, b=15): 63\n"
    assert set(outputs) == {called + "The answer is 63.\n#### 63\n"}
    assert f"The server at {server.url} answered 404: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["stream_http", "chat_with_image", "tool_loop"])
def test_example_without_server_exits_with_message(name):
    done = ended(name, "--port", "9")
    assert done.returncode == 1
    expected = "No server answers at http://127.0.0.1:9: start one with `make serve`.\n"
    assert done.stderr == expected


def test_inspect_draft_tree():
    lines = run("inspect_draft_tree").splitlines()
    assert lines[0].startswith("prefill")
    drafted = [line for line in lines if line.startswith("draft")]
    assert "chains of 3 tokens" in (inspect_draft_tree.__doc__ or "")
    assert drafted
    assert all(re.match(r"draft +[0-3] of 3 drafts accepted: ", line) for line in drafted)


def test_compare_backends(quick_jax, capsys):
    compare_backends.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{name} with NEXTN: equal to plain decoding" for name in ("torch", "jax")]


def test_train_head(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_head, "TARGET", "models/random")
    train_head.main(str(tmp_path), 2, 4)
    assert "acceptance length" in capsys.readouterr().out


def test_chat_with_image():
    command = ["-m", "torch_impl.serve", "--model-path", "models/demo/vlm", "--port", "0"]
    with serving([*command, "--context-length", "256"]) as server:
        asked = ("--base-url", server.url, "--seed", "7", "--num-prompts", "2")
        shown, *rest = run("chat_with_image", *asked).splitlines()
    output = "".join(rest[: rest.index("}") + 1])
    assert rest[-1].startswith("correct, of 2 images: color 2, product 2, quantity ")
    assert shown.startswith("image: ")
    assert json.loads(output).keys() == {"product", "color", "quantity"}
    assert json.loads(output)["color"] in shown


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_have_tests(path):
    assert f"def test_{path.stem}(" in Path(__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_example_docstring_has_command_and_known_options(path):
    text = path.read_text(encoding="utf-8")
    page = text.split('"""')[1]
    assert f"python -m examples.{path.stem}" in " ".join(page.split())
    for option in re.findall(r"`(--[a-z-]+)", page):
        shared = (ROOT / "bench/common/server.py").read_text(encoding="utf-8")
        assert f'"{option}"' in text + shared
