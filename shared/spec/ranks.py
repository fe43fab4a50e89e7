"""What ranks give each other: shares of columns become whole rows.

Ranks that run one model cut every product by its outputs, so what each computes are columns of the
rows that one device would compute. A gather puts them side by side. It adds nothing up, hence rows
have the bits that they would have on one device. Sums of squares, which norms need, are gathered by
chunks that lie whole on a rank, see `shared.spec.numerics.chunks_of_squares`.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Shaped


def gathered(shares: Sequence[Shaped[np.ndarray, "... share"]]) -> Shaped[np.ndarray, "... size"]:
    """The whole rows, of which each rank has as many columns, in the order of the ranks."""
    return np.concatenate(shares, axis=-1)


def own(
    rows: Shaped[np.ndarray, "... size"], rank: int, count: int
) -> Shaped[np.ndarray, "... share"]:
    """The columns of one of `count` ranks."""
    return np.split(rows, count, axis=-1)[rank]


def own_keys(
    rows: Shaped[np.ndarray, "... size"], rank: int, count: int, num_copies: int
) -> Shaped[np.ndarray, "... share"]:
    """As `own`, of heads of which each stands on `num_copies` ranks in a row."""
    return own(rows, rank // num_copies, count // num_copies)


def gathered_keys(
    shares: Sequence[Shaped[np.ndarray, "... share"]], num_copies: int
) -> Shaped[np.ndarray, "... size"]:
    """As `gathered`, of heads of which each stands on `num_copies` ranks in a row."""
    return gathered(shares[::num_copies])
