"""Matrix products with stored weights, and what a layer does right before and after them.

A decoder layer is cut where a GPU cuts it: a product with the norm of its input folded in, the
mixer, a product that adds the residual, a product of gate and up with the norm before and SiLU
behind, and a product that adds the residual again. Each is one operation here, and is by definition
the composition of the small ones in `layers`. What passes from one to the next is a `Stream`.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int, Int32, Shaped, UInt8

from shared.models import fp8_words
from shared.spec import fp8_activations, layers


@dataclass(frozen=True)
class Matrix:
    """A stored weight, `[out, in]`, and the bias that its products add, if there is one.

    Those of a layer's experts are one, `[experts, out, in]`. How a weight is stored is known to the
    ops alone, here and in the backends.

    Attributes:
      values: Numbers; or FP8, where scales stand beside them: in words of four, whose rows are
        multiplied as they are, or as codes, whose rows are quantised.
      scales: Of words, see `shared.models.fp8_words`; of codes, those of each block of inputs, for
        each output or for each block of them. None: the values are numbers.
    """

    values: (
        Float[np.ndarray, "*experts outputs inputs"]
        | Int32[np.ndarray, "*experts outputs words"]
        | UInt8[np.ndarray, "*experts outputs inputs"]
    )
    bias: Float[np.ndarray, " outputs"] | None = None
    scales: Shaped[np.ndarray, "*experts scales scales_in"] | None = None

    @property
    def quantises(self) -> bool:
        """Whether rows are quantised before they are multiplied."""
        return self.values.dtype == np.uint8

    @property
    def num_outputs(self) -> int:
        """Rows of the weight."""
        return self.values.shape[-2]

    def rows(self, first: int) -> "Matrix":
        """The outputs from `first` on, where a scale of FP8 must begin."""
        bias, scales = self.bias, self.scales
        if scales is not None:
            scales = scales[fp8_words.first_scale(first, self.num_outputs, len(scales)) :]
        return Matrix(self.values[first:], None if bias is None else bias[first:], scales)

    def of_expert(self, expert: int) -> "Matrix":
        """The weight of one expert."""
        scales = None if self.scales is None else self.scales[expert]
        return Matrix(self.values[expert], scales=scales)


def widened(matrix: Matrix) -> Float[np.ndarray, "*experts outputs inputs"]:
    """The numbers of a weight; those of FP8 are its codes times their scales, in bfloat16."""
    if matrix.scales is None:
        return matrix.values
    return fp8_words.widened(matrix.values, matrix.scales)


@dataclass(frozen=True)
class Stream:
    """The residual stream between two operations of a layer.

    What makes a row knows the norm through which it is read next, and can do that norm's part of
    the work beside it.

    Attributes:
      norm: Scale of the norm through which the rows are read next, a zero-centred one with its 1
        added already; None: nothing scales them.
      scaled: The rows times that scale, where kernels keep them for the next product.
      squares: Of each chunk of a row, where kernels keep them for the next norm; see
        `shared.spec.numerics.chunks_of_squares`.
      count: How many of the rows are real, the first of them; None: all. Those of padding hold what
        nobody reads.
      arrivals: Zeros, in which kernels of experts count their programs, and which they leave as
        zeros.
    """

    rows: Float[np.ndarray, "R hidden"]
    norm: Float[np.ndarray, " hidden"] | None = None
    scaled: Float[np.ndarray, "R hidden"] | None = None
    squares: Float[np.ndarray, "R chunks"] | None = None
    count: Int[np.ndarray, " 1"] | None = None
    arrivals: Int[np.ndarray, " counters"] | None = None

    def followed(
        self,
        rows: Float[np.ndarray, "R hidden"],
        norm: Float[np.ndarray, " hidden"] | None = None,
        scaled: Float[np.ndarray, "R hidden"] | None = None,
        squares: Float[np.ndarray, "R chunks"] | None = None,
    ) -> "Stream":
        """What comes behind this one: other rows, of which as many are real."""
        return replace(self, rows=rows, norm=norm, scaled=scaled, squares=squares)


def stream(
    rows: Float[np.ndarray, "R hidden"],
    norm: Float[np.ndarray, " hidden"] | None = None,
    count: Int[np.ndarray, " 1"] | None = None,
) -> Stream:
    """The residual stream as a pass begins it, to be read through a norm of this scale."""
    return Stream(rows, norm, count=count)


def product(
    x: Float[np.ndarray, "R inputs"], weight: Matrix, first: int = 0
) -> Float[np.ndarray, "R outputs"]:
    """Multiplies each row by a weight.

    Args:
      first: The outputs from here on.
    """
    weight = weight.rows(first)
    out = _multiplied(x, weight)
    return out if weight.bias is None else out + weight.bias


def _multiplied(x: Float[np.ndarray, "R inputs"], weight: Matrix) -> Float[np.ndarray, "R outputs"]:
    if not weight.quantises:
        return layers.linear(x, widened(weight))
    assert weight.scales is not None  # of codes
    outputs = weight.num_outputs // len(weight.scales)
    scales = np.repeat(weight.scales, outputs, axis=0)
    rows = fp8_activations.quantised(x)
    return fp8_activations.product(rows, weight.values, scales)


def product_float32(
    x: Float[np.ndarray, "R inputs"], weight: Matrix, factor: float = 1.0
) -> Float[np.ndarray, "R outputs"]:
    """As `product` times a factor, float32 whatever type the rows and the weight have."""
    return _times(product(x, weight), factor).astype(np.float32)


def normed_product(
    stream: Stream, eps: float | None, weight: Matrix
) -> Float[np.ndarray, "R outputs"]:
    """Multiplies the RMS norm of each row by a weight.

    Args:
      eps: Of the norm; None: there is none, and the rows are multiplied as they are.
    """
    rows = stream.rows if eps is None else layers.rms_norm(stream.rows, stream.norm, eps)
    return product(rows, weight)


def added_product(
    x: Float[np.ndarray, "R inputs"],
    weight: Matrix,
    stream: Stream,
    factor: float = 1.0,
    norm: Float[np.ndarray, " hidden"] | None = None,
) -> Stream:
    """Adds the product of each row with a weight, times a factor, to the stream.

    Args:
      norm: Of the stream that this gives.
    """
    rows = stream.rows + _times(product(x, weight), factor)
    return stream.followed(rows, norm)


def added_norm(
    x: Float[np.ndarray, "R hidden"], norm: Float[np.ndarray, " hidden"], eps: float, stream: Stream
) -> Stream:
    """Adds the RMS norm of each row to the stream."""
    return stream.followed(stream.rows + layers.rms_norm(x, norm, eps))


def gated_product(
    stream: Stream, eps: float | None, weight: Matrix
) -> Float[np.ndarray, "R intermediate"]:
    """silu(gate) * up of the normed rows; the weight holds the gate's rows, then those of up."""
    gate, up = np.split(normed_product(stream, eps, weight), 2, axis=-1)
    return layers.silu(gate) * up


def _times(x: Float[np.ndarray, "R outputs"], factor: float) -> Float[np.ndarray, "R outputs"]:
    return x if factor == 1 else x * np.float32(factor)
