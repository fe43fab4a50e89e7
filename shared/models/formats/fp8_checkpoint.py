"""FP8 in checkpoints: reader of the tensors, and spellings in `quantization_config`.

`shared.models.formats.fp8` describes the tensors. `fp8` is the spelling of the releases of
DeepSeek, Qwen and Mistral and of AutoFP8; `compressed-tensors` is the spelling of vLLM's tools;
`modelopt` is that of NVIDIA's releases.
"""

import math

import numpy as np
from jaxtyping import Float32, UInt8

from shared.models.formats import fp8
from shared.models.formats.fp8 import BLOCK, Granularity
from shared.models.formats.fp8_encoding import FP8Encoding
from shared.models.formats.quantization_config import CompressedTensors, Spelling
from shared.models.formats.weight_format import VALUES, Array, StoredTensor, TensorFiles
from shared.models.parameter import CheckpointTensor
from shared.models.parameter_arrays import slice_tensor
from shared.models.stored_tensor import DTYPE_BYTES, check_stored
from shared.models.weight_files import CheckpointError

_BLOCK_SIZE = [BLOCK, BLOCK]


class FP8Reader:
    """Reader of FP8 tensors; see `TensorReader`."""

    stored_as = f"{fp8.STORED} with scales"

    def companions(self, name: str, files: TensorFiles) -> tuple[str, ...]:
        """Returns the name of a tensor's scales, if it has any."""
        names = (f"{name}{suffix}" for suffix in fp8.SCALE_SUFFIXES if files.has(name))
        return tuple(scales for scales in names if files.has(scales))[:1]

    def is_unused(self, name: str, files: TensorFiles) -> bool:
        """Returns True for the activation scales of an FP8 weight, and for scales of KV."""
        module, _, last = name.rpartition(".")
        if name.endswith(fp8.OF_KV):
            return files.has(f"{module}.weight")
        return last in fp8.OF_ACTIVATIONS and bool(self.companions(f"{module}.weight", files))

    def check_unquantised(self, source: CheckpointTensor, files: TensorFiles) -> None:
        """Raises `CheckpointError` for FP8 values without scales."""
        if len(source.shape) > 1 and files.header(source.name).get_dtype() == fp8.STORED:
            name = source.name
            expected = " or ".join(f"{name}{suffix}" for suffix in fp8.SCALE_SUFFIXES)
            raise CheckpointError(
                f"the checkpoint has no tensor {expected}, the scales of {name}, which is stored "
                f"as {fp8.STORED}; use a checkpoint with them"
            )

    def check(self, source: CheckpointTensor, files: TensorFiles) -> None:
        """Raises `CheckpointError` for invalid values or scales."""
        (scales,) = self.companions(source.name, files)
        check_stored(source.name, files.header(source.name), [source.shape], (fp8.STORED,))
        if len(source.shape) < 2:
            raise CheckpointError(
                f"tensor {scales} is not supported: only matrices may have scales"
            )
        check_stored(scales, files.header(scales), fp8.stored_shapes(source.shape), DTYPE_BYTES)

    def num_bytes(self, source: CheckpointTensor, files: TensorFiles) -> int:
        """Returns the bytes of a slice and of all scales of its tensor."""
        header = files.header(*self.companions(source.name, files))
        item = DTYPE_BYTES[header.get_dtype()]
        return math.prod(source.taken_shape) + item * math.prod(header.get_shape())

    def stored(self, source: CheckpointTensor, files: TensorFiles) -> StoredTensor:
        """Returns an FP8 tensor; the shape of its scales determines their granularity."""
        (scales,) = self.companions(source.name, files)
        shape = tuple(files.header(scales).get_shape())
        encoding = FP8Encoding(fp8.stored_shapes(source.shape)[shape])

        def read(plane: str) -> Array:
            return _values(source, files) if plane == VALUES else files.tensor(scales)

        return StoredTensor(source, encoding, read)

    def dequantized(
        self, source: CheckpointTensor, files: TensorFiles
    ) -> Float32[np.ndarray, "..."]:
        """Reads the whole tensor; returns the slice in float32."""
        (scales,) = self.companions(source.name, files)
        whole = _values(source.whole, files)
        return slice_tensor(source, fp8.dequantize(whole, files.tensor(scales)))


def _values(source: CheckpointTensor, files: TensorFiles) -> UInt8[np.ndarray, "..."]:
    """Reads FP8 values, which must not be NaN."""
    values = files.bytes_of(source)
    if fp8.has_nan(values):
        raise CheckpointError(f"tensor {source.name} contains NaN")
    return values


SPELLINGS = (
    Spelling(
        method="fp8",
        served={
            "fmt": [None, "e4m3", "e4m3fn", "float8_e4m3fn"],
            "weight_block_size": [None, _BLOCK_SIZE],
            "activation_scheme": [None, "dynamic", "static"],
            "scale_fmt": [None, "float", "ue8m0"],
            "expert_dtype": [None, "fp8"],
            "dequantize": [None, False, True],
        },
        read=lambda stated: FP8Encoding(
            Granularity.BLOCK if stated.get("weight_block_size") else Granularity.TENSOR
        ),
    ),
    Spelling(
        method="modelopt",
        served={"quant_algo": ["FP8"]},
        read=lambda stated: FP8Encoding(Granularity.TENSOR),
        hints=("config_groups", "producer", "kv_cache_scheme"),
    ),
    CompressedTensors(
        formats=("float-quantized", "naive-quantized"),
        served={
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
