"""Grammar token bitmask; same as `shared.spec.grammar_bitmask`."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

_BITS = 32  # per int32


def allowed(
    bits: Int[jax.Array, "Q words"], index: Int[jax.Array, " R"], vocab: int
) -> Bool[jax.Array, "R vocab"]:
    """Returns the tokens that the grammar allows each row."""
    is_set = (bits[index][:, :, None] >> jnp.arange(_BITS, dtype=jnp.int32)) & 1
    return is_set.reshape(len(index), -1)[:, :vocab] != 0
