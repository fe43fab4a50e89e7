"""Matrix products with stored weights, and what a layer does around them; as `shared.spec.linear`.

Sums are float32; what leaves an operation has the dtype of its rows. On a GPU the products of
bfloat16 are kernels; see `jax_impl.ops`.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float

from jax_impl.ops import Kernels, Place, is_bfloat16, kernel_or_plain, kernels_on, layers
from shared.spec.numerics import SQUARES


class Matrix(NamedTuple):
    """A stored weight, `[out, in]`, and the bias that its products add, if there is one.

    Attributes:
      layer: The weight's place, where `values` is a stack `[layers, out, in]`, and `bias` one
        beside it. A kernel reads the stack where it lies; a slice would be copied for it.
    """

    values: Float[jax.Array, "*layers outputs inputs"]
    layer: Place | None = None
    bias: Float[jax.Array, "*layers outputs"] | None = None

    @property
    def alone(self) -> "Matrix":
        """The weight and its bias out of their stacks."""
        if self.layer is None:
            return self
        bias = None if self.bias is None else self.bias[self.layer]
        return Matrix(self.values[self.layer], None, bias)

    @property
    def num_outputs(self) -> int:
        """Rows of the weight."""
        return self.values.shape[-2]

    def rows(self, first: int) -> "Matrix":
        """The outputs from `first` on, out of their stacks."""
        values, _, bias = self.alone
        return Matrix(values[first:], None, None if bias is None else bias[first:])


class Stream(NamedTuple):
    """The residual stream between two operations of a layer.

    Attributes:
      squares: Of each chunk of a row, where kernels keep them for the next norm.
    """

    rows: Float[jax.Array, "R hidden"]
    squares: Float[jax.Array, "R chunks"] | None = None


def plain_stream(rows: Float[jax.Array, "R hidden"]) -> Stream:
    """The residual stream as a pass begins it."""
    return Stream(rows)


def kernel_stream(kernels: Kernels, rows: Float[jax.Array, "R hidden"]) -> Stream:
    """As `plain_stream`, with the squares of the rows."""
    return Stream(rows, _squares(kernels, Stream(rows)))


def _beside_kernels(stream: Stream) -> Stream:
    """A stream of plain products, of the structure that kernels give: with squares nobody reads."""
    rows = stream.rows
    return Stream(rows, jnp.zeros((len(rows), -(-rows.shape[1] // SQUARES.chunk))))


stream = kernel_or_plain(
    kernel_stream, plain_stream, is_bfloat16, lambda rows: _beside_kernels(Stream(rows))
)


def plain_product(
    x: Float[jax.Array, "R inputs"], weight: Matrix, first: int = 0
) -> Float[jax.Array, "R outputs"]:
    """Multiplies each row by a weight; gives the outputs from `first` on."""
    return _sums(x, weight, first).astype(x.dtype)


def kernel_product(
    kernels: Kernels, x: Float[jax.Array, "R inputs"], weight: Matrix, first: int = 0
) -> Float[jax.Array, "R outputs"]:
    return _multiplied(kernels, x, weight, first=first).rows


product = kernel_or_plain(kernel_product, plain_product, is_bfloat16)


def plain_product_float32(
    x: Float[jax.Array, "R inputs"], weight: Matrix, factor: float = 1.0
) -> Float[jax.Array, "R outputs"]:
    """As `product` times a factor, but the sums are not rounded to the dtype of the rows."""
    return _times(_sums(x, weight), factor)


def kernel_product_float32(
    kernels: Kernels, x: Float[jax.Array, "R inputs"], weight: Matrix, factor: float = 1.0
) -> Float[jax.Array, "R outputs"]:
    return _multiplied(kernels, x, weight, factor=factor, out_type=jnp.float32).rows


product_float32 = kernel_or_plain(kernel_product_float32, plain_product_float32, is_bfloat16)


def plain_normed_product(
    stream: Stream, norm: Float[jax.Array, " hidden"] | None, eps: float | None, weight: Matrix
) -> Float[jax.Array, "R outputs"]:
    """Multiplies the RMS norm of each row by a weight.

    Without a scale of the norm, it is in the weight; without `eps` there is no norm.
    """
    rows = stream.rows if eps is None else layers.rms_norm(stream.rows, norm, eps)
    return plain_product(rows, weight)


def kernel_normed_product(
    kernels: Kernels,
    stream: Stream,
    norm: Float[jax.Array, " hidden"] | None,
    eps: float | None,
    weight: Matrix,
) -> Float[jax.Array, "R outputs"]:
    if norm is not None or eps is None:
        rows = stream.rows if eps is None else layers.rms_norm(stream.rows, norm, eps)
        return kernel_product(kernels, rows, weight)
    squares = _squares(kernels, stream)
    return _multiplied(kernels, stream.rows, weight, squares=squares, eps=eps).rows


normed_product = kernel_or_plain(kernel_normed_product, plain_normed_product, is_bfloat16)


def plain_added_product(
    x: Float[jax.Array, "R inputs"], weight: Matrix, stream: Stream, factor: float = 1.0
) -> Stream:
    """Adds the product of each row with a weight, times a factor, to the stream."""
    return Stream(stream.rows + _times(plain_product(x, weight), factor))


def kernel_added_product(
    kernels: Kernels,
    x: Float[jax.Array, "R inputs"],
    weight: Matrix,
    stream: Stream,
    factor: float = 1.0,
) -> Stream:
    """As `plain_added_product`, with the squares of the sum."""
    return _multiplied(kernels, x, weight, factor=factor, added=stream.rows)


def _added_beside_kernels(
    x: Float[jax.Array, "R inputs"], weight: Matrix, stream: Stream, factor: float = 1.0
) -> Stream:
    return _beside_kernels(plain_added_product(x, weight, stream, factor))


added_product = kernel_or_plain(
    kernel_added_product, plain_added_product, is_bfloat16, _added_beside_kernels
)


def added_norm(
    x: Float[jax.Array, "R hidden"], norm: Float[jax.Array, " hidden"], eps: float, stream: Stream
) -> Stream:
    """Adds the RMS norm of each row to the stream."""
    return Stream(stream.rows + layers.rms_norm(x, norm, eps))


def plain_gated_product(
    stream: Stream, norm: Float[jax.Array, " hidden"] | None, eps: float | None, weight: Matrix
) -> Float[jax.Array, "R intermediate"]:
    """silu(gate) * up of the normed rows; the weight holds the gate's rows, then those of up."""
    gate, up = jnp.split(plain_normed_product(stream, norm, eps, weight), 2, axis=-1)
    return layers.silu(gate) * up


def kernel_gated_product(
    kernels: Kernels,
    stream: Stream,
    norm: Float[jax.Array, " hidden"] | None,
    eps: float | None,
    weight: Matrix,
) -> Float[jax.Array, "R intermediate"]:
    if norm is not None or eps is None:
        rows = stream.rows if eps is None else layers.rms_norm(stream.rows, norm, eps)
        return _multiplied(kernels, rows, weight, is_gated=True).rows
    squares = _squares(kernels, stream)
    return _multiplied(kernels, stream.rows, weight, squares=squares, eps=eps, is_gated=True).rows


gated_product = kernel_or_plain(kernel_gated_product, plain_gated_product, is_bfloat16)


def _times(x: Float[jax.Array, "R outputs"], factor: float) -> Float[jax.Array, "R outputs"]:
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def _sums(
    x: Float[jax.Array, "R inputs"], weight: Matrix, first: int = 0
) -> Float[jax.Array, "R outputs"]:
    """The products in float32, from the output `first` on, with the bias."""
    values, _, bias = weight.rows(first)
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    # HIGHEST: a float32 product is a float32 product, on a GPU as well (no tf32).
    options = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    sums = lax.dot_general(x, values, contract, **options)
    return sums if bias is None else sums + bias.astype(jnp.float32)


def _squares(kernels: Kernels, stream: Stream) -> Float[jax.Array, "R chunks"]:
    if stream.squares is not None:
        return stream.squares
    return kernels.layers.chunks_of_squares(stream.rows, order=SQUARES)


def _multiplied(
    kernels: Kernels,
    x: Float[jax.Array, "R inputs"],
    weight: Matrix,
    *,
    first: int = 0,
    out_type: np.dtype | type | None = None,
    squares: Float[jax.Array, "R chunks"] | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    factor: float = 1.0,
    added: Float[jax.Array, "R outputs"] | None = None,
) -> Stream:
    stored, inputs = weight.values.shape[-2:]
    outputs = (stored - first) // (2 if is_gated else 1)
    tiles = kernels.tiles.linear.of(
        rows=len(x), outputs=outputs, inputs=inputs, gated=int(is_gated)
    )
    out, sums = kernels.linear.product(
        x,
        weight.values.reshape(-1, stored, inputs),
        jnp.asarray(0 if weight.layer is None else weight.layer, jnp.int32),
        first=first,
        out_type=out_type or x.dtype,
        squares=squares,
        eps=eps,
        is_gated=is_gated,
        bias=None if weight.bias is None else weight.bias.reshape(-1, stored),
        factor=factor,
        added=added,
        order=SQUARES,
        tiles=tiles,
    )
    return Stream(out, sums)


@partial(jax.jit, donate_argnums=0)
def scaled(
    values: Float[jax.Array, "*layers outputs inputs"], norm: Float[jax.Array, "*layers inputs"]
) -> Float[jax.Array, "*layers outputs inputs"]:
    """A stored weight, or a stack of them, with the scale of the norm before it; in its memory."""
    return (values.astype(jnp.float32) * norm[..., None, :]).astype(values.dtype)


def folds_norms(x: Float[jax.Array, "..."], device: jax.Device) -> bool:
    """Whether products of such arrays on a device want the scales of norms in their weights."""
    return kernels_on(device) is not None and is_bfloat16(x)
