"""Reduced draft vocabulary chosen at startup (FR-Spec): the hot tokens that a drafter may propose.

A drafter that shares its target's `lm_head` reads all of it for every draft token, which dominates
its memory traffic for a large vocabulary. Few tokens make up most of the output, so their LM-head
rows are gathered once, and draft tokens are scored with these rows only. Other tokens are never
proposed, only sampled by the target, so the output does not change.

Source: FR-Spec, Zhao et al. 2025, arXiv:2502.14856.
"""

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Int, Int32


def read_token_map(path: str, vocab: int) -> tuple[int, ...]:
    """Reads the token ids in a file, in ascending order: of equal scores the lower id is proposed
    first.

    Args:
      path: File with a JSON list of target token ids, in any order.
      vocab: Vocabulary size of the target.

    Raises:
      ValueError: The file is missing or not such a list, an id exceeds the vocabulary, or an id
        occurs twice.
    """
    named = f"--speculative-token-map {path}"
    if path.endswith((".pt", ".pth", ".bin")):
        raise ValueError(
            f"{named} is a pickle, which is not loaded because it can run code; write its ids as a "
            "JSON list"
        )
    try:
        with open(path, encoding="utf-8") as file:
            ids = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{named} cannot be read: {error}") from error
    if not isinstance(ids, list) or not ids or not all(type(each) is int for each in ids):
        raise ValueError(f"{named} must be a JSON list of token ids with at least one")
    if (beyond := next((each for each in ids if not 0 <= each < vocab), None)) is not None:
        raise ValueError(
            f"{named} contains token {beyond}, but the target has tokens 0 to {vocab - 1}; use a "
            "file that was made for this model"
        )
    ascending = sorted(ids)
    twice = [a for a, b in pairwise(ascending) if a == b]
    if twice:
        raise ValueError(f"{named} contains token {twice[0]} twice; list each token once")
    return tuple(ascending)


def most_frequent(
    counts: Int[np.ndarray, " vocab"], size: int, kept: Sequence[int] = ()
) -> Int32[np.ndarray, " size"]:
    """Returns the most frequent tokens, in ascending order; ties go to the lower id.

    Args:
      counts: Frequency of each token.
      size: Number of tokens to return.
      kept: Tokens that are always included.

    Raises:
      ValueError: `size` exceeds the vocabulary, or is smaller than the number of `kept` tokens.
    """
    if not max(1, len({*kept})) <= size <= len(counts):
        raise ValueError(
            f"a draft vocabulary must have {max(1, len({*kept}))} to {len(counts)} tokens, "
            f"got {size}"
        )
    often = np.array(counts, np.int64)
    often[[*kept]] = often.max() + 1
    return np.sort(np.argsort(-often, kind="stable")[:size]).astype(np.int32)
