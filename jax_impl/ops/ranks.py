"""What ranks give each other; as `shared.spec.ranks`.

A rank is a device of the mesh axis `AXIS`, under one `shard_map` over all of them. One rank alone
gathers nothing, and its programs know of no mesh.
"""

import jax
from jax import lax
from jaxtyping import Shaped

from shared.boundary.ranks import Ranks

AXIS = "ranks"
"""Of the mesh whose devices are the ranks."""

# It decides what is traced, and is no array: records that hold it are taken apart as without it.
jax.tree_util.register_static(Ranks)


def gathered(ranks: Ranks, values: Shaped[jax.Array, "... share"]) -> Shaped[jax.Array, "... size"]:
    """The whole rows, of which each rank has as many columns, in the order of the ranks."""
    if ranks.is_alone:
        return values
    return lax.all_gather(values, AXIS, axis=values.ndim - 1, tiled=True)


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
    first = lax.axis_index(AXIS) // num_copies * share
    return lax.dynamic_slice_in_dim(rows, first, share, axis=-1)


def gathered_keys(
    ranks: Ranks, values: Shaped[jax.Array, "... share"], num_copies: int
) -> Shaped[jax.Array, "... size"]:
    """As `gathered`, of heads of which each stands on `num_copies` ranks in a row."""
    if ranks.is_alone:
        return values
    shares = lax.all_gather(values, AXIS, axis=values.ndim - 1)[..., ::num_copies, :]
    return shares.reshape(*values.shape[:-1], -1)
