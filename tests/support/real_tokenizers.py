"""Tokenizers of real models, which `make tokenizers` downloads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer

from shared.text.grammar import Compiler
from shared.text.tokenizer import Detokenizer, Tokenizer
from tests.support.counting import NO_TOKENIZER
from tests.support.special_token_tokenizer import MARKS

FOLDER = Path(__file__).resolve().parents[2] / ".tokenizers"
NAMES = ("qwen3", "llama2", "llama3_1", "deepseek_v3", "gemma3")


@dataclass(frozen=True)
class RealTokenizer:
    """Tokenizer with the server's data about it and the special tags of all parsers."""

    folder: Path

    @classmethod
    def called(cls, name: str) -> RealTokenizer:
        """One of `NAMES`; skips the test where it is not there."""
        if not (FOLDER / name / "tokenizer.json").is_file():
            pytest.skip(f"{NO_TOKENIZER}: {name}")
        return cls(FOLDER / name)

    @cached_property
    def fast(self) -> FastTokenizer:
        return FastTokenizer.from_file(str(self.folder / "tokenizer.json"))

    @cached_property
    def shown(self) -> Tokenizer:
        found = Tokenizer.from_folder(self.folder, MARKS)
        assert found is not None
        return found

    @property
    def vocab(self) -> int:
        """Tokens of a model, which has a few more than its tokenizer."""
        return -(-self.fast.get_vocab_size() // 128) * 128

    @property
    def end(self) -> int:
        assert self.shown.end_id is not None
        return self.shown.end_id

    @cached_property
    def compiler(self) -> Compiler:
        return Compiler.of_folder(self.folder, self.vocab, MARKS)

    @cached_property
    def named(self) -> dict[bytes, list[int]]:
        """Shown tokens, in the form that `walk` takes."""
        found: dict[bytes, list[int]] = {}
        for token in filter(self.shown.shows, range(self.fast.get_vocab_size())):
            found.setdefault(self.shown.bytes_of(token) or b"", []).append(token)
        return found

    def text_of(self, tokens: list[int]) -> str:
        """The text that a server decodes from tokens after a prompt."""
        pieces = Detokenizer(self.shown, self.named[b"a"][:1])
        return "".join([*map(pieces.push, tokens), pieces.flush()])
