"""INT4 in checkpoints: readers of the packed tensors, and spellings in `quantization_config`.

A module `X` with a weight `[out, in]` is stored in one of three layouts. Codes have four bits,
eight in an int32.

| | compressed-tensors | GPTQ | AWQ (gemm) |
|---|---|---|---|
| codes | `X.weight_packed` `[out, in/8]` | `X.qweight` `[in/8, out]` | `X.qweight` `[in, out/8]` |
| scales | `X.weight_scale` `[out, groups]` | `X.scales` `[groups, out]` | the same |
| zero points | `X.weight_zero_point` `[out/8, groups]` | `X.qzeros`, symmetric only | `X.qzeros` |
| group of an input | `X.weight_g_idx` | `X.g_idx` | in order |

Sources: compressed-tensors 0.20.0, AutoGPTQ 0.7.1, AutoAWQ 0.2.9.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from shared.models.config_fields import Json
from shared.models.formats.four_bit import PARTS, unpack_in_order
from shared.models.formats.int4_encoding import GROUPS, Int4Encoding, Int4Tensor, dequantize
from shared.models.formats.quantization_config import CompressedTensors, Spelling
from shared.models.formats.weight_format import (
    SCALES,
    VALUES,
    ZEROS,
    Array,
    StoredTensor,
    TensorFiles,
)
from shared.models.parameter import CheckpointTensor
from shared.models.stored_tensor import DTYPE_BYTES, check_stored
from shared.models.weight_files import CheckpointError

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in an int32 of AWQ of each of eight neighbouring outputs, in units of four bits."""
SYMMETRIC = (0x77777777, 0x88888888 - 2**32)
"""Zero points of symmetric GPTQ weights, less 1 (`checkpoint_format` gptq) or as they are (v2)."""
_BYTES = {"I32": 4, "I64": 8, **DTYPE_BYTES}

Names = Mapping[str, str]
"""Names of the tensors of a weight by their role."""
Shape = tuple[int, ...]
Runs = tuple[tuple[int, int], ...]
"""Ranges (first, end) of outputs."""
Words = Int32[np.ndarray, "outputs words"]
Zeros = UInt8[np.ndarray, "outputs groups"]


class PackedLayout(ABC):
    """PackedLayout of INT4 weights in a checkpoint.

    Attributes:
      axis: Axis of the outputs in the tensors.
    """

    axis: int

    @abstractmethod
    def names(self, name: str, files: TensorFiles) -> Names:
        """Returns the stored tensors of a weight; none if it has another layout."""

    @abstractmethod
    def shapes(self, names: Names, outputs: int, inputs: int, groups: int) -> dict[str, Shape]:
        """Returns the shapes of codes, zero points and shapes, by role."""

    @abstractmethod
    def words(self, names: Names, files: TensorFiles, runs: Runs) -> Words:
        """Reads the codes of some outputs."""

    @abstractmethod
    def zeros(self, names: Names, files: TensorFiles, outputs: int) -> Zeros | None:
        """Reads the zero points of all outputs; None if they are `ZERO`."""


class CompressedTensorsLayout(PackedLayout):
    """PackedLayout `pack-quantized` of compressed-tensors."""

    axis = 0

    def names(self, name: str, files: TensorFiles) -> Names:
        """See `PackedLayout`."""
        if not files.has(f"{name}_packed"):
            return {}
        optional = {"shape": "_shape", "zeros": "_zero_point", "group_of": "_g_idx"}
        found = {"words": f"{name}_packed", "scales": f"{name}_scale"}
        return found | {x: f"{name}{y}" for x, y in optional.items() if files.has(f"{name}{y}")}

    def shapes(self, names: Names, outputs: int, inputs: int, groups: int) -> dict[str, Shape]:
        """See `PackedLayout`."""
        words = (outputs, -(-inputs // PARTS))
        return {"words": words, "zeros": (-(-outputs // PARTS), groups), "shape": (2,)}

    def words(self, names: Names, files: TensorFiles, runs: Runs) -> Words:
        """See `PackedLayout`."""
        return taken(names["words"], files, 0, runs)

    def zeros(self, names: Names, files: TensorFiles, outputs: int) -> Zeros | None:
        """See `PackedLayout`."""
        if "zeros" not in names:
            return None
        return unpack_in_order(files.tensor(names["zeros"]).T)[:, :outputs].T


class _Transposed(PackedLayout):
    """PackedLayout with `[in, out]` tensors.

    Attributes:
      packs_outputs: True if an int32 contains eight outputs of an input, not eight inputs.
    """

    axis = 1
    packs_outputs: bool

    def names(self, name: str, files: TensorFiles) -> Names:
        """See `PackedLayout`."""
        module = name.removesuffix(".weight")
        roles = {"words": "qweight", "scales": "scales", "zeros": "qzeros"}
        found = {role: f"{module}.{x}" for role, x in roles.items()}
        if not files.has(found["words"]):
            return {}
        columns, outputs = (files.header(found[x]).get_shape()[-1] for x in ("words", "scales"))
        if (columns != outputs) != self.packs_outputs:
            return {}
        group_of = f"{module}.g_idx"
        return found | ({"group_of": group_of} if files.has(group_of) else {})


class GPTQLayout(_Transposed):
    """PackedLayout of AutoGPTQ and GPTQModel, for symmetric weights."""

    packs_outputs = False

    def shapes(self, names: Names, outputs: int, inputs: int, groups: int) -> dict[str, Shape]:
        """See `PackedLayout`."""
        return {"words": (-(-inputs // PARTS), outputs), "zeros": (groups, -(-outputs // PARTS))}

    def words(self, names: Names, files: TensorFiles, runs: Runs) -> Words:
        """See `PackedLayout`."""
        return np.ascontiguousarray(taken(names["words"], files, 1, runs).T)

    def zeros(self, names: Names, files: TensorFiles, outputs: int) -> Zeros | None:
        """Returns None: all zero points are the same.

        Raises:
          CheckpointError: They are not; writers disagree on the meaning of others.
        """
        zeros = files.tensor(names["zeros"])
        if not any((zeros == each).all() for each in SYMMETRIC):
            raise CheckpointError(
                f"tensor {names['zeros']} has asymmetric zero points, which are not supported in "
                "GPTQ; use a checkpoint quantized with sym: true"
            )
        return None


class AWQLayout(_Transposed):
    """PackedLayout of AutoAWQ's version gemm."""

    packs_outputs = True

    def shapes(self, names: Names, outputs: int, inputs: int, groups: int) -> dict[str, Shape]:
        """See `PackedLayout`."""
        return {"words": (inputs, outputs // PARTS), "zeros": (groups, outputs // PARTS)}

    def words(self, names: Names, files: TensorFiles, runs: Runs) -> Words:
        """See `PackedLayout`."""
        parts = []
        for first, end in runs:
            whole = ((first // PARTS, -(-end // PARTS)),)
            words = in_rows(taken(names["words"], files, 1, whole))
            parts.append(words[first % PARTS :][: end - first])
        return np.concatenate(parts)

    def zeros(self, names: Names, files: TensorFiles, outputs: int) -> Zeros | None:
        """See `PackedLayout`."""
        codes = unpack_in_order(files.tensor(names["zeros"]))
        eights = codes.reshape(len(codes), -1, PARTS)
        return eights[..., AWQ_ORDER].reshape(len(codes), -1).T


def taken(name: str, files: TensorFiles, axis: int, runs: Runs) -> Array:
    """Reads some rows or columns of a tensor."""
    stored = files.header(name)
    parts = [stored[a:b] if axis == 0 else stored[:, a:b] for a, b in runs]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)


def in_rows(packed: Int32[np.ndarray, "inputs packed"]) -> Words:
    """Converts codes packed along outputs as in AWQ to codes packed along inputs."""
    inputs, columns = packed.shape
    words = np.empty((columns * PARTS, inputs // PARTS), np.uint32)
    eights = packed.view(np.uint32).reshape(-1, PARTS, columns)
    for output, place in enumerate(AWQ_ORDER):
        row = words[output::PARTS].T
        row[...] = 0
        for number in range(PARTS):
            code = eights[:, number] >> np.uint32(4 * place) & np.uint32(15)
            row |= code << np.uint32(4 * number)
    return words.view(np.int32)


LAYOUTS = (CompressedTensorsLayout(), GPTQLayout(), AWQLayout())


class Int4Reader:
    """Reader of INT4 tensors in all layouts; see `TensorReader`."""

    stored_as = "INT4 with scales"

    def companions(self, name: str, files: TensorFiles) -> tuple[str, ...]:
        """Returns the tensors that replace a weight, if it is INT4."""
        _, names = _layout(name, files)
        return tuple(names.values())

    def is_unused(self, name: str, files: TensorFiles) -> bool:
        """Returns True for a bias of zeros, which some programs write for every packed weight."""
        module, _, last = name.rpartition(".")
        is_packed = last == "bias" and bool(self.companions(f"{module}.weight", files))
        return is_packed and not files.tensor(name).any()

    def check_unquantised(self, source: CheckpointTensor, files: TensorFiles) -> None:
        """Accepts all tensors: unquantised weights have names of their own."""

    def check(self, source: CheckpointTensor, files: TensorFiles) -> None:
        """Raises `CheckpointError` for tensors of other shapes or types."""
        layout, names = _layout(source.name, files)
        outputs, inputs = source.shape
        counts = {1, *(inputs // group for group in GROUPS if inputs % group == 0)}
        allowed = [(outputs, count)[:: 1 - 2 * layout.axis] for count in sorted(counts)]
        check_stored(names["scales"], files.header(names["scales"]), allowed, DTYPE_BYTES)
        groups = _groups(layout, names, files)
        shapes = layout.shapes(names, outputs, inputs, groups) | {"group_of": (inputs,)}
        for role in [role for role in names if role != "scales"]:
            kind = "I64" if role == "shape" else "I32"
            check_stored(names[role], files.header(names[role]), [shapes[role]], (kind,))
        layout.zeros(names, files, outputs)

    def num_bytes(self, source: CheckpointTensor, files: TensorFiles) -> int:
        """Returns the stored bytes of the codes of a slice, and of all other tensors."""
        _, names = _layout(source.name, files)
        share = math.prod(source.taken_shape) / math.prod(source.shape)
        found = 0
        for role, name in names.items():
            header = files.header(name)
            count = _BYTES[header.get_dtype()] * math.prod(header.get_shape())
            found += round(count * share) if role == "words" else count
        return found

    def stored(self, source: CheckpointTensor, files: TensorFiles) -> StoredTensor:
        """Returns an INT4 tensor; its planes are those of `Int4Tensor`, of the slice."""
        layout, names = _layout(source.name, files)
        groups = _groups(layout, names, files)
        encoding = Int4Encoding(
            group=None if groups == 1 else -(-source.shape[1] // groups),
            scale_type=files.header(names["scales"]).get_dtype(),
            has_zeros=layout.zeros(names, files, source.shape[0]) is not None,
            is_permuted=_group_of(names, files, source.shape[1], groups) is not None,
        )

        def read(plane: str) -> Array:
            tensor = _read(source, files)
            if plane == ZEROS:
                assert tensor.zeros is not None  # `has_zeros`
                return tensor.zeros
            return {VALUES: tensor.words, SCALES: tensor.scales}[plane]

        return StoredTensor(source, encoding, read)

    def dequantized(
        self, source: CheckpointTensor, files: TensorFiles
    ) -> Float32[np.ndarray, "..."]:
        """Reads the slice; returns it in float32."""
        tensor, inputs = _read(source, files), source.shape[1]
        codes, scales, zeros = (
            unpack_in_order(tensor.words)[:, :inputs],
            tensor.scales,
            tensor.zeros,
        )
        if tensor.group_of is not None:
            scales = scales[:, tensor.group_of]
            zeros = None if zeros is None else zeros[:, tensor.group_of]
        return dequantize(codes, scales, zeros)


def _layout(name: str, files: TensorFiles) -> tuple[PackedLayout, Names]:
    """Returns the layout of a weight, and the names of its tensors; none if it is not INT4."""
    found = ((layout, layout.names(name, files)) for layout in LAYOUTS)
    return next(((x, names) for x, names in found if names), (LAYOUTS[0], {}))


def _groups(layout: PackedLayout, names: Names, files: TensorFiles) -> int:
    """Returns the number of groups."""
    return files.header(names["scales"]).get_shape()[1 - layout.axis]


def _group_of(
    names: Names, files: TensorFiles, inputs: int, groups: int
) -> Int32[np.ndarray, " inputs"] | None:
    """Reads the group of each input; None if groups are neighbouring inputs.

    Raises:
      CheckpointError: A group does not exist.
    """
    if "group_of" not in names:
        return None
    group_of = files.tensor(names["group_of"])
    if ((group_of < 0) | (group_of >= groups)).any():
        raise CheckpointError(
            f"tensor {names['group_of']} must contain groups from 0 to {groups - 1}"
        )
    in_order = np.arange(inputs) // -(-inputs // groups)
    return None if (group_of == in_order).all() else group_of


def _read(source: CheckpointTensor, files: TensorFiles) -> Int4Tensor:
    """Reads the outputs that a slice takes."""
    layout, names = _layout(source.name, files)
    outputs, inputs = source.shape
    runs = source.ranges or ((0, outputs),)
    scales = taken(names["scales"], files, layout.axis, runs)
    scales = scales if layout.axis == 0 else np.ascontiguousarray(scales.T)
    if not np.isfinite(scales.astype(np.float32)).all():
        raise CheckpointError(f"tensor {names['scales']} contains NaN or infinity")
    zeros = layout.zeros(names, files, outputs)
    if zeros is not None:
        zeros = np.concatenate([zeros[first:end] for first, end in runs])
    group_of = _group_of(names, files, inputs, scales.shape[1])
    return Int4Tensor(layout.words(names, files, runs), scales, zeros, group_of)


def _group(size: object) -> int | None:
    return size if isinstance(size, int) and size > 0 else None


def _of_compressed_tensors(weights: Json) -> Int4Encoding:
    return Int4Encoding(_group(weights.get("group_size")), "BF16", not weights.get("symmetric"))


SPELLINGS = (
    CompressedTensors(
        formats=("pack-quantized",),
        served={
            "num_bits": [4],
            "type": ["int"],
            "symmetric": [True, False],
            "strategy": ["group", "channel"],
            "group_size": [None, -1, *GROUPS],
            "actorder": [None, False, True, "group", "weight", "static"],
            "dynamic": [None, False],
        },
        activations={},
        read=_of_compressed_tensors,
    ),
    Spelling(
        method="gptq",
        served={
            "bits": [4],
            "group_size": [-1, *GROUPS],
            "sym": [True],
            "desc_act": [None, False, True],
            "checkpoint_format": [None, "gptq", "gptq_v2"],
            "pack_dtype": [None, "int32"],
            "is_marlin_format": [None, False],
        },
        read=lambda stated: Int4Encoding(_group(stated.get("group_size")), "F16", False),
        hints=(
            *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse"),
            *("model_name_or_path", "model_file_base_name", "meta", "dynamic", "lm_head"),
            *(
                "dataset",
                "tokenizer",
                "batch_size",
                "block_name_to_quantize",
                "cache_block_outputs",
            ),
            *(
                "module_name_preceding_first_block",
                "pad_token_id",
                "model_seqlen",
                "max_input_length",
            ),
            *("modules_in_block_to_quantize", "use_cuda_fp16", "exllama_config", "use_exllama"),
            *("disable_exllama", "backend"),
        ),
    ),
    Spelling(
        method="awq",
        served={
            "bits": [4],
            "group_size": [-1, *GROUPS],
            "zero_point": [True],
            "version": ["gemm", "GEMM"],
            "do_fuse": [None, False],
        },
        read=lambda stated: Int4Encoding(_group(stated.get("group_size")), "F16", True),
        hints=("backend", "fuse_max_seq_len", "modules_to_fuse", "exllama_config"),
    ),
)
