"""All-gather of tensor-parallel ranks; same results as `shared.spec.all_gather`.

A rank is a process, or a thread in tests. On the CPUs of one host shards go through shared memory,
between hosts through torch.distributed (performance not measured). Between GPUs of one host kernels
gather through symmetric memory. With TP 1 an all-gather is the identity.
"""

import torch
import torch.distributed as distributed
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from shared.boundary.shm_allgather import AllGatherTimeout
from shared.boundary.tp_group import TPGroup
from shared.spec.reduction_order import SQUARES


def all_gather(ranks: TPGroup, values: Shaped[Tensor, "... share"]) -> Shaped[Tensor, "... size"]:
    """Gathers whole rows; each rank has the same number of columns, in the order of ranks.

    All ranks must call it in the same order.

    Raises:
      AllGatherTimeout: See `shared.boundary.shm_allgather.ShmAllGather.all_gather`, also for hosts.
    """
    if ranks.is_single:
        return values
    if ranks.on_device is not None:
        return ranks.on_device.gathered(values)
    return _joined(_shares(ranks, values))


def gathered_rows(
    ranks: TPGroup, values: Float[Tensor, "R share"], rows: Int[Tensor, " R_and_1"]
) -> Float[Tensor, "R size"]:
    """Same as `all_gather`, for the listed rows only; other rows are undefined."""
    if ranks.on_device is not None:
        return ranks.on_device.gathered_rows(values, rows)
    return all_gather(ranks, values)


def local_columns(ranks: TPGroup, rows: Shaped[Tensor, "... size"]) -> Shaped[Tensor, "... share"]:
    return rows if ranks.is_single else rows.chunk(ranks.count, dim=-1)[ranks.rank]


def own_keys(
    ranks: TPGroup, rows: Shaped[Tensor, "... size"], num_copies: int
) -> Shaped[Tensor, "... share"]:
    if ranks.is_single:
        return rows
    return rows.chunk(ranks.count // num_copies, dim=-1)[ranks.rank // num_copies]


def all_gather_kv_heads(
    ranks: TPGroup, values: Shaped[Tensor, "... share"], num_copies: int
) -> Shaped[Tensor, "... size"]:
    if ranks.is_single:
        return values
    if ranks.on_device is not None:
        shares = ranks.on_device.gathered(values).unflatten(-1, (ranks.count, -1))
        return shares[..., ::num_copies, :].flatten(-2)
    return _joined(_shares(ranks, values)[::num_copies])


def gathers_with_squares(ranks: TPGroup, columns: Float[Tensor, "R share"]) -> bool:
    """Returns True if ranks gather scaled columns and sums of squares instead of the columns.

    This requires that each chunk of the sums of squares is on one rank.
    """
    rows, share = columns.shape
    exchange, is_whole = ranks.on_device, share % SQUARES.chunk == 0
    return exchange is not None and is_whole and exchange.fits(rows, share, columns.element_size())


def kept(
    ranks: TPGroup, rows: Float[Tensor, "R hidden"], norm: Float[Tensor, " hidden"] | None
) -> Float[Tensor, "R columns"]:
    """Returns the rank's columns of the residual stream if all ranks have the scaled rows."""
    columns = local_columns(ranks, rows)
    return columns if norm is not None and gathers_with_squares(ranks, columns) else rows


def norm_with_squares(
    ranks: TPGroup, columns: Float[Tensor, "R share"], norm: Float[Tensor, " hidden"] | None
) -> Float[Tensor, " share"] | None:
    """Returns the norm scale that a kernel applies to the stream columns that it writes."""
    if norm is None or ranks.is_single:
        return norm
    return local_columns(ranks, norm) if gathers_with_squares(ranks, columns) else None


def _joined(shares: Shaped[Tensor, "count ... share"]) -> Shaped[Tensor, "... size"]:
    return shares.movedim(0, -2).flatten(-2)


def _shares(
    ranks: TPGroup, values: Shaped[Tensor, "... share"]
) -> Shaped[Tensor, "count ... share"]:
    """Returns the shards of all ranks, in order."""
    flat = values.contiguous().view(-1).view(torch.uint8)
    if ranks.meeting is not None:
        given = flat.new_empty(ranks.count * len(flat))
        try:
            distributed.all_gather_into_tensor(given, flat)
        except RuntimeError as error:  # raised if another rank failed
            raise AllGatherTimeout(f"rank {ranks.rank} could not exchange: {error}") from error
    else:
        assert ranks.shm_all_gather is not None  # set for processes of one host
        given = torch.from_numpy(ranks.shm_all_gather.all_gather(ranks.rank, flat.numpy()))
    return given.view(values.dtype).view(ranks.count, *values.shape)
