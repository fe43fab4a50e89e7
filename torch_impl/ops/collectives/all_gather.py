"""As `shared.spec.all_gather`, in torch: a rank is a process, or a thread in tests, and gives its
share.

On a CPU shares go through mailboxes in memory that ranks have in common, between hosts through
torch.distributed, which has been measured nowhere yet, and between GPUs of one host by kernels that
write in each other's memory. One rank alone gathers nothing.
"""

import torch
import torch.distributed as distributed
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from shared.boundary.shm_allgather import RankMissingError
from shared.boundary.tp_group import Ranks
from shared.spec.reduction_order import SQUARES


def gathered(ranks: Ranks, values: Shaped[Tensor, "... share"]) -> Shaped[Tensor, "... size"]:
    """The whole rows; all ranks call it in the same order.

    Raises:
      RankMissingError: See `shared.boundary.shm_allgather.Mailboxes.exchange`; between hosts too.
    """
    if ranks.is_alone:
        return values
    if ranks.on_device is not None:
        return ranks.on_device.gathered(values)
    return _joined(_shares(ranks, values))


def gathered_rows(
    ranks: Ranks, values: Float[Tensor, "R share"], rows: Int[Tensor, " R_and_1"]
) -> Float[Tensor, "R size"]:
    """As `gathered`, of the rows that are listed; others are undefined."""
    if ranks.on_device is not None:
        return ranks.on_device.gathered_rows(values, rows)
    return gathered(ranks, values)


def own(ranks: Ranks, rows: Shaped[Tensor, "... size"]) -> Shaped[Tensor, "... share"]:
    return rows if ranks.is_alone else rows.chunk(ranks.count, dim=-1)[ranks.rank]


def own_keys(
    ranks: Ranks, rows: Shaped[Tensor, "... size"], num_copies: int
) -> Shaped[Tensor, "... share"]:
    if ranks.is_alone:
        return rows
    return rows.chunk(ranks.count // num_copies, dim=-1)[ranks.rank // num_copies]


def gathered_keys(
    ranks: Ranks, values: Shaped[Tensor, "... share"], num_copies: int
) -> Shaped[Tensor, "... size"]:
    if ranks.is_alone:
        return values
    if ranks.on_device is not None:
        shares = ranks.on_device.gathered(values).unflatten(-1, (ranks.count, -1))
        return shares[..., ::num_copies, :].flatten(-2)
    return _joined(_shares(ranks, values)[::num_copies])


def gathers_beside(ranks: Ranks, columns: Float[Tensor, "R share"]) -> bool:
    """Whether ranks gather what stands beside their columns of a stream, and not the columns.

    Squares are of chunks that lie whole on a rank; else those of gathered rows are taken.
    """
    rows, share = columns.shape
    exchange, is_whole = ranks.on_device, share % SQUARES.chunk == 0
    return exchange is not None and is_whole and exchange.fits(rows, share, columns.element_size())


def kept(
    ranks: Ranks, rows: Float[Tensor, "R hidden"], norm: Float[Tensor, " hidden"] | None
) -> Float[Tensor, "R columns"]:
    """What a rank keeps of the rows of a stream of which all have the scaled ones."""
    columns = own(ranks, rows)
    return columns if norm is not None and gathers_beside(ranks, columns) else rows


def norm_beside(
    ranks: Ranks, columns: Float[Tensor, "R share"], norm: Float[Tensor, " hidden"] | None
) -> Float[Tensor, " share"] | None:
    """The scale by which a kernel multiplies the columns of a stream that it makes."""
    if norm is None or ranks.is_alone:
        return norm
    return own(ranks, norm) if gathers_beside(ranks, columns) else None


def _joined(shares: Shaped[Tensor, "count ... share"]) -> Shaped[Tensor, "... size"]:
    return shares.movedim(0, -2).flatten(-2)


def _shares(ranks: Ranks, values: Shaped[Tensor, "... share"]) -> Shaped[Tensor, "count ... share"]:
    """What all ranks give, in order."""
    flat = values.contiguous().view(-1).view(torch.uint8)
    if ranks.meeting is not None:
        given = flat.new_empty(ranks.count * len(flat))
        try:
            distributed.all_gather_into_tensor(given, flat)
        except RuntimeError as error:  # whatever the library has heard of another rank
            raise RankMissingError(f"rank {ranks.rank} could not exchange: {error}") from error
    else:
        assert ranks.mailboxes is not None  # ranks that are processes of one host have some
        given = torch.from_numpy(ranks.mailboxes.exchange(ranks.rank, flat.numpy()))
    return given.view(values.dtype).view(ranks.count, *values.shape)
