"""Tokenizer of a checkpoint, and incremental detokenization."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from shared.models.config_fields import Json
from shared.models.model_folder import ModelFolder
from shared.text.chat_template import Conversation
from shared.text.chat_templates import ChatTemplates
from shared.text.length_bound import max_characters
from shared.text.tokenizer_files import TokenizerFiles

REPLACEMENT = "\ufffd"  # decoded from incomplete or invalid bytes
MAX_HALF = 3  # most bytes of an incomplete 4-byte character
WINDOW = 16  # tokens decoded together, so that a character may spread over several
CONTEXT = 8  # tokens kept when the window is cut: enough to resynchronise UTF-8
SPACE_MARK = "\u2581"  # SentencePiece's space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_Utf8 = codecs.getincrementaldecoder("utf-8")


def is_text(value: Any) -> bool:
    """Returns whether a value is a valid string; JSON can also contain lone surrogates."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


class Tokenizer:
    """Tokenizer of a checkpoint (tokenizer.json) with its chat templates."""

    def __init__(
        self,
        tokenizer: FastTokenizer,
        templates: ChatTemplates | None,
        names: dict[str, str],
        marks: Collection[str] = (),
    ) -> None:
        """Args: `marks` are special tokens that are shown nevertheless; see
        `shared.text.delimiters`.
        """
        self._tokenizer = tokenizer
        self._templates = templates
        self._names = names
        self._added = tokenizer.get_added_tokens_decoder()
        self._special = {
            number
            for number, token in self._added.items()
            if token.special and token.content not in marks
        }
        decoder = tokenizer.decoder.__getstate__().decode() if tokenizer.decoder else ""
        self._is_byte_level = '"ByteLevel"' in decoder
        self._has_byte_tokens = '"ByteFallback"' in decoder
        self._space_mark = SPACE_MARK if SPACE_MARK in decoder else " "
        self._max_characters = max_characters(tokenizer)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        marks: Collection[str] = (),
        chat_template: str | None = None,
        call_format: str | None = None,
    ) -> Tokenizer | None:
        """Reads a checkpoint's tokenizer by the path of its folder; see `from_files`."""
        files = TokenizerFiles(ModelFolder(folder))
        return cls.from_files(files, marks, chat_template, call_format)

    @classmethod
    def from_files(
        cls,
        files: TokenizerFiles,
        marks: Collection[str] = (),
        chat_template: str | None = None,
        call_format: str | None = None,
    ) -> Tokenizer | None:
        """Reads a checkpoint's tokenizer; returns None if it has none.

        Args:
          files: Its files.
          marks: See the constructor.
          chat_template: Jinja file that replaces the folder's templates.
          call_format: See `ChatTemplate`.

        Raises:
          ValueError: A file is invalid; one sentence.
        """
        if (tokenizer := files.tokenizer) is None:
            return None
        names = _special_names(files.config)
        if chat_template is None:
            templates = ChatTemplates.from_folder(files.folder.path, files.config, names)
        else:
            templates = ChatTemplates.from_file(Path(chat_template), names)
        templates = templates and templates.with_call_format(call_format)
        return cls(tokenizer, templates, names, marks)

    @property
    def has_chat_template(self) -> bool:
        """Reports whether `encode_chat` is available."""
        return self._templates is not None and self._templates.has_default

    @property
    def templates(self) -> ChatTemplates | None:
        """Chat templates; None without any."""
        return self._templates

    @property
    def end_id(self) -> int | None:
        """Token that ends an output (`eos_token`); None if the tokenizer names none."""
        return self._id_of("eos_token")

    @property
    def pad_id(self) -> int | None:
        """Padding token (`pad_token`); None if the tokenizer names none."""
        return self._id_of("pad_token")

    def _id_of(self, name: str) -> int | None:
        content = self._names.get(name)
        return None if content is None else self._tokenizer.token_to_id(content)

    def can_fit(self, text: str, num_tokens: int) -> bool:
        """Returns False if a text is too long for this number of tokens, by its length alone."""
        most = self._max_characters
        return most is None or len(text) <= most * num_tokens

    def encode(self, text: str) -> list[int]:
        """Tokenizes a prompt, with the special tokens that the tokenizer adds."""
        return self._encode(text, with_special=True)

    def encode_more(self, text: str) -> list[int]:
        """Tokenizes a text without adding special tokens."""
        return self._encode(text, with_special=False)

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Renders and tokenizes a conversation; raises as `render_chat`."""
        return self.encode_more(self.render_chat(Conversation(messages)))

    def render_chat(self, conversation: Conversation) -> str:
        """Renders a conversation; see `ChatTemplates.render`."""
        assert self._templates is not None
        return self._templates.render(conversation)

    def _encode(self, text: str, with_special: bool) -> list[int]:
        # Encoding a single text holds the GIL to its end; encoding a batch, here of one, releases
        # it.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=with_special)
        return encoded.ids

    def decode(self, tokens: list[int]) -> str:
        """Decodes tokens without special ones; unknown ids have no text."""
        return self.decode_all([token for token in tokens if token not in self._special])

    def decode_all(self, tokens: list[int]) -> str:
        """Decodes tokens, special ones included."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def can_represent(self, text: str) -> bool:
        """Returns False if tokens change a text; SentencePiece reads U+2581 as a space."""
        return text in self.decode_all(self.encode_more(text))

    def shows(self, token: int) -> bool:
        """Returns whether responses show a token: it is known and not special, or a delimiter."""
        return token not in self._special and self._tokenizer.id_to_token(token) is not None

    def byte_of(self, token: int) -> bytes | None:
        """Returns the byte of a token like `<0xE4>`, and None for other tokens."""
        content = self._tokenizer.id_to_token(token) if self._has_byte_tokens else None
        match = _BYTE.fullmatch(content) if content else None
        return bytes.fromhex(match[1]) if match else None

    def bytes_of(self, token: int) -> bytes | None:
        """Returns the bytes of a token, of a special token its name; None for an unknown id."""
        content = self._tokenizer.id_to_token(token)
        if content is None:
            return None
        if token in self._added:
            return content.encode()
        if self._is_byte_level:
            return bytes(map(_BYTE_OF_LETTER.__getitem__, content))
        if (byte := self.byte_of(token)) is not None:
            return byte
        return content.replace(self._space_mark, " ").encode()


class Detokenizer:
    """Incremental detokenizer; its pieces never end within a character.

    A window of the newest tokens is decoded as a whole, and an incomplete character at its end is
    held back. When the window is cut, the held part is still in it, because UTF-8 resynchronises
    after a few bytes.

    Byte tokens (`Tokenizer.byte_of`) are not decoded in the window, because its decoder replaces
    every byte of a run until the last character of the run is complete. They are decoded here as
    UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        """Args: `prompt` decides whether the first word keeps its leading space."""
        self._tokenizer = tokenizer
        self._bytes = _Utf8("replace")
        shown = [token for token in prompt[-CONTEXT:] if tokenizer.shows(token)]
        words = [token for token in shown if tokenizer.byte_of(token) is None]
        self._window = words or shown[-1:]
        if words and tokenizer.decode(words).endswith(REPLACEMENT):
            self._window = []
        self._emitted = len(tokenizer.decode(self._window))

    def push(self, token: int) -> str:
        """Adds a token and returns the new complete text."""
        if not self._tokenizer.shows(token):
            return ""
        byte = self._tokenizer.byte_of(token)
        if byte is not None:
            return self._push_byte(token, byte)
        cut_short = self._bytes.decode(b"", final=True)
        return cut_short + self._push_word(token)

    def flush(self) -> str:
        """Returns the held text at the end of the output."""
        return self._rest_of_words() + self._bytes.decode(b"", final=True)

    def _push_byte(self, token: int, byte: bytes) -> str:
        if not self._window:  # the next word is not the first one, so it keeps its space
            self._window = [token]
            self._emitted = len(self._tokenizer.decode(self._window))
        return self._rest_of_words() + self._bytes.decode(byte)

    def _rest_of_words(self) -> str:
        text = self._tokenizer.decode(self._window)
        return self._give(text, len(text))

    def _push_word(self, token: int) -> str:
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        piece = self._give(text, len(text) - _num_held(text))
        if len(self._window) > WINDOW:
            held = len(text) - self._emitted
            self._window = self._window[-CONTEXT:]
            self._emitted = len(self._tokenizer.decode(self._window)) - held
        return piece

    def _give(self, text: str, end: int) -> str:
        piece = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return piece


def _letters() -> list[str]:
    """Returns the letter of each byte in byte-level tokenizers (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


_BYTE_OF_LETTER = {letter: byte for byte, letter in enumerate(_letters())}


def _num_held(text: str) -> int:
    tail = text[-MAX_HALF:]
    return len(tail) - len(tail.rstrip(REPLACEMENT))


def _special_names(config: Json) -> dict[str, str]:
    """Returns the special tokens that templates write by name (`bos_token`, `eos_token`, ...)."""
    names = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            names[name] = text
    return names
