"""The names, types and shapes that a tensor of a checkpoint may have."""

from collections.abc import Collection
from typing import Any

import ml_dtypes
import numpy as np

from shared.models import fp8
from shared.models.safetensors_file import CheckpointError
from shared.models.vision import TENSORS

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""Prefixes of names in released checkpoints; the first that fits is removed."""

UNNEEDED = (TENSORS, "vision_tower.", "multi_modal_projector.", "rotary_emb.")
"""Parts of names of tensors that a text model does without."""

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def without_prefix(name: str) -> str:
    """The name used here of a tensor of a released checkpoint."""
    return next((name[len(p) :] for p in PREFIXES if name.startswith(p)), name)


def check_stored(
    name: str, header: Any, shapes: Collection[tuple[int, ...]], dtypes: Collection[str]
) -> None:
    """Checks the shape and the type of a tensor.

    Args:
      header: What the library knows of it without its values.
      shapes, dtypes: Those that it may have.

    Raises:
      CheckpointError: It has another; one sentence with its name.
    """
    got, dtype = tuple(header.get_shape()), header.get_dtype()
    if got not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(f"the tensor {name} has shape {list(got)}, expected {expected}")
    if dtype not in dtypes:
        can_be_fp8 = dtypes is DTYPES and len(got) > 1 and not name.endswith(fp8.SCALES)
        others = f", or in {fp8.STORED} with scales" if can_be_fp8 else ""
        raise CheckpointError(
            f"the tensor {name} is stored as {dtype}; "
            f"use a checkpoint in one of {', '.join(dtypes)}{others}"
        )


def missing_scales(name: str) -> CheckpointError:
    """The fault of an FP8 weight that has no scales."""
    expected = " or ".join(f"{name}{end}" for end in fp8.SCALES)
    return CheckpointError(
        f"the checkpoint has no tensor {expected}, the scales of {name}, which is stored as "
        f"{fp8.STORED}; use a checkpoint with them"
    )
