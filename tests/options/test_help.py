"""`--help`, `--version` and `--print-completion`."""

import re
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version

import pytest

from shared import VERSION
from shared.options.algorithms import KNOWN_ALGORITHMS
from shared.options.command_line import FLAGS, SHOWN, parse
from shared.options.flag_parser import SHELLS
from shared.options.flags import ConfigError
from shared.options.options import HEADINGS, PARTS
from shared.revision import revision


def printed(capsys, *line: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse([*line])
    assert ended.value.code in (None, 0)
    return capsys.readouterr().out


@pytest.fixture
def help_page(capsys, monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    return printed(capsys, "--help")


def test_help_lists_headings_flags_choices_and_defaults(help_page):
    lines = help_page.splitlines()
    assert [f"{heading}:" in lines for heading in HEADINGS.values()] == [True] * len(PARTS)
    long = [line for line in lines if len(line) > 100]
    assert all(re.fullmatch(r" +--tool-call-parser {[\w,]+}", line) for line in long), long
    text = " ".join(help_page.split())
    for part in PARTS.values():
        for item in fields(part):
            assert f"--{item.name.replace('_', '-')}" in text
            for choice in item.metadata.get("choices", ()):
                assert choice in text
            if item.default not in (None, False) and "default" not in item.metadata["help"]:
                assert f"(default: {item.default})" in text
    parsers = ",".join(FLAGS["--tool-call-parser"].metadata["choices"])
    assert f"{{{parsers}}}" in text
    assert "hermes" in parsers


def test_help_begins_with_usage_ends_with_examples(help_page):
    usage, _, rest = help_page.partition("\n\n")
    assert usage.startswith("usage: ")
    assert len(usage.splitlines()) <= 2
    tail = rest.partition("examples:\n")[2]
    examples = [line for line in tail.partition("\n\n")[0].splitlines() if line.strip()]
    assert len(examples) == 2
    assert "docs/server_flags.md" in tail
    for example in examples:
        words = [word for word in example.split() if word.startswith("--")]
        assert {*words} - {"--config"} <= FLAGS.keys()


def test_version_lists_server_and_backend_versions(capsys):
    line = printed(capsys, "--version")
    commit = revision()
    server = f"tandem {VERSION} ({commit})" if commit else f"tandem {VERSION}"
    assert line.startswith(f"{server}, Python 3.")
    assert f"torch {version('torch')}" in line
    assert f"jax {version('jax')}" in line


def completed(script: str, *words: str) -> list[str]:
    """Returns the completions that bash offers for the last word."""
    code = f"""{script}
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_tandem; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    command = ["bash", "-c", code, "bash", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return ran.stdout.split()


def test_bash_completes_flags_and_choices(capsys):
    pytest.importorskip("shtab")
    script = printed(capsys, "--print-completion", "bash")
    assert completed(script, "tandem", "serve", "--page") == ["--page-size"]
    assert completed(script, "tandem", "serve", "--backend", "") == ["torch", "jax"]
    assert "hermes" in completed(script, "tandem", "serve", "--tool-call-parser", "h")
    named = completed(
        script, "tandem", "serve", "--allow-unauthenticated", "--speculative-algorithm", ""
    )
    assert {*KNOWN_ALGORITHMS} <= {*named}
    assert {*completed(script, "tandem", "serve", "--")} >= SHOWN


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_script_has_all_flags(capsys, shell):
    pytest.importorskip("shtab")
    script = printed(capsys, "--print-completion", shell)
    assert all(name.removeprefix("--") in script for name in SHOWN)


def test_completion_without_shtab_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(ConfigError, match="requires shtab; install the extra completion"):
        parse(["--print-completion", "bash"])
    with pytest.raises(ConfigError, match="must be one of bash, zsh, tcsh, got fish"):
        parse(["--print-completion", "fish"])
