"""Spellings of FP8 weights in `quantization_config`.

`fp8` is the spelling of the releases of DeepSeek, Qwen and Mistral and of AutoFP8;
`compressed-tensors` is the spelling of vLLM's tools.
"""

from shared.models.config_fields import Json
from shared.models.formats.fp8 import BLOCK, Granularity
from shared.models.formats.fp8_encoding import FP8Encoding
from shared.models.formats.quantization_config import (
    HINTS,
    CompressedTensors,
    Served,
    refuse_others,
)

_BLOCK_SIZE = [BLOCK, BLOCK]


class FP8Spelling:
    """Spelling `fp8`; see `Spelling`."""

    method = "fp8"
    served: Served = {
        "quant_method": [method],
        "fmt": [None, "e4m3", "e4m3fn", "float8_e4m3fn"],
        "weight_block_size": [None, _BLOCK_SIZE],
        "activation_scheme": [None, "dynamic", "static"],
        "scale_fmt": [None, "float"],
        "expert_dtype": [None, "fp8"],
        "dequantize": [None, False, True],
    }

    def matches(self, stated: Json) -> bool:
        """Returns True: the method has one encoding."""
        return True

    def check(self, stated: Json) -> None:
        """Checks all fields but lists of modules."""
        refuse_others(stated, self.served, HINTS, "")

    def encoding(self, stated: Json) -> FP8Encoding:
        """Returns block scales, or per-tensor scales without a block size."""
        is_block = bool(stated.get("weight_block_size"))
        return FP8Encoding(Granularity.BLOCK if is_block else Granularity.TENSOR)


SPELLINGS = (
    FP8Spelling(),
    CompressedTensors(
        formats=("float-quantized", "naive-quantized"),
        weights={
            "num_bits": [8],
            "type": ["float"],
            "symmetric": [True],
            "strategy": ["channel", "tensor", "block"],
            "block_structure": [None, _BLOCK_SIZE],
            "group_size": [None, -1],
        },
        activations={"num_bits": [8], "type": ["float"]},
        read=lambda weights: FP8Encoding(Granularity(weights.get("strategy", "tensor"))),
    ),
)
