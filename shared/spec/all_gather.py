"""All-gather of tensor-parallel (TP) ranks: column shards are concatenated to whole rows.

TP ranks split every product by its outputs (column-parallel), so each computes columns of the rows
that one device would compute. The all-gather concatenates them. It adds nothing up, so rows have
the same bits as on one device. Sums of squares for norms are gathered in chunks that are whole on a
rank, see `shared.spec.reduction_order.chunks_of_squares`.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Shaped


def all_gather(shares: Sequence[Shaped[np.ndarray, "... share"]]) -> Shaped[np.ndarray, "... size"]:
    """Concatenates the shards of all ranks, in rank order."""
    return np.concatenate(shares, axis=-1)


def local_columns(
    rows: Shaped[np.ndarray, "... size"], rank: int, count: int
) -> Shaped[np.ndarray, "... share"]:
    """Returns the columns of one of `count` ranks."""
    return np.split(rows, count, axis=-1)[rank]


def own_keys(
    rows: Shaped[np.ndarray, "... size"], rank: int, count: int, num_copies: int
) -> Shaped[np.ndarray, "... share"]:
    """Same as `local_columns`, for KV heads that are replicated on `num_copies` consecutive
    ranks.
    """
    return local_columns(rows, rank // num_copies, count // num_copies)


def all_gather_kv_heads(
    shares: Sequence[Shaped[np.ndarray, "... share"]], num_copies: int
) -> Shaped[np.ndarray, "... size"]:
    """Same as `all_gather`, for KV heads that are replicated on `num_copies` consecutive ranks."""
    return all_gather(shares[::num_copies])
