"""All encodings of checkpoint tensors, with the weight formats in memory that read them.

A further encoding has a module with its reader, spellings and formats, an entry in `QUANTIZATIONS`
and a name in `shared.models.formats.names`. A further format of an encoding is one more class in
its entry. `jax_impl.formats.registry` and `torch_impl.formats.registry` list the operations of the
formats on a device.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shared.models.config_fields import Json
from shared.models.formats.fp8_checkpoint import SPELLINGS as FP8_SPELLINGS
from shared.models.formats.fp8_checkpoint import FP8Reader
from shared.models.formats.fp8_w8a8 import FP8W8A8
from shared.models.formats.fp8_w8a16 import FP8W8A16
from shared.models.formats.int4_checkpoint import SPELLINGS as INT4_SPELLINGS
from shared.models.formats.int4_checkpoint import Int4Reader
from shared.models.formats.int4_w4a16 import Int4W4A16
from shared.models.formats.mxfp4 import MXFP4W4A16, SPELLING, MXFP4Reader
from shared.models.formats.names import FP8, INT4, MXFP4
from shared.models.formats.quantization_config import Spelling, refuse_others, require
from shared.models.formats.weight_format import (
    FormatContext,
    QuantizedFormat,
    StoredTensors,
    TensorEncoding,
    TensorReader,
)
from shared.models.parameter import Parameter


class Quantization(NamedTuple):
    """Encoding of checkpoint tensors.

    Attributes:
      reader: Reader of the tensors from files.
      spellings: Spellings in `quantization_config`.
      formats: Formats in memory, in the order in which a parameter tries them.
    """

    reader: TensorReader
    spellings: tuple[Spelling, ...]
    formats: tuple[type[QuantizedFormat], ...]


QUANTIZATIONS = {
    FP8: Quantization(FP8Reader(), FP8_SPELLINGS, (FP8W8A8, FP8W8A16)),
    INT4: Quantization(Int4Reader(), INT4_SPELLINGS, (Int4W4A16,)),
    MXFP4: Quantization(MXFP4Reader(), (SPELLING,), (MXFP4W4A16,)),
}
"""Encodings by name, in the order in which they are tried."""


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
    kept = [parameter for parameter in parameters if not parameter.is_dequantized]
    for format in (each for kind in QUANTIZATIONS.values() for each in kind.formats):
        for parameter in (p for p in kept if p.name not in found):
            if (chosen := format.choose(parameter, stored, context)) is not None:
                found[parameter.name] = chosen
    return found


def readers() -> list[TensorReader]:
    """Returns the readers of all encodings."""
    return [kind.reader for kind in QUANTIZATIONS.values()]


def refuse_other_quantisation(stated: Json) -> None:
    """Checks that a `quantization_config` is supported.

    Raises:
      ValueError: It is not; the message names the field.
    """
    require(stated, "quant_method", "")
    method = {"quant_method": stated["quant_method"]}
    known = dict.fromkeys(spelling.method for spelling in _spellings())
    refuse_others(method, {"quant_method": known.keys()}, (), "")
    _spelling(stated).check(stated)


def encoding_of(stated: Json) -> TensorEncoding:
    """Returns the encoding that a supported `quantization_config` declares."""
    return _spelling(stated).encoding(stated)


def _spellings() -> list[Spelling]:
    return [spelling for kind in QUANTIZATIONS.values() for spelling in kind.spellings]


def _spelling(stated: Json) -> Spelling:
    """Returns the first spelling that matches a config; without a match the first of its method."""
    named = [each for each in _spellings() if each.method == stated["quant_method"]]
    return next((each for each in named if each.matches(stated)), named[0])
