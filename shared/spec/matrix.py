"""Stored weight of a linear layer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from jaxtyping import Float, Int, Shaped

from shared.models.formats.plain import Plain
from shared.models.formats.weight_format import SCALES, VALUES, WeightFormat, first_row
from shared.spec.lora import RowAdapters


@dataclass(frozen=True)
class Matrix:
    """A stored weight `[out, in]` with an optional bias.

    The weights of a layer's experts are one matrix `[experts, out, in]`. Only the ops, here and in
    the backends, depend on the format.

    Attributes:
      format: Format of the planes; see `shared.models.formats`.
      planes: Arrays of the weight by name: `values`, and `scales` of quantised formats.
      bias: Bias of each output, or None.
      lora: Adapters of the rows that the weight multiplies; None without.
    """

    format: WeightFormat
    planes: Mapping[str, Shaped[np.ndarray, "..."]]
    bias: Float[np.ndarray, "*layers outputs"] | None = None
    lora: RowAdapters | None = None

    @classmethod
    def plain(
        cls,
        values: Float[np.ndarray, "*layers outputs inputs"],
        bias: Float[np.ndarray, "*layers outputs"] | None = None,
    ) -> "Matrix":
        """Returns an unquantised weight."""
        return cls(Plain(values.dtype.name), {VALUES: values}, bias)

    @property
    def values(self) -> Shaped[np.ndarray, "*layers outputs columns"]:
        """Elements of the weight, one row per output."""
        return self.planes[VALUES]

    @property
    def scales(self) -> Shaped[np.ndarray, "*layers scales scales_in"] | None:
        """Scales of a quantised weight."""
        return self.planes.get(SCALES)

    @property
    def num_outputs(self) -> int:
        """Outputs (rows) of the weight."""
        return self.values.shape[-2]

    def rows(self, first: int) -> "Matrix":
        """Returns the outputs from `first` on, at which a row of each plane must start.

        Only block heads, which have no adapters, leave out outputs.
        """
        assert not first or self.lora is None
        begins = partial(first_row, first, self.num_outputs)
        planes = {name: x[begins(len(x)) :] for name, x in self.planes.items()}
        return replace(self, planes=planes, bias=None if self.bias is None else self.bias[first:])

    def at(self, place: int) -> "Matrix":
        """Returns the weight of one layer of a stack, or of one expert of a layer."""
        planes = {name: x[place] for name, x in self.planes.items()}
        bias = None if self.bias is None else self.bias[place]
        lora = None if self.lora is None else self.lora.at(place)
        return replace(self, planes=planes, bias=bias, lora=lora)

    def of_rows(self, rows: Int[np.ndarray, " some"]) -> "Matrix":
        """Returns the weight with the adapters of some of the rows."""
        return self if self.lora is None else replace(self, lora=self.lora.of_rows(rows))


def widened(matrix: Matrix) -> Float[np.ndarray, "*experts outputs inputs"]:
    """Dequantises a weight; unquantised weights are unchanged."""
    return matrix.format.dequantize(matrix.planes)
