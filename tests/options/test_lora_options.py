"""The option `--lora-paths`, as text, as several words and as a dict."""

from pathlib import Path

import pytest

from shared.offline.options import read_options
from shared.options.command_line import parse, words_of
from shared.options.flags import ConfigError, with_absolute_paths

BOTH = {"sql": "adapters/sql", "code": "adapters/code"}


@pytest.mark.parametrize(
    "words",
    [
        ["--lora-paths", "sql=adapters/sql", "code=adapters/code"],
        ["--lora-paths", "sql=adapters/sql,code=adapters/code", "--port", "0"],
        ["--lora-paths=sql=adapters/sql,code=adapters/code"],
        ["--lora-modules", "sql=adapters/sql", "code=adapters/code", "--port", "0"],
    ],
    ids=["words", "text", "assigned", "vLLM"],
)
def test_lora_paths_accepts_words_and_text(words: list[str]) -> None:
    options = parse(words)
    assert options.lora.folders == BOTH
    assert parse(words_of(options)).lora.folders == BOTH


def test_lora_paths_reads_config_file(tmp_path: Path) -> None:
    config = tmp_path / "flags.toml"
    config.write_text('lora-paths = ["sql=adapters/sql", "code=adapters/code"]\n')
    assert parse(["--config", str(config)]).lora.folders == BOTH


def test_lora_paths_become_absolute() -> None:
    found = with_absolute_paths(parse(["--lora-paths", "a=~/x", "b=y"]).lora).folders
    assert found == {"a": str(Path.home() / "x"), "b": str(Path.cwd() / "y")}


def test_python_lora_paths_accepts_dict() -> None:
    given = {"sql": Path("adapters/sql"), "code": "adapters/code"}
    assert read_options({"lora_paths": given}).lora.folders == BOTH
    with pytest.raises(ConfigError, match="lora_paths must be a dict of names and paths"):
        read_options({"lora_paths": {"sql": 3}})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("folder", "must list NAME=FOLDER, got 'folder'"),
        ("=folder", "must list NAME=FOLDER, got '=folder'"),
        ("a=", "must list NAME=FOLDER, got 'a'"),
        ("a=x,a=y", "has the name a twice"),
    ],
)
def test_invalid_lora_paths_raises(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["--lora-paths", value])


def test_lora_paths_without_value_raises() -> None:
    with pytest.raises(ConfigError, match="--lora-paths.* requires a value"):
        parse(["--lora-paths"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-loras-per-batch", "2"], "has no effect without adapters"),
        (["--max-lora-rank", "8"], "requires both --max-lora-rank and"),
        (["--lora-target-modules", "all"], "requires both --max-lora-rank and"),
        (["--lora-target-modules", "q_proj"], "must be one of all, got q_proj"),
    ],
)
def test_lora_options_without_adapters_raise(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(words)


def test_adapter_slots_default_to_number_of_adapters() -> None:
    names = [f"{i}=folder" for i in range(9)]
    found = [parse(["--lora-paths", *names[:count]]).lora.num_slots for count in (1, 8, 9)]
    assert found == [1, 8, 8]
    wide = parse(["--lora-paths", "a=x", "--lora-target-modules", "all"])
    assert wide.lora.num_slots == 8
