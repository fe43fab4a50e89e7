"""Token bitmasks of grammars in a plan."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32


@dataclass(frozen=True)
class GrammarBitmask:
    """Token bitmasks of grammars, as in `spec.masks`: node (b, n) uses mask `index[b, n]`.

    Mask 0 allows every token. There is one more mask for each verify row.
    """

    bits: Int32[np.ndarray, "Q words"]
    index: Int32[np.ndarray, "B N"]


def mask_words(vocab: int) -> int:
    """Returns the int32 elements in the token bitmask of one node, one bit per token."""
    return -(-vocab // 32)
