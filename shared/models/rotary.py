"""The rotation of queries and keys by their positions, and how a config.json spells it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.models.fields import Json, number, object_of, positive

ROTARY_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary embedding settings.

    Attributes:
      theta: Base of the frequencies.
      width: Rotated dimensions of a head; the rest pass through.
      type: One of "default", "linear", "llama3", "yarn"; "none" of layers that do not turn.
      factor: By how much positions are stretched (linear, llama3, yarn).
      low_freq_factor, high_freq_factor: Bounds of the llama3 ramp.
      original_context: Context length the model was first trained with (llama3, yarn).
      beta_fast, beta_slow: Rotations at the two ends of the yarn ramp.
      attention_factor: Multiplies cos and sin; 1 except for yarn.
    """

    theta: float
    width: int
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


def read_rotary(text: Json, head_size: int, default_share: float) -> RotaryConfig:
    """Merges the old spelling, `rope_scaling` and `rope_theta`, and the new, `rope_parameters`."""
    rope = {**object_of(text, "rope_scaling"), **object_of(text, "rope_parameters")}
    rope = {name: value for name, value in rope.items() if value is not None}
    if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        raise ValueError(f"rope_parameters by layer type ({nested[0]}) are not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "mrope":  # the old name of plain rotation with three-row positions
        kind = "default"
    if kind not in ROTARY_TYPES:
        raise ValueError(
            f"rope_type {kind!r} is not supported; known are {', '.join(ROTARY_TYPES)}"
        )
    share, theta = (
        number(rope, field, number(text, field, default))
        for field, default in (("partial_rotary_factor", default_share), ("rope_theta", 10000.0))
    )
    plain = {"theta": theta, "width": int(head_size * share), "type": kind}
    return RotaryConfig(**plain) if kind == "default" else _scaled_rotary(text, rope, plain)


def _scaled_rotary(text: Json, rope: Json, plain: dict[str, Any]) -> RotaryConfig:
    kind = plain["type"]
    for field in ("mscale", "mscale_all_dim"):
        if rope.get(field):
            raise ValueError(
                f"{field} in the rotary settings is not supported; give attention_factor"
            )
    if rope.get("truncate") is False:
        raise ValueError("truncate: false in the rotary settings is not supported")
    if "factor" not in rope:
        raise ValueError(f"the rotary settings of rope_type {kind!r} need a factor")
    factor = number(rope, "factor", 1.0)
    context = positive(text, "max_position_embeddings")
    return RotaryConfig(
        **plain,
        factor=factor,
        low_freq_factor=number(rope, "low_freq_factor", 1.0),
        high_freq_factor=number(rope, "high_freq_factor", 4.0),
        original_context=positive(rope, "original_max_position_embeddings", context),
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        attention_factor=number(rope, "attention_factor", _attention_factor(kind, factor)),
    )


def _attention_factor(kind: str, factor: float) -> float:
    """Where none is given."""
    return 0.1 * math.log(factor) + 1.0 if kind == "yarn" and factor > 1 else 1.0
