"""Tokenizer files of a folder: tokenizer.json, and added tokens in other files."""

from __future__ import annotations

from functools import cached_property

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from shared.models.config_fields import Json
from shared.models.file_kind import TOKENIZER_FILE
from shared.models.model_folder import ModelFolder

CONFIG, ADDED_TOKENS = "tokenizer_config.json", "added_tokens.json"


class TokenizerFiles:
    """Tokenizer files of a model folder, each parsed when it is first needed, and once.

    Attributes:
      folder: The model folder.
    """

    def __init__(self, folder: ModelFolder) -> None:
        """Opens no file."""
        self.folder = folder

    @property
    def config(self) -> Json:
        """Contents of tokenizer_config.json; empty if the file is missing."""
        return self.folder.optional(CONFIG)

    @cached_property
    def tokenizer(self) -> FastTokenizer | None:
        """Tokenizer with all added tokens; None without tokenizer.json.

        Older libraries stored added tokens in added_tokens.json, later ones in the
        `added_tokens_decoder` of tokenizer_config.json. Tokens that tokenizer.json lacks are added.

        Raises:
          ValueError: A file is invalid, or two files disagree about an id; one sentence.
        """
        path = self.folder.path / TOKENIZER_FILE
        if not path.is_file():
            return None
        try:
            tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} cannot be read: {error}") from error
        # The file contains truncation and padding of training; prompts are tokenized whole.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        source, stated = self._added_tokens(self.config)
        _add(tokenizer, stated, f"{self.folder.path}: {source}")
        return tokenizer

    def _added_tokens(self, config: Json) -> tuple[str, dict[int, AddedToken]]:
        """Returns the file that states added tokens, and the tokens by id."""
        try:
            if stated := _of_config(config):
                return f"added_tokens_decoder of {CONFIG}", stated
            ids = self.folder.optional(ADDED_TOKENS)
            return ADDED_TOKENS, _of_file(ids, config) if ids else {}
        except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"the added tokens in {self.folder.path} cannot be read: {error!r:.200}"
            ) from error


def _of_config(config: Json) -> dict[int, AddedToken]:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {
        int(number): AddedToken(
            stated["content"], **{flag: stated[flag] for flag in flags if flag in stated}
        )
        for number, stated in config.get("added_tokens_decoder", {}).items()
    }


def _of_file(ids: Json, config: Json) -> dict[int, AddedToken]:
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
