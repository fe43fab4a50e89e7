"""Supported names, dtypes and shapes of checkpoint tensors."""

from collections.abc import Collection
from typing import Any

from shared.models.vision_config import TENSORS
from shared.models.weight_files import CheckpointError

PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",
    "backbone.",
)
"""Prefixes of tensor names in released checkpoints; the first that matches is removed."""

UNNEEDED = (
    *(TENSORS, "vision_tower.", "audio_tower.", "multi_modal_projector.", "embed_vision."),
    *("embed_audio.", "vision_embedder.", "rotary_emb."),
)
"""Substrings of tensor names that a text model does not need."""

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element by the supported dtypes of unquantised tensors and of scales."""


def without_prefix(name: str) -> str:
    """Returns the tensor name without the prefix of its release."""
    return next((name[len(p) :] for p in PREFIXES if name.startswith(p)), name)


def check_stored(
    name: str,
    header: Any,
    shapes: Collection[tuple[int, ...]],
    dtypes: Collection[str],
    others: Collection[str] = (),
) -> None:
    """Checks the shape and the dtype of a tensor.

    Args:
      name: Name of the tensor.
      header: Header of the tensor from the safetensors library.
      shapes, dtypes: Supported shapes and dtypes.
      others: Supported encodings that the tensor does not have, for the message.

    Raises:
      CheckpointError: The shape or dtype is not supported.
    """
    got, dtype = tuple(header.get_shape()), header.get_dtype()
    if got not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(f"tensor {name} has shape {list(got)}, expected {expected}")
    if dtype not in dtypes:
        alternatives = "".join(f", or in {each}" for each in others)
        raise CheckpointError(
            f"tensor {name} is stored as {dtype}; use a checkpoint in one of "
            f"{', '.join(dtypes)}{alternatives}"
        )
