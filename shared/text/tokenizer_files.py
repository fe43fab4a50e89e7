"""Tokenizer files of a folder: tokenizer.json, and added tokens in other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from shared.models.config_fields import read_json


def open_tokenizer(folder: str | Path) -> FastTokenizer | None:
    """Opens a folder's tokenizer with all added tokens; returns None without tokenizer.json.

    Older libraries stored added tokens in added_tokens.json, later ones in the
    `added_tokens_decoder` of tokenizer_config.json. Tokens that tokenizer.json lacks are added.

    Raises:
      ValueError: A file is invalid, or two files disagree about an id; one sentence.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = FastTokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} cannot be read: {error}") from error
    # The file contains truncation and padding of training; prompts are tokenized whole.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_config(folder)
    source = "added_tokens_decoder of tokenizer_config.json"
    try:
        stated = _of_config(config)
        if not stated and (beside := folder / "added_tokens.json").is_file():
            source, stated = beside.name, _of_file(read_json(beside), config)
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"the added tokens in {folder} cannot be read: {error!r:.200}") from error
    _add(tokenizer, stated, f"{folder}: {source}")
    return tokenizer


def read_config(folder: Path) -> dict[str, Any]:
    """Reads tokenizer_config.json; returns no settings if the file is missing."""
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def _of_config(config: dict[str, Any]) -> dict[int, AddedToken]:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {
        int(number): AddedToken(
            stated["content"], **{flag: stated[flag] for flag in flags if flag in stated}
        )
        for number, stated in config.get("added_tokens_decoder", {}).items()
    }


def _of_file(ids: dict[str, Any], config: dict[str, Any]) -> dict[int, AddedToken]:
    """Returns the tokens of added_tokens.json; tokens that the settings name are special."""
    named = [value for name, value in config.items() if name.endswith("_token")]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        named += config.get(name) or []
    special = {each.get("content") if isinstance(each, dict) else each for each in named}
    return {
        int(number): AddedToken(token, normalized=token not in special, special=token in special)
        for token, number in ids.items()
    }


def _add(tokenizer: FastTokenizer, stated: dict[int, AddedToken], source: str) -> None:
    """Adds missing tokens in order of their ids, so that each gets its own id."""
    for number, token in sorted(stated.items()):
        if tokenizer.token_to_id(token.content) is None:
            tokenizer.add_tokens([token])
        known_id = tokenizer.token_to_id(token.content)
        if known_id != number:
            raise ValueError(
                f"{source} has {token.content!r} as token {number}, and with tokenizer.json it "
                f"is {known_id}; correct one of the files"
            )
