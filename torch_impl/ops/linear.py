"""As `shared.spec.linear`, in torch."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from torch_impl.ops import layers


@dataclass(frozen=True)
class Matrix:
    """As the specification's."""

    values: Float[Tensor, "outputs inputs"]


@dataclass(frozen=True)
class Stream:
    """As the specification's."""

    rows: Float[Tensor, "R hidden"]


def product(x: Float[Tensor, "R inputs"], weight: Matrix) -> Float[Tensor, "R outputs"]:
    return functional.linear(x, weight.values)


def product_float32(x: Float[Tensor, "R inputs"], weight: Matrix) -> Float[Tensor, "R outputs"]:
    """As the specification: the sums, which are float32, are not rounded to the type of `x`."""
    if x.is_cuda:
        return torch.mm(x, weight.values.t(), out_dtype=torch.float32)
    return functional.linear(x.float(), weight.values.float())  # a CPU has no such product


def normed_product(
    stream: Stream, norm: Float[Tensor, " hidden"], eps: float, weight: Matrix
) -> Float[Tensor, "R outputs"]:
    return product(layers.rms_norm(stream.rows, norm, eps), weight)


def added_product(x: Float[Tensor, "R inputs"], weight: Matrix, stream: Stream) -> Stream:
    return Stream(stream.rows + product(x, weight))


def gated_product(
    stream: Stream, norm: Float[Tensor, " hidden"], eps: float, weight: Matrix
) -> Float[Tensor, "R intermediate"]:
    gate, up = normed_product(stream, norm, eps, weight).chunk(2, dim=-1)
    return layers.silu(gate) * up
