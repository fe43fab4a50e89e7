"""A convolution along the rows of a block; as `shared.spec.convolution`."""

import jax
import jax.numpy as jnp
from jaxtyping import Float


def convolved(
    values: Float[jax.Array, "R hidden"],
    base: Float[jax.Array, "taps hidden"],
    moved: Float[jax.Array, "R taps groups"],
    size: int,
    added: Float[jax.Array, "R hidden"] | None,
) -> Float[jax.Array, "R hidden"]:
    """What is added, then each row and those before it in its block, column by column; float32.

    Products of two numbers in bfloat16 are whole in float32, so no fusion with a sum changes a bit.
    """
    (R, hidden), groups = values.shape, moved.shape[2]
    wide = values.astype(jnp.float32).reshape(-1, size, hidden)
    total = jnp.float32(0) if added is None else added.astype(jnp.float32)
    for tap, own in enumerate(base.astype(jnp.float32)):
        read = jnp.pad(wide[:, : size - tap], ((0, 0), (tap, 0), (0, 0))).reshape(R, hidden)
        by_group = read.reshape(R, groups, -1) * moved[:, tap, :, None].astype(jnp.float32)
        total = total + own * read + by_group.reshape(R, hidden)
    return total
