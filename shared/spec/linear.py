"""Linear layers with fused prologue and epilogue: RMS norm, residual addition, SiLU gate, FP8
weights.

A decoder layer is split as a GPU splits it: a product with the input norm fused, the mixer, a
product with residual addition, a gate/up product with the norm before and SiLU after it, and
another product with residual addition. Each is one operation here, defined as the composition of
the elementary ones in `layers`. A `NormedStream` passes from one operation to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from jaxtyping import Float, Int

from shared.models.activation import SILU_AND_MUL, Activation
from shared.models.formats.fp8 import BLOCK
from shared.spec import fp8_activations, layers, reduction_order
from shared.spec.lora import adapted
from shared.spec.matrix import Matrix, widened


@dataclass(frozen=True)
class NormedStream:
    """Residual stream between two operations of a layer.

    The operation that writes the rows also knows the next norm, and can compute a part of it.

    Attributes:
      rows: The residual stream.
      norm: Scale of the next norm, with the 1 of a zero-centred norm included; None for no scale.
      scaled: Rows times that scale, if kernels store them for the next product.
      squares: Sums of squares per chunk of a row, if kernels store them for the next norm; see
        `shared.spec.reduction_order.chunks_of_squares`.
      count: Number of real rows; None for all. Padding rows are undefined.
      arrivals: Zeroed counters of kernels, which reset them to zero.
    """

    rows: Float[np.ndarray, "R hidden"]
    norm: Float[np.ndarray, " hidden"] | None = None
    scaled: Float[np.ndarray, "R hidden"] | None = None
    squares: Float[np.ndarray, "R chunks"] | None = None
    count: Int[np.ndarray, " 1"] | None = None
    arrivals: Int[np.ndarray, " counters"] | None = None

    def with_next_norm(
        self,
        rows: Float[np.ndarray, "R hidden"],
        norm: Float[np.ndarray, " hidden"] | None = None,
        scaled: Float[np.ndarray, "R hidden"] | None = None,
        squares: Float[np.ndarray, "R chunks"] | None = None,
    ) -> "NormedStream":
        """Returns the next stream: other rows, with the same number of real ones."""
        return replace(self, rows=rows, norm=norm, scaled=scaled, squares=squares)


def stream(
    rows: Float[np.ndarray, "R hidden"],
    norm: Float[np.ndarray, " hidden"] | None = None,
    count: Int[np.ndarray, " 1"] | None = None,
) -> NormedStream:
    """Returns the residual stream at the start of a pass, with the scale of its next norm."""
    return NormedStream(rows, norm, count=count)


def product(
    x: Float[np.ndarray, "R inputs"], weight: Matrix, first: int = 0
) -> Float[np.ndarray, "R outputs"]:
    """Multiplies each row by a weight.

    Args:
      x: Rows.
      weight: The weight.
      first: First output to compute.
    """
    return _product_of_segments(x, weight.rows(first), 1)


def _product_of_segments(
    x: Float[np.ndarray, "R inputs"], weight: Matrix, segments: int
) -> Float[np.ndarray, "R outputs"]:
    """Computes `product` with the inputs in segments; see `reduction_order.LinearOrder`."""
    products = _codes_products if weight.format.quantizes_activations else _products
    parts = reduction_order.parts_of_inputs(x.shape[1], segments)
    out = reduce(np.add, products(x, weight, parts))
    if weight.lora is not None:
        out = adapted(out, x, weight.lora)
    return out if weight.bias is None else out + weight.bias


def _products(
    x: Float[np.ndarray, "R inputs"], weight: Matrix, parts: Sequence[slice]
) -> list[Float[np.ndarray, "R outputs"]]:
    """Multiplies each segment of the inputs."""
    wide = widened(weight)
    return [layers.linear(x[:, part], wide[:, part]) for part in parts]


def _codes_products(
    x: Float[np.ndarray, "R inputs"], weight: Matrix, parts: Sequence[slice]
) -> list[Float[np.ndarray, "R outputs"]]:
    """Multiplies each segment of the inputs in FP8 (W8A8); segments are whole blocks."""
    assert weight.scales is not None  # FP8
    outputs = weight.num_outputs // len(weight.scales)
    scales = np.repeat(weight.scales, outputs, axis=0)
    rows, found = fp8_activations.quantised(x), []
    for part in parts:
        blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
        of_part = fp8_activations.Quantised(rows.codes[:, part], rows.scales[:, blocks])
        values = weight.values[:, part]
        found.append(fp8_activations.product(of_part, values, scales[:, blocks]))
    return found


def product_float32(
    x: Float[np.ndarray, "R inputs"], weight: Matrix, factor: float = 1.0
) -> Float[np.ndarray, "R outputs"]:
    """Computes `product` times a factor, in float32 for any dtype of rows and weight."""
    return _times(product(x, weight), factor).astype(np.float32)


def rmsnorm_linear(
    stream: NormedStream, eps: float | None, weight: Matrix
) -> Float[np.ndarray, "R outputs"]:
    """Computes RMS norm and linear product of each row.

    Args:
      stream: Residual stream.
      eps: Epsilon of the norm; None to multiply the rows without a norm.
      weight: The weight.
    """
    rows = stream.rows if eps is None else layers.rms_norm(stream.rows, stream.norm, eps)
    return product(rows, weight)


def residual_product(
    x: Float[np.ndarray, "R inputs"], weight: Matrix
) -> Float[np.ndarray, "R outputs"]:
    """Computes `product` of the output projection of a mixer or an MLP.

    The inputs are added in segments; see `reduction_order.LinearOrder`.
    """
    segments = reduction_order.LINEAR.segments_of(x.shape[1], is_packed=weight.format.expands_dense)
    return _product_of_segments(x, weight, segments)


def linear_add(
    x: Float[np.ndarray, "R inputs"],
    weight: Matrix,
    stream: NormedStream,
    factor: float = 1.0,
    norm: Float[np.ndarray, " hidden"] | None = None,
) -> NormedStream:
    """Computes `residual_product` times a factor and adds it to the residual stream.

    Args:
      x: Rows.
      weight: The weight.
      stream: Residual stream.
      factor: Multiplier of the product.
      norm: Scale of the next norm of the stream.
    """
    rows = stream.rows + _times(residual_product(x, weight), factor)
    return stream.with_next_norm(rows, norm)


def act_and_mul_linear(
    stream: NormedStream,
    eps: float | None,
    weight: Matrix,
    activation: Activation = SILU_AND_MUL,
) -> Float[np.ndarray, "R intermediate"]:
    """Computes the activation of the normed rows, usually silu(gate) * up.

    The weight contains the gate rows, then the up rows; of an MLP without gate the up rows alone.
    """
    return layers.activated(rmsnorm_linear(stream, eps, weight), activation)


def _times(x: Float[np.ndarray, "R outputs"], factor: float) -> Float[np.ndarray, "R outputs"]:
    return x if factor == 1 else x * np.float32(factor)
