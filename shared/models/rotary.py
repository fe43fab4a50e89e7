"""The rotation of queries and keys by their positions, and how a config.json spells it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.models.fields import LARGEST, Json, is_number, listed, number, object_of, positive, word

ROTARY_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary embedding settings.

    Attributes:
      theta: Base of the frequencies.
      width: Rotated dimensions of a head; the rest pass through.
      type: One of `ROTARY_TYPES`; "none" of layers that do not turn.
      factor: By how much positions are stretched (linear, llama3, yarn).
      low_freq_factor, high_freq_factor: Bounds of the llama3 ramp.
      original_context: Context length the model was first trained with (llama3, yarn).
      beta_fast, beta_slow: Rotations at the two ends of the yarn ramp.
      extensions: By how much each pair is stretched (longrope).
      attention_factor: Multiplies cos and sin; 1 except for yarn and longrope.
      sections: Of models that see, how many pairs turn by time, by row and by column; in text all
        three are the position.
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
    extensions: tuple[float, ...] = ()
    attention_factor: float = 1.0
    sections: tuple[int, ...] = ()


OLDER = {"mrope": "default", "su": "longrope"}
"""Other names of types: plain rotation with three-row positions, and what longrope was called."""


def settings_of(text: Json) -> dict[str, Any]:
    """Merges the old spelling, `rope_scaling`, and the new, `rope_parameters`."""
    rope = {**object_of(text, "rope_scaling"), **object_of(text, "rope_parameters")}
    return {name: value for name, value in rope.items() if value is not None}


def read_rotary(
    text: Json, head_size: int, default_share: float, context_length: int
) -> RotaryConfig:
    """The rotation that a config.json asks for.

    Args:
      default_share: Of a head's dimensions that turn, where the file states none.
      context_length: Of the longest text that is served. It settles what longrope stretches by: a
        choice by each text's own length would change the rotation of keys that are kept already.
    """
    rope = settings_of(text)
    if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        raise ValueError(f"rope_parameters by layer type ({nested[0]}) are not supported")
    stated = word(rope, "rope_type", word(rope, "type", "default"))
    kind = OLDER.get(stated, stated)
    if kind not in ROTARY_TYPES:
        raise ValueError(
            f"rope_type {kind!r} is not supported; known are {', '.join(ROTARY_TYPES)}"
        )
    share, theta = (
        number(rope, field, number(text, field, default, *bounds), *bounds)
        for field, default, bounds in (
            ("partial_rotary_factor", default_share, (0, 1)),
            ("rope_theta", 10000.0, (1, LARGEST)),
        )
    )
    plain = {"theta": theta, "width": int(head_size * share), "type": kind}
    if plain["width"] % 2:
        raise ValueError(
            f"partial_rotary_factor ({share:g}) of a head's {head_size} dimensions must turn an "
            f"even number, got {plain['width']}"
        )
    if rope.get("mrope_interleaved") is True:
        plain["sections"] = _sections(rope, plain["width"] // 2)
    if kind == "longrope":
        return _long_rotary(text, rope, plain, context_length)
    return RotaryConfig(**plain) if kind == "default" else _scaled_rotary(text, rope, plain)


def read_growth(text: Json, rotary: RotaryConfig) -> float:
    """See `AttentionConfig.query_growth`; 0 where the rotary settings state none.

    Args:
      rotary: What was read of them.
    """
    rope, field = settings_of(text), "llama_4_scaling_beta"
    if rope.get(field, 0) == 0:
        return 0.0
    if not rotary.original_context:
        raise ValueError(
            f"{field} is not supported with rope_type {rotary.type!r}; queries grow from "
            "original_max_position_embeddings on, which it does not have"
        )
    return number(rope, field, 0.0)


def turned_layers(text: Json, num_layers: int) -> list[bool]:
    """Which layers turn, in order; a 1 in the config's list says that a layer does.

    Raises:
      ValueError: The list is of other layers, or of something else; one sentence.
    """
    turns = listed(text, "no_rope_layers", int)
    if turns is None:
        interval = positive(text, "no_rope_layer_interval", 4)
        return [(i + 1) % interval > 0 for i in range(num_layers)]
    if len(turns) != num_layers:
        raise ValueError(
            f"no_rope_layers lists {len(turns)} layers, num_hidden_layers is {num_layers}"
        )
    if other := {*turns} - {0, 1}:
        raise ValueError(f"no_rope_layers must list 0 or 1 for each layer, got {min(other)}")
    return [each == 1 for each in turns]


def _sections(rope: Json, pairs: int) -> tuple[int, ...]:
    """None where they are not those of a model that sees; its text turns the same without."""
    stated = rope.get("mrope_section")
    if not isinstance(stated, list) or not all(is_number(x, int) and x > 0 for x in stated):
        return ()
    return tuple(stated) if len(stated) == 3 and sum(stated) == pairs else ()


def _long_rotary(
    text: Json, rope: Json, plain: dict[str, Any], context_length: int
) -> RotaryConfig:
    """Source: LongRoPE, Ding et al. 2024, arXiv:2402.13753."""
    most = positive(text, "max_position_embeddings")
    original = positive({**text, **rope}, "original_max_position_embeddings", most)
    for field in ("short_mscale", "long_mscale"):
        if field in rope:
            raise ValueError(
                f"{field} in the rotary settings is not supported; give attention_factor"
            )
    name = "long_factor" if context_length > original else "short_factor"
    extensions, pairs = rope.get(name), plain["width"] // 2
    if not isinstance(extensions, list) or len(extensions) != pairs:
        raise ValueError(f"{name} in the rotary settings must list {pairs} numbers")
    if original == 1:  # its logarithm divides
        raise ValueError("original_max_position_embeddings must be above 1 for longrope, got 1")
    factor = number(rope, "factor", most / original)
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RotaryConfig(
        **plain,
        original_context=original,
        extensions=tuple(number({name: each}, name, 1.0) for each in extensions),
        attention_factor=number(rope, "attention_factor", grown),
    )


def _scaled_rotary(text: Json, rope: Json, plain: dict[str, Any]) -> RotaryConfig:
    kind = plain["type"]
    if ("mscale" in rope) != ("mscale_all_dim" in rope):
        raise ValueError(
            "mscale without mscale_all_dim, or the other way, in the rotary settings is not "
            "supported; give attention_factor"
        )
    if rope.get("truncate") is False:
        raise ValueError("truncate: false in the rotary settings is not supported")
    if "factor" not in rope:
        raise ValueError(f"the rotary settings of rope_type {kind!r} need a factor")
    factor = number(rope, "factor", 1.0)
    context = positive(text, "max_position_embeddings")
    low = number(rope, "low_freq_factor", 1.0)
    return RotaryConfig(
        **plain,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=number(rope, "high_freq_factor", 4.0, above=low),
        original_context=positive(rope, "original_max_position_embeddings", context),
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        attention_factor=number(rope, "attention_factor", _attention_factor(kind, rope, factor)),
    )


def _attention_factor(kind: str, rope: Json, factor: float) -> float:
    """Where none is given; two scales, as some files have them, are one over the other."""
    if kind != "yarn" or factor <= 1:
        return 1.0
    scales = (number(rope, name, 1.0) for name in ("mscale", "mscale_all_dim"))
    above, below = (0.1 * scale * math.log(factor) + 1.0 for scale in scales)
    return above / below if "mscale" in rope else above
