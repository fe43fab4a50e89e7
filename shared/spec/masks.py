"""The tokens that a grammar allows, as bits: what the host knows and a choice obeys.

Bit i of word w stands for token 32 w + i, so a mask of a vocabulary of 150k is 19 KB. A step has
one of all ones beside those of its grammars, so a row without a grammar chooses as ever.
"""

import numpy as np
from jaxtyping import Bool, Int, Int32


def allowed(
    bits: Int32[np.ndarray, "Q words"], index: Int[np.ndarray, " R"], vocab: int
) -> Bool[np.ndarray, "R vocab"]:
    """The tokens that each row may choose.

    Args:
      bits: The masks.
      index: The mask of each row.
      vocab: Tokens; bits past them mean nothing.
    """
    places = np.arange(vocab)
    return (bits[index][:, places // 32] >> (places % 32).astype(np.int32)) & 1 != 0
