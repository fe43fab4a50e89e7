"""Comparison of the tokenizers of target and draft model."""

from shared.models.config import ModelConfig
from shared.models.file_kind import TOKENIZER_FILE
from shared.text.tokenizer_files import TokenizerFiles


def check_same_tokenizer(
    files: TokenizerFiles, model: ModelConfig, draft_files: TokenizerFiles, draft: ModelConfig
) -> None:
    """Checks that a draft model has the target's tokenizer.

    The vocabularies of the tokenizers must be equal; the models may pad them to different sizes. If
    neither folder has a tokenizer, the padded sizes must be equal.

    Args:
      files, model: Tokenizer and config of the target.
      draft_files, draft: Tokenizer and config of the draft model.

    Raises:
      ValueError: They differ; the message names the first difference.
    """
    ours, theirs = tokens_of(files), tokens_of(draft_files)
    if ours is None and theirs is None:
        if model.vocab == draft.vocab:
            return
        raise ValueError(
            f"the draft model's vocab_size ({draft.vocab}) is not the target's ({model.vocab}), "
            f"and neither folder has a {TOKENIZER_FILE} to compare; "
            "give a draft model with the target's tokenizer"
        )
    if ours is None or theirs is None:
        lacking = (files if ours is None else draft_files).folder.path
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


def tokens_of(files: TokenizerFiles) -> dict[str, int] | None:
    """Returns all tokens of a folder's tokenizer with their ids; None without a tokenizer.

    Raises:
      ValueError: A file is invalid.
    """
    tokenizer = files.tokenizer
    return None if tokenizer is None else tokenizer.get_vocab(with_added_tokens=True)


def _said(tokens: dict[str, int], token: str) -> str:
    return f"token {tokens[token]}" if token in tokens else "no token"
