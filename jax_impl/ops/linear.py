"""Matrix products with stored weights, and what a layer does around them; as `shared.spec.linear`.

Sums are float32; what leaves an operation has the dtype of its rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from jax_impl.ops import layers


class Matrix(NamedTuple):
    """A stored weight, `[out, in]`."""

    values: Float[jax.Array, "outputs inputs"]


class Stream(NamedTuple):
    """The residual stream between two operations of a layer."""

    rows: Float[jax.Array, "R hidden"]


def product(x: Float[jax.Array, "R inputs"], weight: Matrix) -> Float[jax.Array, "R outputs"]:
    """Multiplies each row by a weight."""
    return product_float32(x, weight).astype(x.dtype)


def product_float32(
    x: Float[jax.Array, "R inputs"], weight: Matrix
) -> Float[jax.Array, "R outputs"]:
    """As `product`, but the sums are not rounded to the dtype of the rows."""
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    # HIGHEST: a float32 product is a float32 product, on a GPU as well (no tf32).
    how = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    return lax.dot_general(x, weight.values, contract, **how)


def normed_product(
    stream: Stream, norm: Float[jax.Array, " hidden"], eps: float, weight: Matrix
) -> Float[jax.Array, "R outputs"]:
    """Multiplies the RMS norm of each row by a weight."""
    return product(layers.rms_norm(stream.rows, norm, eps), weight)


def added_product(x: Float[jax.Array, "R inputs"], weight: Matrix, stream: Stream) -> Stream:
    """Adds the product of each row with a weight to the stream."""
    return Stream(stream.rows + product(x, weight))


def gated_product(
    stream: Stream, norm: Float[jax.Array, " hidden"], eps: float, weight: Matrix
) -> Float[jax.Array, "R intermediate"]:
    """silu(gate) * up of the normed rows; the weight holds the gate's rows, then those of up."""
    gate, up = jnp.split(normed_product(stream, norm, eps, weight), 2, axis=-1)
    return layers.silu(gate) * up
