"""Stored weight of a linear layer; same as `shared.spec.matrix`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from jaxtyping import Float, Shaped
from torch import Tensor

from shared.models.formats.plain import Plain
from shared.models.formats.weight_format import SCALES, VALUES, WeightFormat, first_row
from torch_impl.formats.registry import dequantized
from torch_impl.ops.gemm.lora import RowAdapters


@dataclass(frozen=True)
class Matrix:
    """Stored weight `[out, in]` with an optional bias, and the adapters of the rows."""

    format: WeightFormat
    planes: Mapping[str, Shaped[Tensor, "..."]]
    bias: Float[Tensor, "*layers outputs"] | None = None
    lora: RowAdapters | None = None

    @classmethod
    def plain(
        cls,
        values: Float[Tensor, "*layers outputs inputs"],
        bias: Float[Tensor, "*layers outputs"] | None = None,
    ) -> "Matrix":
        return cls(Plain(str(values.dtype).removeprefix("torch.")), {VALUES: values}, bias)

    @property
    def values(self) -> Shaped[Tensor, "*layers outputs columns"]:
        return self.planes[VALUES]

    @property
    def scales(self) -> Shaped[Tensor, "*layers scales scales_in"] | None:
        return self.planes.get(SCALES)

    @property
    def num_outputs(self) -> int:
        return self.values.shape[-2]

    def rows(self, first: int) -> "Matrix":
        assert not first or self.lora is None
        begins = partial(first_row, first, self.num_outputs)
        planes = {name: x[begins(len(x)) :] for name, x in self.planes.items()}
        return replace(self, planes=planes, bias=None if self.bias is None else self.bias[first:])

    def at(self, place: int) -> "Matrix":
        planes = {name: x[place] for name, x in self.planes.items()}
        bias = None if self.bias is None else self.bias[place]
        lora = None if self.lora is None else self.lora.at(place)
        return replace(self, planes=planes, bias=bias, lora=lora)


def widened(matrix: Matrix) -> Float[Tensor, "*experts outputs inputs"]:
    return dequantized(matrix.format, matrix.planes)
