"""Record of the operations that a weight format has on a device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

Planes = Mapping[str, jax.Array]
"""Planes of a weight by name; see `shared.models.formats.weight_format`."""


@dataclass(frozen=True)
class FormatOps:
    """Operations of a weight format.

    Attributes:
      dequantized: Returns the numbers of a weight.
      converted: Converts elements from the order of the checkpoint to that of their plane.
      dummy: Generates the planes of a dummy parameter, or of a rank's shard, for a format.
    """

    dequantized: Callable[[Planes], jax.Array]
    converted: Callable[[jax.Array], jax.Array]
    dummy: Callable[[Any, Any, jax.Device], Planes]
