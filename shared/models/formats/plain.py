"""Unquantised weights: one plane of numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

from shared.models.formats.weight_format import ITEM_BYTES, PLAIN, VALUES, Array, Plane


@dataclass(frozen=True)
class Plain:
    """Format of unquantised weights of a dtype."""

    dtype: str
    name = PLAIN
    label = None
    padding = 0
    quantizes_activations = False
    expands_dense = False

    @property
    def item_bytes(self) -> int:
        """Bytes of a number."""
        return ITEM_BYTES[self.dtype]

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        """Returns the one plane."""
        return {VALUES: Plane(shape, self.dtype)}

    def dequantize(self, planes: Mapping[str, Array]) -> Array:
        """Returns the numbers unchanged."""
        return planes[VALUES]
