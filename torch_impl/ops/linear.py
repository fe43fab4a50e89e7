"""As `shared.spec.linear`, in torch.

On a GPU the products of bfloat16 are kernels; see `torch_impl.ops`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from shared.spec.numerics import SQUARES
from torch_impl.ops import Kernels, is_bfloat16, kernel_or_plain, kernels_on, layers


@dataclass(frozen=True)
class Matrix:
    """As the specification's."""

    values: Float[Tensor, "outputs inputs"]
    bias: Float[Tensor, " outputs"] | None = None

    @property
    def num_outputs(self) -> int:
        return len(self.values)

    def rows(self, first: int) -> "Matrix":
        return Matrix(self.values[first:], None if self.bias is None else self.bias[first:])


@dataclass(frozen=True)
class Stream:
    """As the specification's."""

    rows: Float[Tensor, "R hidden"]
    squares: Float[Tensor, "R chunks"] | None = None


def plain_stream(rows: Float[Tensor, "R hidden"]) -> Stream:
    return Stream(rows)


def kernel_stream(kernels: Kernels, rows: Float[Tensor, "R hidden"]) -> Stream:
    return Stream(rows, _squares(kernels, Stream(rows)))


stream = kernel_or_plain(kernel_stream, plain_stream, is_bfloat16)


def plain_product(
    x: Float[Tensor, "R inputs"], weight: Matrix, first: int = 0
) -> Float[Tensor, "R outputs"]:
    weight = weight.rows(first)
    return functional.linear(x, weight.values, weight.bias)


def kernel_product(
    kernels: Kernels, x: Float[Tensor, "R inputs"], weight: Matrix, first: int = 0
) -> Float[Tensor, "R outputs"]:
    return _multiplied(kernels, x, weight.rows(first)).rows


product = kernel_or_plain(kernel_product, plain_product, is_bfloat16)


def plain_product_float32(
    x: Float[Tensor, "R inputs"], weight: Matrix, factor: float = 1.0
) -> Float[Tensor, "R outputs"]:
    """As the specification: the sums, which are float32, are not rounded to the type of `x`."""
    if x.is_cuda:
        sums = torch.mm(x, weight.values.t(), out_dtype=torch.float32)
    else:  # a CPU has no such product
        sums = functional.linear(x.float(), weight.values.float())
    return _times(sums if weight.bias is None else sums + weight.bias, factor)


def kernel_product_float32(
    kernels: Kernels, x: Float[Tensor, "R inputs"], weight: Matrix, factor: float = 1.0
) -> Float[Tensor, "R outputs"]:
    return _multiplied(kernels, x, weight, factor=factor, out_type=torch.float32).rows


product_float32 = kernel_or_plain(kernel_product_float32, plain_product_float32, is_bfloat16)


def plain_normed_product(
    stream: Stream, norm: Float[Tensor, " hidden"] | None, eps: float | None, weight: Matrix
) -> Float[Tensor, "R outputs"]:
    rows = stream.rows if eps is None else layers.rms_norm(stream.rows, norm, eps)
    return product(rows, weight)


def kernel_normed_product(
    kernels: Kernels,
    stream: Stream,
    norm: Float[Tensor, " hidden"] | None,
    eps: float | None,
    weight: Matrix,
) -> Float[Tensor, "R outputs"]:
    if norm is not None or eps is None:
        return plain_normed_product(stream, norm, eps, weight)
    squares = _squares(kernels, stream)
    return _multiplied(kernels, stream.rows, weight, squares=squares, eps=eps).rows


normed_product = kernel_or_plain(kernel_normed_product, plain_normed_product, is_bfloat16)


def plain_added_product(
    x: Float[Tensor, "R inputs"], weight: Matrix, stream: Stream, factor: float = 1.0
) -> Stream:
    return Stream(stream.rows + _times(product(x, weight), factor))


def kernel_added_product(
    kernels: Kernels,
    x: Float[Tensor, "R inputs"],
    weight: Matrix,
    stream: Stream,
    factor: float = 1.0,
) -> Stream:
    return _multiplied(kernels, x, weight, factor=factor, added=stream.rows)


added_product = kernel_or_plain(kernel_added_product, plain_added_product, is_bfloat16)


def added_norm(
    x: Float[Tensor, "R hidden"], norm: Float[Tensor, " hidden"], eps: float, stream: Stream
) -> Stream:
    return Stream(stream.rows + layers.rms_norm(x, norm, eps))


def plain_gated_product(
    stream: Stream, norm: Float[Tensor, " hidden"] | None, eps: float | None, weight: Matrix
) -> Float[Tensor, "R intermediate"]:
    gate, up = normed_product(stream, norm, eps, weight).chunk(2, dim=-1)
    return layers.silu(gate) * up


def kernel_gated_product(
    kernels: Kernels,
    stream: Stream,
    norm: Float[Tensor, " hidden"] | None,
    eps: float | None,
    weight: Matrix,
) -> Float[Tensor, "R intermediate"]:
    if norm is not None or eps is None:
        rows = stream.rows if eps is None else layers.rms_norm(stream.rows, norm, eps)
        return _multiplied(kernels, rows, weight, is_gated=True).rows
    squares = _squares(kernels, stream)
    return _multiplied(kernels, stream.rows, weight, squares=squares, eps=eps, is_gated=True).rows


gated_product = kernel_or_plain(kernel_gated_product, plain_gated_product, is_bfloat16)


def _times(x: Float[Tensor, "R outputs"], factor: float) -> Float[Tensor, "R outputs"]:
    return x if factor == 1 else x * factor


def _squares(kernels: Kernels, stream: Stream) -> Float[Tensor, "R chunks"]:
    if stream.squares is not None:
        return stream.squares
    return kernels.layers.chunks_of_squares(stream.rows, order=SQUARES)


def _multiplied(
    kernels: Kernels,
    x: Float[Tensor, "R inputs"],
    weight: Matrix,
    *,
    out_type: torch.dtype | None = None,
    squares: Float[Tensor, "R chunks"] | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    factor: float = 1.0,
    added: Float[Tensor, "R outputs"] | None = None,
) -> Stream:
    stored, inputs = weight.values.shape
    outputs = stored // 2 if is_gated else stored
    tiles = kernels.tiles.linear.of(
        rows=len(x), outputs=outputs, inputs=inputs, gated=int(is_gated)
    )
    out, sums = kernels.linear.product(
        x.contiguous(),
        weight.values,
        out_type=out_type or x.dtype,
        squares=squares,
        eps=eps,
        is_gated=is_gated,
        bias=weight.bias,
        factor=factor,
        added=added,
        order=SQUARES,
        tiles=tiles,
    )
    return Stream(out, sums)


def scaled(
    values: Float[Tensor, "outputs inputs"], norm: Float[Tensor, " inputs"]
) -> Float[Tensor, "outputs inputs"]:
    """As the specification, in place: a second copy of all weights would not find room."""
    return values.mul_(norm)  # in float32, and rounded once


def folds_norms(x: Tensor) -> bool:
    """Whether the products of such an array want the scales of norms in their weights."""
    return kernels_on(x.device) is not None and is_bfloat16(x)
