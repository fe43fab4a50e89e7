"""Spellings of `quantization_config` in config.json, and checks of their fields.

The stored tensors determine which weights are quantised, and the shape of their scales. The config
is only checked for unsupported settings; dummy weights take their encoding from it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from shared.models.config_fields import Json, object_of
from shared.models.formats.names import ENCODINGS
from shared.models.formats.weight_format import TensorEncoding

Served = dict[str, Collection[object]]
"""Supported values by field. Any other field must be empty."""

HINTS = ("modules_to_not_convert", "modules_to_convert", "ignored_layers", "ignore", "targets")
"""Lists of modules with and without scales, in the spellings of different tools."""

_READ_APART = ("config_groups", "sparsity_config")
_TOLD = ("quantization_status", "global_compression_ratio", "version", "run_compressed")
_GROUPS_PARTS = ("weights", "input_activations")
_MEASURED = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""Fields about calibration, and fields that duplicate properties of the tensors."""
_QUANTISED_INPUTS = ("strategy", "dynamic", "symmetric", "group_size", "block_structure")
"""Activation quantisation of W8A8 checkpoints, which is not read."""


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """Spelling of one encoding in `quantization_config`.

    Attributes:
      method: Value of `quant_method`.
      served: Supported fields but lists of modules.
      read: Returns the encoding of checked fields.
      hints: Fields about calibration, and settings of other programs, which are not read.
    """

    method: str
    served: Served
    read: Callable[[Json], TensorEncoding]
    hints: tuple[str, ...] = ()

    def matches(self, stated: Json) -> bool:
        """Returns True if a config of this method declares the encoding."""
        return True

    def check(self, stated: Json) -> None:
        """Raises `ValueError` for the first unsupported field."""
        refuse_others(
            stated, {"quant_method": [self.method], **self.served}, (*HINTS, *self.hints), ""
        )

    def encoding(self, stated: Json) -> TensorEncoding:
        """Returns the encoding of a checked config."""
        return self.read(stated)


@dataclass(frozen=True, kw_only=True)
class CompressedTensors(Spelling):
    """Spelling of vLLM's tools: groups of modules; `served` and `read` are of their `weights`.

    Attributes:
      formats: Values of `format`.
      activations: Supported fields of a group's `input_activations`.
    """

    method: str = "compressed-tensors"
    formats: tuple[str, ...]
    activations: Served

    def matches(self, stated: Json) -> bool:
        """Returns True for one of the formats."""
        return stated.get("format") in self.formats

    def check(self, stated: Json) -> None:
        """Checks the config and each group; see `Spelling`."""
        served: Served = {
            "quant_method": [self.method],
            "format": self.formats,
            "dequantize": [None, False, True],
            "use_optimized_inference": [None, False, True],
        }
        refuse_others(stated, served, (*HINTS, *_READ_APART, *_TOLD), "")
        sparsity = object_of(stated, "sparsity_config")
        if sparsity.get("format", "dense") != "dense":
            raise refusal(f"with sparsity_config.format: {sparsity['format']!r}")
        require(stated, "config_groups", "")
        for name, group in object_of(stated, "config_groups").items():
            place = f"config_groups.{name}"
            if not isinstance(group, Mapping):
                raise refusal(f"with {place}: {group!r}")
            self._check_group(group, f"{place}.")

    def encoding(self, stated: Json) -> TensorEncoding:
        """Returns the encoding of the first group."""
        group = next(iter(object_of(stated, "config_groups").values()))
        return self.read(group["weights"])

    def _check_group(self, group: Json, place: str) -> None:
        served: Served = {"format": [None, *self.formats]}
        refuse_others(group, served, (*HINTS, *_GROUPS_PARTS), place)
        require(group, "weights", place)
        weights = object_of(group, "weights")
        require(weights, "type", f"{place}weights.")
        refuse_others(weights, self.served, _MEASURED, f"{place}weights.")
        inputs, ignored = object_of(group, "input_activations"), (*_MEASURED, *_QUANTISED_INPUTS)
        refuse_others(inputs, self.activations, ignored, f"{place}input_activations.")


def refuse_others(stated: Json, served: Served, hints: Collection[str], place: str) -> None:
    """Raises an error for the first field with an unsupported value.

    Args:
      stated: Fields of the object.
      served: Supported values by field.
      hints: Fields with arbitrary values.
      place: Path of the object in `quantization_config`, a prefix of field names in messages.
    """
    for field, value in stated.items():
        if field in hints or (not value and field not in served):
            continue
        if value not in served.get(field, ()):
            expected = " or ".join(repr(x) for x in served.get(field, ()) if x is not None)
            must = f"; it must be {expected}" if expected else ""
            raise refusal(f"with {place}{field}: {value!r}", must)


def require(stated: Json, field: str, place: str) -> None:
    """Raises an error for a missing or empty field; for `place` see `refuse_others`."""
    if not stated.get(field):
        raise refusal(f"without {place}{field}")


def refusal(what: str, must: str = "") -> ValueError:
    """Returns the error for an unsupported setting, with the supported values in `must`."""
    return ValueError(
        f"quantization_config {what} is not supported{must}; "
        f"use an unquantised checkpoint, or one in {' or '.join(map(str.upper, ENCODINGS))}"
    )
