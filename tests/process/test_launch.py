"""The launch of a server: signals, checks before the framework, errors."""

import errno
import os
import signal
import socket
import subprocess
import sys

import pytest

from shared.process import launch, serving
from tests.support.http_fixtures import ROOT
from tests.support.tiny_models import write_tiny


def test_launch_sets_default_sigint_handler_during_startup(monkeypatch):
    """SIGINT ends the startup at once, without a traceback or a wait for a compiler."""
    seen = []

    def parse(argv):
        seen.append(signal.getsignal(signal.SIGINT))
        raise ValueError("refused")

    monkeypatch.setattr(launch, "parse", parse)
    before = signal.getsignal(signal.SIGINT)
    assert launch.launch([], lambda: None) == 2
    assert seen == [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGINT) is before


WRONG = {
    "folder": (["--model-path", "{tmp}/nowhere"], "nowhere does not exist"),
    "empty": (["--model-path", "{tmp}/empty"], "it is empty"),
    "family": (["--model-path", "{tmp}/family"], "GPTBigCodeForCausalLM, which is not supported"),
    "weights": (["--model-path", "{tmp}/no_weights"], "neither model.safetensors nor"),
    "tokenizer": (["--model-path", "{tmp}/tokenizer"], "tokenizer.json cannot be read"),
    "draft": (
        ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "{tmp}/nowhere"],
        "nowhere does not exist",
    ),
    "rule": (["--speculative-algorithm", "EAGLE3"], "--speculative-draft-model-path"),
    "ranks": (["--tp-size", "7"], "--tp-size 7 does not fit"),
    "rank processes": (["--tp-size", "2", "--model-path", "{tmp}/empty"], "it is empty"),
}


@pytest.mark.parametrize("case", WRONG)
def test_launch_reports_wrong_files_before_framework_import(tmp_path, case, capsys):
    """Neither the framework, which takes seconds to import, nor rank processes start."""

    def platform():
        raise AssertionError("the framework is imported")

    (tmp_path / "empty").mkdir()
    for name in ("family", "no_weights", "tokenizer"):
        write_tiny(tmp_path / name, "qwen3", 0)
    (tmp_path / "family" / "config.json").write_text('{"architectures": ["GPTBigCodeForCausalLM"]}')
    (tmp_path / "no_weights" / "model.safetensors").unlink()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{")
    given, reason = WRONG[case]
    flags = [word.format(tmp=tmp_path) for word in given]
    assert launch.launch(["--port", "0", *flags], platform, "no_module") == 2
    assert reason in capsys.readouterr().err


def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a Python without installed packages."""
    first = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    command = [sys.executable, "-I", "-S", "-c", first + code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


SERVE = "import runpy; runpy.run_module('{}_impl.serve', run_name='__main__')"
CHEAP = {
    "--pagesize 16": "unknown flag --pagesize; did you mean --page-size?",
    "--port 1 --config /nowhere.toml": "--config /nowhere.toml cannot be read: No such file",
    "--use-ray --tp-size 2": "--distributed-executor-backend ray requires the package ray",
    "--otlp-traces-endpoint http://x": "--otlp-traces-endpoint requires OpenTelemetry; install",
    "--host 192.0.2.7": "--host 192.0.2.7 --port 8000 cannot be listened on",
}


@pytest.mark.parametrize("flags", CHEAP)
def test_launch_cheap_checks_need_no_package(flags):
    """Cheap checks take 0.1 s and end with one sentence."""
    code = "from shared.process.launch import launch; sys.exit(launch(sys.argv[1:], None))"
    ran = run(code, *flags.split())
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith(CHEAP[flags])
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_serve_without_framework_names_install_command(backend):
    ran = run(SERVE.format(backend))
    assert ran.returncode == 2
    assert ran.stderr == (
        f"the package {backend} is not installed; install it with pip install "
        f'"tandem-llm[{backend}]", or in a checkout with make venv EXTRAS={backend}\n'
    )


def test_launch_without_required_package_names_install_command():
    code = "from shared.process.launch import launch; sys.exit(launch(['--port', '0'], None))"
    ran = run(code)
    assert ran.returncode == 2
    assert ran.stderr.endswith('pip install "tandem-llm", or in a checkout with make venv\n')
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_serve_rejects_old_python(backend):
    ran = run("import sys; sys.version_info = (3, 10, 2); " + SERVE.format(backend))
    assert ran.returncode == 2
    assert ran.stderr.startswith("Python 3.11 or newer is required, and this is Python 3.")
    assert ran.stderr.count("\n") == 1


WRONG_FILES = {
    "--speculative-token-map": "read: No such file or directory",
    "--speculative-adaptive-config": "read: No such file or directory",
    "--speculative-ngram-external-corpus-path": "read: No such file or directory",
    "--speculative-adaptive-trace": "written: No such file or directory",
}


@pytest.mark.parametrize("flag", WRONG_FILES)
def test_launch_reports_unusable_flag_file(flag, tmp_path, capsys):
    line = ["--port", "0", "--speculative-algorithm", "NGRAM", "--speculative-adaptive"]
    line += ["--speculative-ngram-external-sam-budget", "3"]
    path = tmp_path / "nowhere" / "file"
    assert launch.launch([*line, flag, str(path)], lambda: None, packages=["no_package"]) == 2
    assert "no_package is not installed" in capsys.readouterr().err
    assert launch.launch([*line, flag, str(path)], lambda: None) == 2
    assert capsys.readouterr().err == f"{flag} {path} cannot be {WRONG_FILES[flag]}\n"
    assert launch.launch([*line, flag, str(tmp_path)], lambda: None) == 2
    verb = WRONG_FILES[flag].partition(":")[0]
    assert capsys.readouterr().err == f"{flag} {tmp_path} cannot be {verb}: Is a directory\n"


def test_launch_rejects_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert launch.launch(["--port", str(port)], lambda: None) == 2
    assert "Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_launch_reports_later_file_error_in_one_sentence(number, monkeypatch, capsys):
    def fail(*given):
        raise OSError(number, os.strerror(number), "/cache/file")

    monkeypatch.setattr(serving, "start_serving", fail)
    assert launch.launch(["--port", "0"], lambda: None) == 2
    assert capsys.readouterr().err == f"/cache/file cannot be used: {os.strerror(number)}\n"


def test_compile_only_exits_without_serving(tmp_path):
    write_tiny(tmp_path, "qwen3", 0)
    line = ["--model-path", str(tmp_path), "--compile-only", "--port", "0"]
    line += ["--max-running-requests", "1", "--context-length", "64", "--page-size", "16"]
    command = [sys.executable, "-m", "tests.support.serve_reference", *line]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "All programs are compiled" in ran.stderr
    assert "listening" not in ran.stderr.lower()


def test_compile_only_rejects_replicas(capsys):
    assert launch.launch(["--port", "0", "--replicas", "2", "--compile-only"], lambda: None) == 2
    assert "--compile-only is not supported with --replicas" in capsys.readouterr().err
