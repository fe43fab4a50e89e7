"""Checks of the `quantization_config` in a config.json: FP8 weights, in two spellings.

`fp8` is the spelling of the releases of DeepSeek, Qwen and Mistral and of AutoFP8;
`compressed-tensors` is the spelling of vLLM's tools. The stored tensors determine which weights are
FP8 and how they share scales (`shared.models.formats.fp8`). The config is only checked for
unsupported settings.
"""

from collections.abc import Collection, Mapping

from shared.models.config_fields import Json, object_of
from shared.models.formats.fp8 import BLOCK, Granularity

BLOCK_SIZE = [BLOCK, BLOCK]

FORMATS = ("float-quantized", "naive-quantized")
"""Names of unpacked FP8 in compressed-tensors."""

HINTS = ("modules_to_not_convert", "modules_to_convert", "ignored_layers", "ignore", "targets")
"""Lists of modules with and without scales, in the spellings of different tools."""

Served = dict[str, Collection[object]]
"""Supported values by field. Any other field must be empty."""

METHODS: Served = {"quant_method": ["fp8", "compressed-tensors"]}
FP8: Served = METHODS | {
    "fmt": [None, "e4m3", "e4m3fn", "float8_e4m3fn"],
    "weight_block_size": [None, BLOCK_SIZE],
    "activation_scheme": [None, "dynamic", "static"],
    "scale_fmt": [None, "float"],
    "expert_dtype": [None, "fp8"],
    "dequantize": [None, False, True],
}
COMPRESSED: Served = METHODS | {
    "format": FORMATS,
    "dequantize": [None, False, True],
    "use_optimized_inference": [None, False, True],
}
GROUP: Served = {"format": [None, *FORMATS]}
WEIGHTS: Served = {
    "num_bits": [8],
    "type": ["float"],
    "symmetric": [True],
    "strategy": ["channel", "tensor", "block"],
    "block_structure": [None, BLOCK_SIZE],
    "group_size": [None, -1],
}
ACTIVATIONS: Served = {"num_bits": [8], "type": ["float"]}

_READ_APART = ("config_groups", "sparsity_config")
_TOLD = ("quantization_status", "global_compression_ratio", "version", "run_compressed")
_GROUPS_PARTS = ("weights", "input_activations")
_MEASURED = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""Fields about calibration, and fields that duplicate properties of the tensors."""
_QUANTISED_INPUTS = ("strategy", "dynamic", "symmetric", "group_size", "block_structure")
"""Activation quantisation of W8A8 checkpoints, which is not read."""


def refuse_other_quantisation(stated: Json) -> None:
    """Checks that a `quantization_config` is supported.

    Raises:
      ValueError: It is not; the message names the field.
    """
    _require(stated, "quant_method", "")
    method = {"quant_method": stated["quant_method"]}
    _refuse_others(method, METHODS, (), "")
    if method["quant_method"] == "fp8":
        _refuse_others(stated, FP8, HINTS, "")
        return
    _refuse_others(stated, COMPRESSED, (*HINTS, *_READ_APART, *_TOLD), "")
    sparsity = object_of(stated, "sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise _refusal(f"with sparsity_config.format: {sparsity['format']!r}")
    _require(stated, "config_groups", "")
    for name, group in object_of(stated, "config_groups").items():
        place = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise _refusal(f"with {place}: {group!r}")
        _refuse_other_group(group, f"{place}.")


def granularity_of(stated: Json) -> Granularity:
    """Returns the scale granularity of a `quantization_config`, of the first group if it has
    groups.
    """
    if stated["quant_method"] == "fp8":
        return Granularity.BLOCK if stated.get("weight_block_size") else Granularity.TENSOR
    group = next(iter(object_of(stated, "config_groups").values()))
    return Granularity(group["weights"].get("strategy", "tensor"))


def _refuse_other_group(group: Json, place: str) -> None:
    _refuse_others(group, GROUP, (*HINTS, *_GROUPS_PARTS), place)
    _require(group, "weights", place)
    weights = object_of(group, "weights")
    _require(weights, "type", f"{place}weights.")
    _refuse_others(weights, WEIGHTS, _MEASURED, f"{place}weights.")
    inputs = object_of(group, "input_activations")
    _refuse_others(
        inputs, ACTIVATIONS, (*_MEASURED, *_QUANTISED_INPUTS), f"{place}input_activations."
    )


def _refuse_others(stated: Json, served: Served, hints: Collection[str], place: str) -> None:
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
            raise _refusal(f"with {place}{field}: {value!r}", must)


def _require(stated: Json, field: str, place: str) -> None:
    if not stated.get(field):
        raise _refusal(f"without {place}{field}")


def _refusal(what: str, must: str = "") -> ValueError:
    return ValueError(
        f"quantization_config {what} is not supported{must}; "
        "use an unquantised checkpoint, or one in FP8"
    )
