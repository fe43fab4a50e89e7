"""Spellings of all encodings in `quantization_config`."""

from shared.models.config_fields import Json
from shared.models.formats import fp8_config
from shared.models.formats.quantization_config import Spelling, refuse_others, require
from shared.models.formats.weight_format import TensorEncoding

SPELLINGS: tuple[Spelling, ...] = fp8_config.SPELLINGS
"""Spellings; of one method, the first that matches a config reads it."""


def refuse_other_quantisation(stated: Json) -> None:
    """Checks that a `quantization_config` is supported.

    Raises:
      ValueError: It is not; the message names the field.
    """
    require(stated, "quant_method", "")
    method = {"quant_method": stated["quant_method"]}
    known = dict.fromkeys(spelling.method for spelling in SPELLINGS)
    refuse_others(method, {"quant_method": known.keys()}, (), "")
    _spelling(stated).check(stated)


def encoding_of(stated: Json) -> TensorEncoding:
    """Returns the encoding that a supported `quantization_config` declares."""
    return _spelling(stated).encoding(stated)


def _spelling(stated: Json) -> Spelling:
    """Returns the spelling of a config; without a match the first of its method."""
    named = [each for each in SPELLINGS if each.method == stated["quant_method"]]
    return next((each for each in named if each.matches(stated)), named[0])
