"""All-gather of tensor-parallel ranks; same results as `shared.spec.all_gather`.

A rank is a device of the mesh axis `AXIS` under one `shard_map`. On CPUs XLA gathers. Between GPUs
kernels gather through symmetric memory. With TP 1 an all-gather is the identity, and programs have
no mesh.
"""

import jax
from jax import lax
from jaxtyping import Float, Int, Shaped

from jax_impl.ops import Norm, Scale
from shared.boundary.tp_group import TPGroup
from shared.spec.reduction_order import SQUARES

AXIS = "ranks"
"""Axis of the mesh whose devices are the ranks."""

# Static: it determines the traced program. Its device arrays are operands of the step.
jax.tree_util.register_dataclass(
    TPGroup, data_fields=["on_device"], meta_fields=["rank", "count", "shm_all_gather", "meeting"]
)


def all_gather(
    ranks: TPGroup, values: Shaped[jax.Array, "... share"]
) -> Shaped[jax.Array, "... size"]:
    """Gathers whole rows; each rank has the same number of columns, in the order of ranks."""
    if ranks.is_single:
        return values
    if ranks.on_device is not None:
        return ranks.on_device.gathered(values)
    return lax.all_gather(values, AXIS, axis=values.ndim - 1, tiled=True)


def gathered_rows(
    ranks: TPGroup, values: Float[jax.Array, "R share"], rows: Int[jax.Array, " R_and_1"]
) -> Float[jax.Array, "R size"]:
    """Same as `all_gather`, for the listed rows only; other rows are undefined."""
    if ranks.on_device is not None:
        return ranks.on_device.gathered_rows(values, rows)
    return all_gather(ranks, values)


def local_columns(
    ranks: TPGroup, rows: Shaped[jax.Array, "... size"]
) -> Shaped[jax.Array, "... share"]:
    """Returns the columns of the calling rank."""
    return own_keys(ranks, rows, 1)


def own_keys(
    ranks: TPGroup, rows: Shaped[jax.Array, "... size"], num_copies: int
) -> Shaped[jax.Array, "... share"]:
    """Same as `local_columns`, for heads that are replicated on `num_copies` consecutive ranks."""
    if ranks.is_single:
        return rows
    share = rows.shape[-1] * num_copies // ranks.count
    first = number(ranks) // num_copies * share
    return lax.dynamic_slice_in_dim(rows, first, share, axis=-1)


def all_gather_kv_heads(
    ranks: TPGroup, values: Shaped[jax.Array, "... share"], num_copies: int
) -> Shaped[jax.Array, "... size"]:
    """Same as `all_gather`, for heads that are replicated on `num_copies` consecutive ranks."""
    if ranks.is_single:
        return values
    shares = all_gather(ranks, values).reshape(*values.shape[:-1], ranks.count, -1)
    return shares[..., ::num_copies, :].reshape(*values.shape[:-1], -1)


def gathers_with_squares(ranks: TPGroup, columns: Float[jax.Array, "R share"]) -> bool:
    """Returns True if ranks gather scaled columns and sums of squares instead of the columns.

    This requires that each chunk of the sums of squares is on one rank.
    """
    rows, share = columns.shape
    exchange, is_whole = ranks.on_device, share % SQUARES.chunk == 0
    return exchange is not None and is_whole and exchange.fits(rows, share, columns.dtype.itemsize)


def kept(
    ranks: TPGroup, rows: Float[jax.Array, "R hidden"], norm: Norm | None
) -> Float[jax.Array, "R columns"]:
    """Returns the rank's columns of the residual stream if all ranks have the scaled rows."""
    columns = local_columns(ranks, rows)
    return columns if norm is not None and gathers_with_squares(ranks, columns) else rows


def norm_with_squares(
    ranks: TPGroup, columns: Float[jax.Array, "R share"], norm: Norm | None
) -> Norm | None:
    """Returns the norm scale that a kernel applies to the stream columns that it writes."""
    if norm is None or ranks.is_single:
        return norm
    if not gathers_with_squares(ranks, columns):
        return None
    if isinstance(norm, Scale):  # for all layers: XLA slices the stack once per step
        return norm._replace(values=local_columns(ranks, norm.values))
    return local_columns(ranks, norm)


def number(ranks: TPGroup) -> Int[jax.Array, ""]:
    """Returns the calling rank; on a GPU not by XLA, since command buffers do not support it."""
    return lax.axis_index(AXIS) if ranks.on_device is None else ranks.on_device.rank
