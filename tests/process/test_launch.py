"""A start as a whole."""

import signal

import pytest

from shared.process import launch
from tests.support.tiny_models import write_tiny


def test_an_interrupt_ends_a_start_at_once_as_a_term_does(monkeypatch):
    """From its first line to its last: neither a traceback nor a wait for a compiler."""
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
def test_launch_wrong_files_reported_before_framework(tmp_path, case, capsys):
    """The framework takes seconds to import, and ranks are processes: neither is begun."""

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
