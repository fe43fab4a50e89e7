"""Matrix products with stored weights."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float


def linear(
    x: Float[jax.Array, "... inputs"], weight: Float[jax.Array, "outputs inputs"]
) -> Float[jax.Array, "... outputs"]:
    """Multiplies by a weight that is stored `[out, in]`; sums in float32, returns x's dtype."""
    return linear_float32(x, weight).astype(x.dtype)


def linear_float32(
    x: Float[jax.Array, "... inputs"], weight: Float[jax.Array, "outputs inputs"]
) -> Float[jax.Array, "... outputs"]:
    """As `linear`, but returns the float32 sums; for logits."""
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    # HIGHEST: a float32 product is a float32 product, on a GPU as well (no tf32).
    return lax.dot_general(
        x, weight, contract, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
