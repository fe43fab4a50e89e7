"""Flags from files: `--config FILE` with typed values, `@FILE` with words."""

import json
import sys
from pathlib import Path

import pytest

from shared.options.command_line import parse
from shared.options.flags import ConfigError

TOML = """
# as docs/server_flags.md shows it
model_path = "there"
page-size = 32
mem_fraction_static = 1
speculative-algo = "NGRAM"
allow_unauthenticated = true
disable_radix_cache = false
allowed_origins = ["https://a.example", "https://b.example"]
speculative_simulate_accept_length = 2.5
"""
JSON = json.dumps(
    {
        "model_path": "there",
        "page-size": 32,
        "mem_fraction_static": 1,
        "speculative-algo": "NGRAM",
        "allow_unauthenticated": True,
        "disable_radix_cache": False,
        "allowed_origins": ["https://a.example", "https://b.example"],
        "speculative_simulate_accept_length": 2.5,
    }
)
YAML = """
model_path: there
page-size: 32
mem_fraction_static: 1
speculative-algo: NGRAM
allow_unauthenticated: true
disable_radix_cache: false
allowed_origins: ["https://a.example", "https://b.example"]
speculative_simulate_accept_length: 2.5
"""
WORDS = (
    "--model-path there --page-size 32 --mem-fraction-static 1 --speculative-algo NGRAM "
    "--allow-unauthenticated --allowed-origins https://a.example,https://b.example "
    "--speculative-simulate-accept-length=2.5"
)


def config(folder: Path, name: str, text: str) -> list[str]:
    (folder / name).write_text(text)
    return ["--config", str(folder / name)]


@pytest.mark.parametrize(("ending", "text"), [("toml", TOML), ("json", JSON), ("yaml", YAML)])
def test_config_file_equals_command_line(tmp_path, ending, text):
    assert parse(config(tmp_path, f"flags.{ending}", text)) == parse(WORDS.split())


def test_command_line_overrides_config_file(tmp_path):
    line = config(tmp_path, "flags.toml", TOML)
    for both in ([*line, "--page-size", "16"], ["--page-size", "16", *line]):
        options = parse(both)
        assert (options.engine.page_size, options.model.model_path) == (16, "there")


WRONG = {
    ("a.toml", "page_size = "): "a.toml cannot be read: Invalid value",
    (
        "a.toml",
        "page_sise = 16",
    ): "unknown flag --page-sise; did you mean",
    ("a.toml", "page_size = 16\npage-size = 16"): "--page-size is given twice",
    ("a.toml", "tp = 1\ntp-size = 1"): "--tp-size is given twice",
    ("a.toml", "[engine]\npage_size = 16"): "engine is a table, and flags must not be nested",
    ("a.json", '{"engine": {"page_size": 16}}'): "engine is a table, and flags must not be nested",
    ("a.yaml", "engine:\n  page_size: 16"): "engine is a table, and flags must not be nested",
    ("a.json", '{"port": 1, "port": 2}'): "--port is given twice",
    ("a.yaml", "port: 1\nport: 2"): "--port is given twice",
    ("a.json", '{"port": "1"}'): '--port must be an integer, got "1"',
    ("a.json", '{"port": true}'): "--port must be an integer, got true",
    ("a.json", '{"port": 1.0}'): "--port must be an integer, got 1.0",
    ("a.json", '{"port": null}'): "--port must be an integer, got null",
    ("a.json", '{"port": 65536}'): "--port must be 0 to 65535, got 65536",
    ("a.json", '{"mem_fraction_static": "1"}'): '--mem-fraction-static must be a number, got "1"',
    (
        "a.json",
        '{"mem_fraction_static": NaN}',
    ): "--mem-fraction-static must be 0.01 to 1.0, got nan",
    (
        "a.json",
        '{"allow_unauthenticated": "yes"}',
    ): '--allow-unauthenticated must be true or false, got "yes"',
    (
        "a.json",
        '{"allow_unauthenticated": 1}',
    ): "--allow-unauthenticated must be true or false, got 1",
    ("a.yaml", "api_key: 0123"): "--api-key must be a string, got 83",
    ("a.json", '{"api_key": ["a"]}'): '--api-key must be a string, got ["a"]',
    ("a.json", '{"api_key": ""}'): "--api-key is empty",
    (
        "a.json",
        '{"dtype": "float16"}',
    ): "--dtype must be one of auto, float32, bfloat16, got float16",
    (
        "a.json",
        '{"allowed_hosts": [["a"]]}',
    ): "--allowed-hosts must be a string, or a list of strings",
    ("a.json", '{"pp_size": 2}'): "--pp-size is not supported: ",
    ("a.json", '{"config": "b.json"}'): "--config must be given on the command line",
    ("a.json", '{"help": true}'): "unknown flag --help",
    ("a.json", "[]"): "it must be an object",
    ("a.json", "[" * 100_000): "a.json cannot be read: ",
    ("a.yaml", "- port"): "it must be a mapping",
    ("a.yaml", "port: !!python/name:os.system"): "could not determine a constructor",
    ("a.ini", "port=1"): "must end in .toml, .json, .yaml or .yml",
}


@pytest.mark.parametrize(("name", "text"), WRONG)
def test_config_file_rejects_invalid_content(tmp_path, name, text):
    with pytest.raises(ConfigError) as wrong:
        parse(config(tmp_path, name, text))
    sentence = str(wrong.value)
    assert sentence.startswith(f"--config {tmp_path / name}")
    assert WRONG[name, text] in sentence
    assert "\n" not in sentence


def test_config_file_accepts_neutral_flags(tmp_path):
    text = '{"enable_metrics": true, "kv-cache-dtype": "auto", "pp_size": 1, "port": 1}'
    assert parse(config(tmp_path, "a.json", text)) == parse(["--port", "1"])
    with pytest.raises(ConfigError, match="unknown flag --enable-metrics"):
        parse(config(tmp_path, "a.json", '{"enable_metrics": false}'))


def test_empty_config_file_equals_no_flags(tmp_path):
    for name, text in (("a.toml", "# nothing"), ("a.json", "{}"), ("a.yaml", "")):
        assert parse(config(tmp_path, name, text)) == parse([])


def test_unreadable_flag_file_raises(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    reasons = {
        str(tmp_path / "a.toml"): "it is not UTF-8 text",
        str(tmp_path / "absent.toml"): "No such file or directory",
    }
    for path, reason in reasons.items():
        with pytest.raises(ConfigError, match=f"^--config .*{reason}$"):
            parse(["--config", path])
        with pytest.raises(ConfigError, match=f"^@.*{reason}"):
            parse([f"@{path}"])


def test_yaml_config_without_pyyaml_raises(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(
        ConfigError, match="requires PyYAML for YAML files; install pyyaml, or give a"
    ):
        parse(config(tmp_path, "a.yaml", YAML))


def test_words_file_equals_its_words(tmp_path):
    path = tmp_path / "words"
    lines = WORDS.replace(" --", "  # why\n--")
    path.write_text(f"# a comment\n{lines}\n--served-model-name 'a b'")
    both = parse(["--port", "1", f"@{path}", "--admin-port=2"])
    assert both == parse([*WORDS.split(), "--served-model-name=a b", "--port=1", "--admin-port=2"])
    assert parse(["--api-key=@x"]).server.api_key == "@x"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--port '1", "@{path} cannot be read: No closing quotation"),
        ("@other", "@{path} must not name another file, @other; give it on the command line"),
        ("--port 1 --port 2", "--port is given twice; remove one"),
        ("--pagesize 16", "unknown flag --pagesize; did you mean --page-size?"),
    ],
)
def test_words_file_rejects_invalid_content(tmp_path, text, sentence):
    path = tmp_path / "words"
    path.write_text(text)
    with pytest.raises(ConfigError) as wrong:
        parse([f"@{path}"])
    assert str(wrong.value) == sentence.format(path=path)
