"""Sampling defaults of a model, from its generation_config.json."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shared.models.config_fields import Json
from shared.models.file_kind import GENERATION_FILE
from shared.models.model_folder import ModelFolder
from shared.models.neutral import GENERATION, WRITTEN

_BOUNDS = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (-1, 1 << 31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 2.0),
}


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """Default of each sampling field that a request may omit; without a file, those of OpenAI's
    API.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_folder(cls, folder: ModelFolder) -> "SamplingDefaults":
        """Reads the defaults of a checkpoint.

        Raises:
          ValueError: A value is invalid; the message names the field.
        """
        path, stated = folder.path / GENERATION_FILE, folder.generation_config
        named = [field.name for field in fields(cls) if stated.get(field.name) is not None]
        return cls(**{name: _checked(stated, name, path) for name in named})

    def __str__(self) -> str:
        """Formats the fields that differ from OpenAI's defaults."""
        ours, theirs = vars(self), vars(SamplingDefaults())
        return ", ".join(f"{name} {ours[name]}" for name in ours if ours[name] != theirs[name])


def unapplied(generation_config: Json) -> list[str]:
    """Returns the fields of a generation_config.json that are not applied though they have an
    effect.

    Args:
      generation_config: Contents of the file.
    """
    beside = WRITTEN | {field.name for field in fields(SamplingDefaults)}
    return [
        name
        for name, value in generation_config.items()
        if name not in beside and not name.startswith("_") and _asks(name, value)
    ]


def _asks(name: str, value: Any) -> bool:
    if name == "do_sample":
        return value is False
    return bool(value) and value != GENERATION.get(name)


def _checked(stated: Json, name: str, path: Path) -> Any:
    value, (low, high) = stated[name], _BOUNDS[name]
    kinds = (int,) if name == "top_k" else (int, float)
    if type(value) not in kinds or not low <= value <= high:
        raise ValueError(
            f"{name} in {path} must be a number from {low} to {high}, got {value!r:.60}; correct "
            "it or start with --sampling-defaults openai"
        )
    return value
