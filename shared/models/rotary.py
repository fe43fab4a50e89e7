"""Rotary position embedding (RoPE) config, and its fields in a config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.models.config_classes.config_class import ConfigClass
from shared.models.config_fields import (
    CONFIG,
    Json,
    flag,
    is_number,
    listed,
    number,
    object_of,
    positive,
    word,
)

ROTARY_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary embedding settings.

    Attributes:
      theta: Base of the frequencies.
      width: Rotated dimensions of a head; the others are not changed.
      type: One of `ROTARY_TYPES`; "none" for NoPE layers.
      factor: Scaling factor of positions (linear, llama3, yarn, proportional).
      low_freq_factor, high_freq_factor: Bounds of the llama3 ramp.
      original_context: Context length before extension (llama3, yarn).
      beta_fast, beta_slow: Rotations at the two ends of the yarn ramp.
      truncates: True if the ends of the yarn ramp are rounded to whole pairs.
      rotated_pairs: Pairs that are rotated, from the first one on; the others have frequency 0
        (proportional).
      extensions: Scaling factor of each pair (longrope).
      attention_factor: Multiplier of cos and sin; 1 except for yarn and longrope.
      interleaved: True if dimensions 2 i and 2 i + 1 form a pair; else i and i + width / 2.
      sections: M-RoPE sections of vision-language models: number of pairs rotated by time, row and
        column; for text all three equal the position.
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
    truncates: bool = True
    rotated_pairs: int = 0
    extensions: tuple[float, ...] = ()
    attention_factor: float = 1.0
    interleaved: bool = False
    sections: tuple[int, ...] = ()


OLDER = {"mrope": "default", "su": "longrope"}
"""Older names of types: default rotation with M-RoPE positions, and longrope."""


LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention")
"""Names under which rotary settings may be nested, one object for each layer type."""

OBJECTS = ("rope_scaling", "rope_parameters")
"""Older and newer field of rotary settings."""

BASE = "rope_theta"

FACTOR, ROTATED = "partial_rotary_factor", "rotary_dim"
"""Fraction of a head that is rotated, and the rotated dimensions in the files of some families."""

BESIDE = (BASE, FACTOR, "original_max_position_embeddings")
"""Rotary settings that may also be at the top level of a config.json."""


def settings_of(text: Json, layer_type: str = LAYER_TYPES[0]) -> dict[str, Any]:
    """Returns the stated rotary settings of a layer type under their canonical names.

    They may be in `rope_scaling` or `rope_parameters`, nested by layer type or not, and some at the
    top level.

    Raises:
      ValueError: Two spellings of a setting have different values.
    """
    found: dict[str, Any] = {}
    origins: dict[str, str] = {}
    objects = {name: object_of(text, name) for name in OBJECTS}
    places = {name: _spelled(_of_type(x, layer_type, name), name) for name, x in objects.items()}
    places[CONFIG] = {name: text[name] for name in BESIDE if text.get(name) is not None}
    for place, settings in places.items():
        for name, value in settings.items():
            if name in found and found[name] != value:
                raise ValueError(
                    f"{name} in {place} is {value!r:.60} and {name} in {origins[name]} is "
                    f"{found[name]!r:.60}; remove one of them"
                )
            found.setdefault(name, value)
            origins.setdefault(name, place)
    return found


def are_nested(text: Json) -> bool:
    """Returns True if rotary settings are nested by layer type."""
    return any(
        isinstance(value, Mapping) for name in OBJECTS for value in object_of(text, name).values()
    )


def _of_type(stated: Json, layer_type: str, place: str) -> Json:
    """Returns the settings of a layer type if they are nested, else all of them."""
    if not any(isinstance(value, Mapping) for value in stated.values()):
        return stated
    for name, value in stated.items():
        if name not in LAYER_TYPES or not isinstance(value, Mapping | None):
            raise ValueError(
                f"{name} in {place} must not be next to settings by layer type, which may be "
                f"{', '.join(LAYER_TYPES)}"
            )
    return stated.get(layer_type) or {}


def _spelled(stated: Json, place: str) -> dict[str, Any]:
    """Returns rotary settings with the newer names of the types, and without null values."""
    found = {name: value for name, value in stated.items() if value is not None}
    for name in found.keys() & {"type", "rope_type"}:
        kind = word(found, name, "", place)
        found[name] = OLDER.get(kind, kind)
    older = found.pop("type", None)
    if older is not None and found.setdefault("rope_type", older) != older:
        raise ValueError(
            f"type and rope_type in {place} must be equal, got {older!r} and "
            f"{found['rope_type']!r}; remove one of them"
        )
    return found


def completed_settings(text: Json, of: ConfigClass, layer_type: str) -> dict[str, Any]:
    """Returns the rotary settings of a layer type, with the defaults of its config class.

    Raises:
      ValueError: See `settings_of`.
    """
    if default := of.fields.get("rope_parameters"):
        # transformers 5.0 wrote the base of other classes next to the settings of such a class.
        text = {name: value for name, value in text.items() if (name, value) != (BASE, of.theta)}
        if not any(object_of(text, name) for name in OBJECTS):
            text[OBJECTS[1]] = default
    if ROTATED in of.extras and text.get(ROTATED) is not None:
        text = _with_factor(text, of)
    original = of.fields.get("original_max_position_embeddings")
    is_local = of.local_theta is not None and layer_type == LAYER_TYPES[1]
    return {
        "rope_type": "default",
        "rope_theta": of.local_theta if is_local else of.theta,
        "partial_rotary_factor": of.rotated,
        "mrope_interleaved": bool(of.sections),
        "mrope_section": of.sections,
        **({} if original is None else {"original_max_position_embeddings": original}),
        **settings_of(text, layer_type),
    }


def _with_factor(text: Json, of: ConfigClass) -> dict[str, Any]:
    """Replaces the number of rotated dimensions by their fraction.

    Raises:
      ValueError: Another fraction is stated.
    """
    share = positive(text, ROTATED) / positive(of.completed(text), "head_dim")
    if text.get(FACTOR, share) != share:
        raise ValueError(
            f"{ROTATED} and {FACTOR} in {CONFIG} must name the same dimensions, got "
            f"{text[ROTATED]} and {text[FACTOR]}; remove one of them"
        )
    return {**text, FACTOR: share}


def read_rotary(text: Json, rope: Json, head_size: int, context_length: int) -> RotaryConfig:
    """Reads the rotary config of a layer type.

    Args:
      text: Fields of the config.json with defaults for absent ones.
      rope: Rotary settings, from `completed_settings`.
      head_size: Size of an attention head.
      context_length: Maximum tokens of a request. It selects the factors of longrope for all
        requests: a choice by the length of each request would change the rotation of keys that are
        cached already.
    """
    kind = rope["rope_type"]
    if kind not in ROTARY_TYPES:
        raise ValueError(
            f"rope_type {kind!r} is not supported; use one of {', '.join(ROTARY_TYPES)}"
        )
    share = number(rope, "partial_rotary_factor", most=1)
    theta = number(rope, "rope_theta", above=1)
    if kind == "proportional":
        pairs, factor = int(share * head_size // 2), number(rope, "factor", 1.0)
        how = {"type": kind, "factor": factor, "rotated_pairs": pairs}
        return RotaryConfig(theta=theta, width=head_size, **how)
    plain = {"theta": theta, "width": int(head_size * share), "type": kind}
    if plain["width"] % 2:
        raise ValueError(
            f"partial_rotary_factor ({share:g}) of a head's {head_size} dimensions must give an "
            f"even number, got {plain['width']}"
        )
    if rope.get("mrope_interleaved") is True:
        plain["sections"] = _sections(rope, plain["width"] // 2)
    if kind == "longrope":
        return _long_rotary(text, rope, plain, context_length)
    return RotaryConfig(**plain) if kind == "default" else _scaled_rotary(text, rope, plain)


def read_query_scaling(rope: Json, rotary: RotaryConfig) -> float:
    """Reads the factor of long-context query scaling; 0 if the rotary settings have none.

    Args:
      rope: The rotary settings.
      rotary: The rotary config read from them.
    """
    field = "llama_4_scaling_beta"
    if rope.get(field, 0) == 0:
        return 0.0
    if not rotary.original_context:
        raise ValueError(
            f"{field} is not supported with rope_type {rotary.type!r}, which has no "
            "original_max_position_embeddings"
        )
    return number(rope, field)


def read_score_factor(rope: Json, rotary: RotaryConfig) -> float:
    """Reads the factor that YaRN's `mscale_all_dim` gives to attention scores; 1 without it.

    Args:
      rope: The rotary settings.
      rotary: The rotary config read from them.
    """
    if rotary.type == "default" or "mscale_all_dim" not in rope:
        return 1.0
    return _mscale(number(rope, "mscale_all_dim"), rotary.factor) ** 2


def rope_layers(text: Json, num_layers: int) -> list[bool]:
    """Returns a flag per layer: True if it has a rotary embedding, False for NoPE.

    Raises:
      ValueError: `no_rope_layers` has the wrong length or invalid values.
    """
    turns = listed(text, "no_rope_layers", int)
    if turns is None:
        interval = positive(text, "no_rope_layer_interval")
        return [(i + 1) % interval > 0 for i in range(num_layers)]
    if len(turns) != num_layers:
        raise ValueError(
            f"no_rope_layers lists {len(turns)} layers, num_hidden_layers is {num_layers}"
        )
    if other := {*turns} - {0, 1}:
        raise ValueError(f"no_rope_layers must list 0 or 1 for each layer, got {min(other)}")
    return [each == 1 for each in turns]


def _sections(rope: Json, pairs: int) -> tuple[int, ...]:
    """Returns the M-RoPE sections: pairs rotated by time, row and column; empty if none are stated.

    The stated numbers may be those of wider heads; time has the remaining pairs.
    """
    stated = rope.get("mrope_section")
    if not isinstance(stated, list) or not all(is_number(x, int) and x > 0 for x in stated):
        return ()
    if len(stated) != 3:
        return ()
    rows, columns = (len(range(i, min(3 * stated[i], pairs), 3)) for i in (1, 2))
    return pairs - rows - columns, rows, columns


def _long_rotary(
    text: Json, rope: Json, plain: dict[str, Any], context_length: int
) -> RotaryConfig:
    """Source: LongRoPE, Ding et al. 2024, arXiv:2402.13753."""
    most = positive(text, "max_position_embeddings")
    original = positive(rope, "original_max_position_embeddings", most)
    for field in ("short_mscale", "long_mscale"):
        if field in rope:
            raise ValueError(
                f"{field} in the rotary settings is not supported; give attention_factor"
            )
    name = "long_factor" if context_length > original else "short_factor"
    extensions, pairs = rope.get(name), plain["width"] // 2
    if not isinstance(extensions, list) or len(extensions) != pairs:
        raise ValueError(f"{name} in the rotary settings must list {pairs} numbers")
    if original == 1:  # avoids a division by log(1)
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
    if "factor" not in rope:
        raise ValueError(f"rotary settings of rope_type {kind!r} require a factor")
    factor = number(rope, "factor")
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
        truncates=flag(rope, "truncate", True),
        attention_factor=number(rope, "attention_factor", _attention_factor(kind, rope, factor)),
    )


def _attention_factor(kind: str, rope: Json, factor: float) -> float:
    """Returns the default attention factor; with two mscale values, their quotient."""
    if kind != "yarn":
        return 1.0
    scales = (number(rope, name, 1.0) for name in ("mscale", "mscale_all_dim"))
    above, below = (_mscale(scale, factor) for scale in scales)
    return above / below if "mscale" in rope else above


def _mscale(scale: float, factor: float) -> float:
    """Returns the factor of YaRN for a context that is `factor` times the original one."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
