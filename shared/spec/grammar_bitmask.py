"""Grammar bitmasks: the tokens that a structured output allows at each position.

Bit i of int32 w is token 32 w + i, so the mask of a vocabulary of 150k tokens takes 19 KB. Each
step has one mask of all ones in addition to those of its grammars, for rows without a grammar.
"""

import numpy as np
from jaxtyping import Bool, Int, Int32


def allowed(
    bits: Int32[np.ndarray, "Q words"], index: Int[np.ndarray, " R"], vocab: int
) -> Bool[np.ndarray, "R vocab"]:
    """Unpacks the tokens that each row may choose.

    Args:
      bits: The masks.
      index: Mask of each row.
      vocab: Vocabulary size; later bits are ignored.
    """
    places = np.arange(vocab)
    return (bits[index][:, places // 32] >> (places % 32).astype(np.int32)) & 1 != 0
