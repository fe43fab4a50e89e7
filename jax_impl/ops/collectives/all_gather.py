"""What ranks give each other; as `shared.spec.all_gather`.

A rank is a device of the mesh axis `AXIS`, under one `shard_map` over all of them. On a CPU XLA
gathers; between GPUs kernels do, which write in each other's memory. One rank alone gathers
nothing, and its programs know of no mesh.
"""

import jax
from jax import lax
from jaxtyping import Float, Int, Shaped

from jax_impl.ops import Norm, Scale
from shared.boundary.tp_group import Ranks
from shared.spec.reduction_order import SQUARES

AXIS = "ranks"
"""Of the mesh whose devices are the ranks."""

# It decides what is traced. What it holds on a device is an operand of a step.
jax.tree_util.register_dataclass(
    Ranks, data_fields=["on_device"], meta_fields=["rank", "count", "mailboxes", "meeting"]
)


def gathered(ranks: Ranks, values: Shaped[jax.Array, "... share"]) -> Shaped[jax.Array, "... size"]:
    """The whole rows, of which each rank has as many columns, in the order of the ranks."""
    if ranks.is_alone:
        return values
    if ranks.on_device is not None:
        return ranks.on_device.gathered(values)
    return lax.all_gather(values, AXIS, axis=values.ndim - 1, tiled=True)


def gathered_rows(
    ranks: Ranks, values: Float[jax.Array, "R share"], rows: Int[jax.Array, " R_and_1"]
) -> Float[jax.Array, "R size"]:
    """As `gathered`, of the rows that are listed; others are undefined."""
    if ranks.on_device is not None:
        return ranks.on_device.gathered_rows(values, rows)
    return gathered(ranks, values)


def own(ranks: Ranks, rows: Shaped[jax.Array, "... size"]) -> Shaped[jax.Array, "... share"]:
    """The columns of the rank that runs this."""
    return own_keys(ranks, rows, 1)


def own_keys(
    ranks: Ranks, rows: Shaped[jax.Array, "... size"], num_copies: int
) -> Shaped[jax.Array, "... share"]:
    """As `own`, of heads of which each stands on `num_copies` ranks in a row."""
    if ranks.is_alone:
        return rows
    share = rows.shape[-1] * num_copies // ranks.count
    first = number(ranks) // num_copies * share
    return lax.dynamic_slice_in_dim(rows, first, share, axis=-1)


def gathered_keys(
    ranks: Ranks, values: Shaped[jax.Array, "... share"], num_copies: int
) -> Shaped[jax.Array, "... size"]:
    """As `gathered`, of heads of which each stands on `num_copies` ranks in a row."""
    if ranks.is_alone:
        return values
    shares = gathered(ranks, values).reshape(*values.shape[:-1], ranks.count, -1)
    return shares[..., ::num_copies, :].reshape(*values.shape[:-1], -1)


def gathers_beside(ranks: Ranks, columns: Float[jax.Array, "R share"]) -> bool:
    """Whether ranks gather what stands beside their columns of a stream, and not the columns.

    Squares are of chunks that lie whole on a rank; else those of gathered rows are taken.
    """
    rows, share = columns.shape
    exchange, is_whole = ranks.on_device, share % SQUARES.chunk == 0
    return exchange is not None and is_whole and exchange.fits(rows, share, columns.dtype.itemsize)


def kept(
    ranks: Ranks, rows: Float[jax.Array, "R hidden"], norm: Norm | None
) -> Float[jax.Array, "R columns"]:
    """What a rank keeps of the rows of a stream of which all have the scaled ones."""
    columns = own(ranks, rows)
    return columns if norm is not None and gathers_beside(ranks, columns) else rows


def norm_beside(
    ranks: Ranks, columns: Float[jax.Array, "R share"], norm: Norm | None
) -> Norm | None:
    """The scale by which a kernel multiplies the columns of a stream that it makes."""
    if norm is None or ranks.is_alone:
        return norm
    if not gathers_beside(ranks, columns):
        return None
    if isinstance(norm, Scale):  # of all layers at once: XLA cuts the stack once in a step
        return norm._replace(values=own(ranks, norm.values))
    return own(ranks, norm)


def number(ranks: Ranks) -> Int[jax.Array, ""]:
    """Which rank runs the program; on a GPU nothing of XLA's, which no command buffer takes."""
    return lax.axis_index(AXIS) if ranks.on_device is None else ranks.on_device.rank
