"""Commit hook that requires a reason for changes of kernels and recorded results."""

import subprocess
from pathlib import Path

import pytest

HOOK = Path(__file__).parent.parent / ".ci" / "commit-message"
SUBJECT = "Read a page once\n"
BODY = "Each program read it for every head: 41 us before, 29 after.\n"


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Returns the hook's output for a message with a staged file, or None if the commit passes."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    def hook(file: str, message: str) -> str | None:
        path = tmp_path / file
        path.parent.mkdir(parents=True)
        path.write_text("1\n")
        subprocess.run(["git", "add", file], cwd=tmp_path, check=True)
        (tmp_path / "message").write_text(message)
        ran = subprocess.run([HOOK, "message"], cwd=tmp_path, capture_output=True, text=True)
        return ran.stderr if ran.returncode else None

    return hook


@pytest.mark.parametrize(
    "file", ["kernels/triton_gpu/attention/attention_layer.py", "bench/results/op_mix.json"]
)
@pytest.mark.parametrize(
    "rest",
    [
        "",
        "\n# A comment of git's\n",
        "\nSigned-off-by: A <a@b.c>\nCo-authored-by: B <b@b.c>\n",
        "\n# ------------------------ >8 ------------------------\ndiff --git a/x b/x\n+1\n",
    ],
    ids=["subject", "comment", "names", "diff"],
)
def test_commit_hook_requires_body_for_kernels_and_results(told, file, rest):
    said = told(file, SUBJECT + rest)
    assert said is not None
    assert said.startswith(f"{file} changes: the commit message needs a body")


@pytest.mark.parametrize(
    "file", ["kernels/triton_gpu/attention/attention_layer.py", "bench/results/op_mix.json"]
)
def test_commit_hook_accepts_kernels_and_results_with_body(told, file):
    assert told(file, f"{SUBJECT}\n{BODY}\nSigned-off-by: A <a@b.c>\n") is None


@pytest.mark.parametrize(
    "file", ["shared/spec/attention_layer.py", "docs/kernels/mix.md", "bench/op.py"]
)
def test_commit_hook_accepts_other_changes_without_body(told, file):
    assert told(file, SUBJECT) is None
