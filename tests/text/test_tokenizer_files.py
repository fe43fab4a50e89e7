"""Added tokens in files next to tokenizer.json, equal to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from shared.drafts.tokenizer import tokens_of
from shared.models.model_folder import ModelFolder
from shared.text.grammar import Compiler
from shared.text.tokenizer import Tokenizer
from shared.text.tokenizer_files import TokenizerFiles
from tests.support.http_fixtures import byte_tokenizer, save_tokenizer

FIRST = byte_tokenizer().get_vocab_size(with_added_tokens=True)
TOOL, END = "<|mytool|>", "<|myend|>"
DECODER = {
    str(FIRST + 1): {"content": END, "special": True},
    str(FIRST): {"content": TOOL, "special": False, "normalized": False},
}
FILES: dict[str, dict[str, Any]] = {
    "added_tokens.json": {END: FIRST + 1, TOOL: FIRST},
    "tokenizer_config.json": {"added_tokens_decoder": DECODER},
}


def save(folder: Path, name: str, content: dict[str, Any]) -> None:
    save_tokenizer(folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    if name == "tokenizer_config.json":
        settings |= content
    else:
        (folder / name).write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("name", FILES)
def test_added_token_files_match_transformers(tmp_path: Path, name: str):
    save(tmp_path, name, FILES[name])
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    text = f"a{TOOL}b{END}"
    tokens = tokenizer.encode_more(text)
    assert tokens == [ord("a"), FIRST, ord("b"), FIRST + 1]
    assert tokens == AutoTokenizer.from_pretrained(tmp_path).encode(text)
    assert tokenizer.decode(tokens) == f"a{TOOL}b"  # the other added token is special
    assert tokenizer.end_id == FIRST + 1


@pytest.mark.parametrize("name", FILES)
def test_added_tokens_reach_grammars_and_drafters(tmp_path: Path, name: str):
    save(tmp_path, name, FILES[name])
    found = tokens_of(TokenizerFiles(ModelFolder(tmp_path)))
    assert found is not None
    assert (found[TOOL], found[END]) == (FIRST, FIRST + 1)
    compiler = Compiler.of_folder(tmp_path, FIRST + 2, ())
    matcher = compiler.compile(json.dumps({"grammars": [{"lark_grammar": f'start: "{TOOL}"'}]}))
    assert matcher.matcher().take(FIRST)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("added_tokens.json", {TOOL: FIRST + 1}, f"has '<|mytool|>' as token {FIRST + 1}"),
        ("added_tokens.json", {"<|user|>": 3}, "has '<|user|>' as token 3"),
        ("added_tokens.json", {TOOL: "x"}, "cannot be read"),
        ("added_tokens.json", {TOOL: float("inf")}, "cannot be read"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "cannot be read"),
    ],
)
def test_contradicting_token_files_raise(
    tmp_path: Path, name: str, content: dict[str, Any], reason: str
):
    save(tmp_path, name, content)
    with pytest.raises(ValueError) as refused:
        Tokenizer.from_folder(tmp_path)
    assert reason in str(refused.value)
