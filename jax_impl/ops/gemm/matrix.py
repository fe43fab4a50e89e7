"""Stored weight of a linear layer; same as `shared.spec.matrix`."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
from jaxtyping import Float, Shaped

from jax_impl.formats.registry import dequantized
from jax_impl.ops import Place
from jax_impl.ops.gemm.lora import RowAdapters
from shared.models.formats.plain import Plain
from shared.models.formats.weight_format import SCALES, VALUES, WeightFormat, first_row


class Matrix(NamedTuple):
    """Stored weight `[out, in]` with an optional bias.

    Attributes:
      format, planes: Format, and arrays of the weight by name; see `shared.models.formats`.
      layer: Index of the weight if the planes are stacks `[layers, out, in]`; `bias` is a stack
        then. A kernel reads the stack in place; a slice would be copied.
      lora: Adapters of the rows; None without.
    """

    format: WeightFormat
    planes: Mapping[str, Shaped[jax.Array, "..."]]
    layer: Place | None = None
    bias: Float[jax.Array, "*layers outputs"] | None = None
    lora: RowAdapters | None = None

    @classmethod
    def plain(
        cls,
        values: Float[jax.Array, "*layers outputs inputs"],
        layer: Place | None = None,
        bias: Float[jax.Array, "*layers outputs"] | None = None,
    ) -> "Matrix":
        return cls(Plain(values.dtype.name), {VALUES: values}, layer, bias)

    @property
    def values(self) -> Shaped[jax.Array, "*layers outputs columns"]:
        return self.planes[VALUES]

    @property
    def scales(self) -> Shaped[jax.Array, "*layers scales scales_in"] | None:
        return self.planes.get(SCALES)

    @property
    def alone(self) -> "Matrix":
        if self.layer is None:
            return self
        bias = None if self.bias is None else self.bias[self.layer]
        planes = {name: self.planes[name][self.layer] for name in reversed([*self.planes])}
        return Matrix(self.format, planes, None, bias, self.lora)

    @property
    def num_outputs(self) -> int:
        return self.values.shape[-2]

    def rows(self, first: int) -> "Matrix":
        assert not first or self.lora is None
        weight, begins = self.alone, partial(first_row, first, self.num_outputs)
        planes = {name: x[begins(len(x)) :] for name, x in weight.planes.items()}
        bias = None if weight.bias is None else weight.bias[first:]
        return weight._replace(planes=planes, bias=bias)

    def at(self, place: Place) -> "Matrix":
        where = place if self.layer is None else (self.layer, place)
        planes = {name: x[where] for name, x in self.planes.items()}
        bias = None if self.bias is None else self.bias[where]
        return Matrix(self.format, planes, None, bias, self.lora and self.lora.at(place))


def _flatten(matrix: Matrix) -> tuple[tuple[Any, ...], Any]:
    """Returns the arrays of a weight in the order of program arguments, and its structure."""
    values, *others = matrix.planes.values()
    arrays = (values, matrix.layer, matrix.bias, matrix.lora, *others)
    return arrays, (matrix.format, *matrix.planes)


jax.tree_util.register_pytree_node(
    Matrix,
    _flatten,
    lambda s, x: Matrix(s[0], dict(zip(s[1:], (x[0], *x[4:]), strict=True)), x[1], x[2], x[3]),
)


def widened(matrix: Matrix) -> Float[jax.Array, "*layers outputs inputs"]:
    return dequantized(matrix.format, matrix.planes)
