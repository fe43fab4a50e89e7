"""The wheel, installed outside the checkout: equal outputs and commands."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

import tandem
from shared import VERSION
from shared.options.options import DEFAULT_MODEL
from tandem import backends, command
from tests.support.http_fixtures import Server, serving
from torch_impl import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("bench", "jax_impl", "kernels", "models", "shared", "tests", "torch_impl")
QUESTION = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many has he?"}]
BUILD = "import sys, build_backend; build_backend.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    words = [sys.executable, "-c", BUILD, str(folder)]
    subprocess.run(words, cwd=ROOT / ".ci" / "wheel", check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the installed wheel, without its dependencies."""
    site = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    words += ["--no-compile", "--target", str(site), str(wheel)]
    subprocess.run(words, check=True)
    return site


@pytest.fixture(scope="module")
def elsewhere(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with foreign packages of equal names, first on the import path."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name in TOPS:
        (folder / f"{name}.py").write_text(f"raise ImportError('a foreign {name}')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (folder, installed))))
        yield folder


@pytest.fixture(scope="module")
def server(installed: Path, elsewhere: Path) -> Iterator[Server]:
    """A server of the default model with two ranks, so that all kinds of child processes run."""
    words = [str(installed / "bin" / "tandem"), "serve", "--backend", "torch", "--tp-size", "2"]
    words += ["--port", "0", "--max-running-requests", "2", "--grammar-backend", "llguidance"]
    with serving(words, folder=elsewhere) as made:
        yield made


def run(installed: Path, elsewhere: Path, *words: str) -> str:
    started = [sys.executable, str(installed / "bin" / "tandem"), *words]
    return subprocess.check_output(started, cwd=elsewhere, text=True)


def test_wheel_owns_one_import_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    metadata = f"tandem_llm-{VERSION}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"tandem", metadata}
    assert f"{metadata}/licenses/LICENSE" in names
    assert wheel.stat().st_size < 60e6


def test_wheel_has_every_source_file(wheel: Path) -> None:
    names = {*zipfile.ZipFile(wheel).namelist()}
    paths = [
        path.relative_to(ROOT)
        for top in (*TOPS[:5], "torch_impl", "tests/support")
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".json", ".safetensors", ".html", ".js", ".css", ".yaml")
        and not {"results", "__pycache__"} & {*path.parts}
    ]
    missing = {path for path in paths if f"tandem/{path}" not in names}
    bench = Path("bench")
    pages = {bench / "pages" / path.name for path in (ROOT / bench / "pages").glob("*.py")}
    assert missing == {bench / "performance.py", *pages}


def test_wheel_output_equals_checkout(server: Server) -> None:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 64}
    answer = server.post("/v1/chat/completions", **body).json()
    with LLM(str(DEFAULT_MODEL), max_running_requests=2) as llm:
        (expected,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=64))
    assert answer["choices"][0]["message"]["content"] == expected.text


def test_wheel_serves_structured_output(server: Server) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [5]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = server.post("/v1/chat/completions", messages=QUESTION, response_format=form)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"n": 5}


def test_wheel_serves_playground(server: Server) -> None:
    assert "<html" in httpx.get(server.url).text


def test_command_prints_version(installed: Path, elsewhere: Path) -> None:
    assert run(installed, elsewhere, "--version") == f"tandem {VERSION}\n"


def test_command_env_describes_installation(installed: Path, elsewhere: Path) -> None:
    lines = run(installed, elsewhere, "env").splitlines()
    facts = dict(line.split(": ", 1) for line in lines)
    assert facts["tandem"] == VERSION
    assert facts["python"].split()[0] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert {"jax", "triton", "gpu", "system"} <= facts.keys()
    assert not [line for line in lines if str(ROOT) in line or socket.gethostname() in line]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sevre"], "sevre is no command of tandem. Use serve, route, bench, env or --version."),
        (["bench", "nothing"], "nothing is no benchmark. `tandem bench` lists them."),
        (["env", "--all"], "--all is no flag of `tandem env`, which has none."),
        (["serve", "--nothing"], "unknown flag --nothing"),
    ],
)
def test_invalid_command_exits_with_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(words) == command.EXIT_REFUSED
    assert capsys.readouterr().err.startswith(sentence)


def test_missing_framework_names_extra(monkeypatch, capsys) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None if name == "jax" else object())
    assert backends.default() == "torch"
    assert command.main(["serve", "--backend", "jax"]) == command.EXIT_REFUSED
    assert 'pip install "tandem-llm[jax]"' in capsys.readouterr().err
    monkeypatch.setattr(backends, "find_spec", lambda name: None if name == "torch" else object())
    assert backends.default() == "jax"


def test_package_exports_default_backend() -> None:
    assert tandem.LLM is LLM
    assert tandem.SamplingParams is SamplingParams


def test_command_runs_benchmark(server: Server, installed: Path, elsewhere: Path) -> None:
    words = ("bench", "serving.send_one", "--base-url", server.url, "--max-tokens", "4")
    assert "Latency (s)" in run(installed, elsewhere, *words)
