"""Default options: chosen by the files of the model, overridden by explicit flags."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from models.make_random import chat_template
from shared.models.model_folder import ModelFolder
from shared.models.sentence_list import sentence_list
from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.options.options import Options
from shared.options.server import TOOL_CALL_PARSERS
from shared.process.defaults import with_grammars, with_parsers
from shared.process.grammars import GrammarQueue
from shared.text.call_formats.registry import FORMATS
from shared.text.tokenizer import SPACE_MARK, Tokenizer
from shared.text.tokenizer_files import TokenizerFiles
from tests.support.family_templates import TEMPLATES
from tests.support.http_fixtures import save_tokenizer

VOCAB = 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    return tmp_path


def chosen(*flags: str) -> Options:
    options = parse(list(flags))
    return with_parsers(options, tokenizer_of(options))


def tokenizer_of(options: Options) -> TokenizerFiles:
    return TokenizerFiles(ModelFolder(options.model.model_path))


def grammars_of(options: Options) -> tuple[Options, GrammarQueue | None]:
    return with_grammars(options, VOCAB, tokenizer_of(options))


def parsers_of(options: Options) -> tuple[str | None, str | None]:
    return options.server.tool_call_parser, options.server.reasoning_parser


def test_demo_model_defaults_enable_tools_and_structured_output():
    options, grammars = grammars_of(chosen())
    assert parsers_of(options) == ("hermes", None)
    assert grammars is not None
    assert options.engine.has_grammars
    (reason,) = options.reasons
    assert reason == (
        "--tool-call-parser hermes: the chat template writes calls as JSON in <tool_call>"
    )


def test_explicit_parsers_override_defaults(folder: Path):
    (folder / "chat_template.jinja").write_text(TEMPLATES["qwen3"])
    model = ("--model-path", str(folder))
    assert parsers_of(chosen(*model)) == ("hermes", "qwen3")
    given = chosen(*model, "--tool-call-parser=llama3", "--reasoning-parser=deepseek-r1")
    assert parsers_of(given) == ("llama3", "deepseek-r1")
    off = chosen(*model, "--tool-call-parser=none", "--reasoning-parser=none")
    assert parsers_of(off) == (None, None)
    assert given.reasons == off.reasons == ()


def test_unknown_tool_call_template_reported_with_flag(folder: Path):
    (folder / "chat_template.jinja").write_text(TEMPLATES["mistral"])
    options = chosen("--model-path", str(folder))
    assert parsers_of(options) == (None, None)
    (reason,) = options.reasons
    assert reason == (
        "--tool-call-parser none: the chat template writes calls in a form that no parser reads; "
        f"give --tool-call-parser ({sentence_list(TOOL_CALL_PARSERS)}) to choose one"
    )


def test_ambiguous_tool_call_template_is_startup_error(folder: Path):
    """Each parser would read a part of the model's calls and return the other part as text."""
    call = "call.function.name + '><parameter=probe_key>probe value</parameter></function>' }}"
    both = TEMPLATES["qwen3"].replace(
        "</tool_call>' }}", "</tool_call>' }}{{- '<function=' + " + call
    )
    (folder / "chat_template.jinja").write_text(both)
    with pytest.raises(ConfigError) as raised:
        chosen("--model-path", str(folder))
    assert str(raised.value) == (
        "--tool-call-parser auto is ambiguous: the chat template writes calls that several parsers "
        "read; give --tool-call-parser hermes or qwen3_coder"
    )
    given = chosen("--model-path", str(folder), "--tool-call-parser", "hermes")
    assert parsers_of(given)[0] == "hermes"


@pytest.mark.parametrize(
    ("calls", "reasoning"), [("harmony", "none"), ("harmony", "qwen3"), ("hermes", "harmony")]
)
def test_channels_require_both_parsers(folder: Path, calls: str, reasoning: str):
    flags = f"--tool-call-parser={calls}", f"--reasoning-parser={reasoning}"
    options = parse(["--model-path", str(folder), flags[0], flags[1]])
    with pytest.raises(ConfigError, match="give harmony to both, or to neither"):
        with_parsers(options, tokenizer_of(options))


def test_parser_rejects_tokenizer_that_changes_tags(folder: Path):
    """SentencePiece reads U+2581 in DeepSeek's tags as a space."""
    tokenizer = FastTokenizer(models.Unigram([("<unk>", 0.0)], unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer.add_tokens(sorted({*"".join(FORMATS["deepseek_v3"].marks)} - {SPACE_MARK}))
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match="deepseek_v3 requires a tokenizer that represents <｜"):
        chosen("--model-path", str(folder), "--tool-call-parser", "deepseek_v3")


def test_folder_without_tokenizer_disables_parsers_and_grammars(tmp_path: Path):
    options, grammars = grammars_of(chosen("--model-path", str(tmp_path)))
    assert parsers_of(options) == (None, None)
    assert grammars is None
    assert not options.engine.has_grammars
    (reason,) = options.reasons
    assert reason.startswith("--grammar-backend none: ")
    assert f"{tmp_path / 'tokenizer.json'} does not exist" in reason
    with pytest.raises(ValueError, match="does not exist"):
        grammars_of(chosen("--model-path", str(tmp_path), "--grammar-backend=llguidance"))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            "--speculative-accept-rule rejection",
            "--speculative-accept-rule rejection does not support grammars",
        ),
        ("--speculative-simulate-accept-length 2", "ignores grammars"),
    ],
)
def test_conflicting_flags_disable_grammars(flags: str, reason: str):
    options = chosen("--speculative-algorithm", "NEXTN", *flags.split())
    resolved, grammars = grammars_of(options)
    assert grammars is None
    assert not resolved.engine.has_grammars
    assert reason in resolved.reasons[-1]


def test_missing_llguidance_disables_grammars(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str):
        if name == "shared.text.grammar":
            raise ModuleNotFoundError("No module named 'llguidance'", name="llguidance")
        return import_module(name)

    monkeypatch.setattr("shared.process.grammars.import_module", missing)
    resolved, grammars = grammars_of(chosen())
    assert grammars is None
    assert "requires the package llguidance" in resolved.reasons[-1]
    with pytest.raises(ValueError, match="structured output requires the package llguidance"):
        grammars_of(chosen("--grammar-backend=llguidance"))


def test_chat_template_file_replaces_folder_template(folder: Path, tmp_path: Path):
    path = tmp_path / "mine.jinja"
    path.write_text("mine {{ messages[0].content }}" + chat_template(has_images=False))
    options = chosen("--model-path", str(folder), "--chat-template", str(path))
    assert parsers_of(options) == ("hermes", None)
    tokenizer = Tokenizer.from_folder(folder, chat_template=str(path))
    assert tokenizer is not None
    tokens = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode_all(tokens).startswith("mine hi")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--chat-template .*mine.jinja cannot be read: No such file or directory; give the"),
        (b"{% for %}", "--chat-template .*mine.jinja is not a valid Jinja template: default: "),
        (b"\xff\xfe\x00", "--chat-template .*mine.jinja is not a valid Jinja template: 'utf-8'"),
    ],
)
def test_unusable_chat_template_file_raises(
    folder: Path, tmp_path: Path, content: bytes | None, message: str
):
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        chosen("--model-path", str(folder), "--chat-template", str(path))


def test_chat_template_without_tokenizer_raises(tmp_path: Path):
    (tmp_path / "mine.jinja").write_text("x")
    flags = ["--model-path", str(tmp_path), "--chat-template", str(tmp_path / "mine.jinja")]
    with pytest.raises(ValueError, match="requires tokenizer.json in the model folder"):
        chosen(*flags)
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        chosen("--chat-template", str(tmp_path))
