"""All weight formats in memory, and all encodings of checkpoint tensors.

A further format is a module with its class, in which parameters choose it, and an entry in
`CHOICES`. A further encoding has a module with its reader and an entry in `READERS`, and one with
its spelling in `shared.models.formats.spellings`. `jax_impl.formats.registry` and
`torch_impl.formats.registry` list the operations of the formats on a device.
"""

from collections.abc import Sequence

from shared.models.formats.fp8_checkpoint import FP8Reader
from shared.models.formats.fp8_w8a8 import FP8W8A8
from shared.models.formats.fp8_w8a16 import FP8W8A16
from shared.models.formats.weight_format import (
    FormatChoice,
    FormatContext,
    QuantizedFormat,
    StoredTensors,
    TensorReader,
)
from shared.models.parameter import Parameter

CHOICES: tuple[FormatChoice, ...] = (FP8W8A8, FP8W8A16)
"""Quantised formats in memory, in the order in which a parameter tries them."""

READERS: tuple[TensorReader, ...] = (FP8Reader(),)
"""Encodings of checkpoint tensors, in the order in which they are tried."""


def choose_formats(
    parameters: Sequence[Parameter], stored: StoredTensors, context: FormatContext
) -> dict[str, QuantizedFormat]:
    """Returns the formats of the parameters that stay quantised, by name.

    All other parameters are dequantised when loaded.

    Args:
      parameters: Parameters of a rank.
      stored: Returns the tensors of a parameter.
      context: Flags and device.

    Raises:
      UnsupportedFormatError: A flag requires a format that the device does not support.
    """
    found: dict[str, QuantizedFormat] = {}
    for choice in CHOICES:
        for parameter in (p for p in parameters if p.name not in found):
            if (chosen := choice.choose(parameter, stored, context)) is not None:
                found[parameter.name] = chosen
    return found
