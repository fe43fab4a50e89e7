"""Comparison of the tokenizers of target and draft model."""

from pathlib import Path

from shared.models.config import ModelConfig
from shared.text.tokenizer_files import open_tokenizer

TOKENIZER_FILE = "tokenizer.json"


def check_same_tokenizer(
    folder: str | Path, model: ModelConfig, draft_folder: str | Path, draft: ModelConfig
) -> None:
    """Checks that a draft model has the target's tokenizer.

    The vocabularies of the tokenizers must be equal; the models may pad them to different sizes. If
    neither folder has a tokenizer, the padded sizes must be equal.

    Raises:
      ValueError: They differ; the message names the first difference.
    """
    ours, theirs = tokens_of(folder), tokens_of(draft_folder)
    if ours is None and theirs is None:
        if model.vocab == draft.vocab:
            return
        raise ValueError(
            f"the draft model's vocab_size ({draft.vocab}) is not the target's ({model.vocab}), "
            f"and neither folder has a {TOKENIZER_FILE} to compare; "
            "give a draft model with the target's tokenizer"
        )
    if ours is None or theirs is None:
        lacking = folder if ours is None else draft_folder
        raise ValueError(
            f"{lacking} has no {TOKENIZER_FILE}, so the tokenizers of target and draft model "
            "cannot be compared; add the file"
        )
    different = [token for token in ours | theirs if ours.get(token) != theirs.get(token)]
    if different:
        token = different[0]
        raise ValueError(
            f"the draft model has another tokenizer than the target: {token!r} is "
            f"{_said(theirs, token)} there and {_said(ours, token)} in the target; "
            "give a draft model with the target's tokenizer"
        )


def tokens_of(folder: str | Path) -> dict[str, int] | None:
    """Returns all tokens of a folder's tokenizer with their ids; None without a tokenizer.

    Raises:
      ValueError: A file is invalid.
    """
    tokenizer = open_tokenizer(folder)
    return None if tokenizer is None else tokenizer.get_vocab(with_added_tokens=True)


def _said(tokens: dict[str, int], token: str) -> str:
    return f"token {tokens[token]}" if token in tokens else "no token"
