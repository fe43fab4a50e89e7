"""A draft vocabulary chosen at the start: the tokens of the target that a drafter may draft.

A drafter that shares its target's `lm_head` reads all of it for every draft, which for a large
vocabulary is most of what it reads. Texts use few tokens often, so the rows of those are gathered
once, and drafts are scored by them alone. A token that is left out is never drafted, only chosen by
the target, so the text stays what it is.

Source: FR-Spec, Zhao et al. 2025, arXiv:2502.14856.
"""

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Int, Int32


def read_token_map(path: str, vocab: int) -> tuple[int, ...]:
    """The tokens that a file names, ascending: of equal scores the lower id is drafted first.

    Args:
      path: A JSON list of ids of the target's tokens, in any order.
      vocab: Tokens of the target.

    Raises:
      ValueError: The file is missing or no such list, an id is beyond the vocabulary, or one
        stands twice; one sentence.
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
            f"{named} names the token {beyond}, and the target has the tokens 0 to {vocab - 1}; "
            "use a file that was made for this model"
        )
    ascending = sorted(ids)
    twice = [a for a, b in pairwise(ascending) if a == b]
    if twice:
        raise ValueError(f"{named} names the token {twice[0]} twice; name each once")
    return tuple(ascending)


def most_frequent(
    counts: Int[np.ndarray, " vocab"], size: int, kept: Sequence[int] = ()
) -> Int32[np.ndarray, " size"]:
    """The tokens that stand most often, ascending; of equals the lower id.

    Args:
      counts: How often each stands.
      size: How many are asked for.
      kept: Tokens that are among them however often they stand.

    Raises:
      ValueError: There are no so many tokens, or more that are kept.
    """
    if not max(1, len({*kept})) <= size <= len(counts):
        raise ValueError(
            f"a draft vocabulary must have {max(1, len({*kept}))} to {len(counts)} tokens, "
            f"got {size}"
        )
    often = np.array(counts, np.int64)
    often[[*kept]] = often.max() + 1
    return np.sort(np.argsort(-often, kind="stable")[:size]).astype(np.int32)
