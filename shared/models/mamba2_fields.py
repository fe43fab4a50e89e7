"""Reads the Mamba2 layers of a model from the fields of its config.json."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.models.activation import SCALED_SILU, Activation
from shared.models.config_fields import Json, flag, is_number, listed, number, positive
from shared.models.layers import LayerConfig
from shared.models.mixers import AttentionConfig, Mamba2Config
from shared.models.mixers.gated_delta import CONV_WIDTH
from shared.models.mixers.mamba2 import OutputNorm
from shared.models.mlp import MLPConfig
from shared.models.rotary import LAYER_TYPES

FULL, _, LINEAR = LAYER_TYPES

_TYPES = {"attention": FULL, FULL: FULL, "mamba": LINEAR, LINEAR: LINEAR}
"""Mixer type of each spelling in `layer_types`."""


@dataclass(frozen=True)
class Mamba2Fields:
    """Fields of a family with Mamba2 layers.

    Attributes:
      layers: Field of the mixers: a list of types, or of the indices of attention layers; None if
        every layer has attention, and Mamba2 in parallel.
    """

    layers: str | None


def read_mamba2(text: Json) -> Mamba2Config:
    """Reads the config of Mamba2 layers.

    Args:
      text: Fields of a config.json with defaults for absent ones.

    Raises:
      ValueError: A field is missing or has an unsupported value.
    """
    if (width := text["mamba_d_conv"]) != CONV_WIDTH:
        raise ValueError(f"mamba_d_conv must be {CONV_WIDTH}, got {width}")
    _refuse_limit(text)
    heads, groups = positive(text, "mamba_n_heads"), positive(text, "mamba_n_groups")
    if text["mamba_d_head"] == "auto":
        text = {**text, "mamba_d_head": _inner_width(text) // heads}
    size = positive(text, "mamba_d_head")
    if "mamba_expand" in text and heads * size != _inner_width(text):
        raise ValueError(
            f"mamba_n_heads ({heads}) times mamba_d_head ({size}) must equal the inner width of "
            f"{_inner_width(text)}: mamba_d_ssm, or mamba_expand times hidden_size"
        )
    return Mamba2Config(
        num_heads=heads,
        head_size=size,
        num_groups=groups,
        state_size=positive(text, "mamba_d_state"),
        conv_bias=flag(text, "mamba_conv_bias"),
        input_bias=flag(text, "mamba_proj_bias"),
        out_bias=flag(text, "mamba_proj_bias"),
        norm=OutputNorm.AFTER_GATE,
        norm_size=heads * size // groups,
    )


def _inner_width(text: Json) -> int:
    if "mamba_d_ssm" in text and text["mamba_d_ssm"] is not None:
        return positive(text, "mamba_d_ssm")
    return positive(text, "mamba_expand") * positive(text, "hidden_size")


def parallel_layers(text: Json, layers: Sequence[LayerConfig]) -> list[LayerConfig]:
    """Adds Mamba2 to attention layers, and the multipliers of their parts.

    The multipliers of keys and of the attention's input scale the scores and the output.

    Raises:
      ValueError: A field is invalid, or layers have multipliers and biases.
    """
    names = ("attention_in", "attention_out", "key", "ssm_in", "ssm_out")
    into, out, key, ssm_in, ssm_out = (number(text, f"{name}_multiplier") for name in names)
    mlp, parts = _multipliers(text, "mlp_multipliers", 2), _multipliers(text, "ssm_multipliers", 5)
    biases = [x for x in _BIASES if flag(text, x)]
    if biases and {into, out, key, ssm_in, ssm_out, *mlp, *parts} != {1.0}:
        raise ValueError(
            f"{biases[0]}: true is not supported with multipliers of layers; use a checkpoint "
            f"with {biases[0]}: false"
        )
    kind, norm = OutputNorm.NONE, flag(text, "mamba_norm_before_gate")
    if flag(text, "mamba_rms_norm"):
        kind = OutputNorm.BEFORE_GATE if norm else OutputNorm.AFTER_GATE
    parallel = replace(
        read_mamba2(text),
        out_bias=flag(text, "projectors_bias"),
        norm=kind,
        input_factors=tuple(ssm_in * part for part in parts),
        out_factor=ssm_out,
    )
    found = []
    for each in layers:
        assert isinstance(each.mixer, AttentionConfig)  # the family has no other
        assert isinstance(each.mlp, MLPConfig)
        scale = each.mixer.head_size**-0.5 * key * into**2
        mixer = replace(each.mixer, scale=scale, out_factor=into * out)
        scaled = Activation(SCALED_SILU, alpha=mlp[0], factor=mlp[1])
        feed = replace(each.mlp, activation=scaled)
        found.append(LayerConfig(mixer=mixer, mlp=feed, parallel=parallel))
    return found


_BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")


def _multipliers(text: Json, field: str, count: int) -> tuple[float, ...]:
    stated = text[field]
    if stated is None:
        return (1.0,) * count
    is_list = isinstance(stated, list) and len(stated) == count
    if not is_list or not all(is_number(x, (int, float)) for x in stated):
        raise ValueError(f"{field} must list {count} numbers, got {stated!r:.60}")
    return tuple(map(float, stated))


def _refuse_limit(text: Json) -> None:
    """Checks that time steps are not clamped."""
    limit = text["time_step_limit"]
    if limit is None:
        return
    # transformers writes infinity as an object, because JSON has no such number.
    ends = [x.get("__float__") if isinstance(x, dict) else x for x in limit]
    if [str(x) for x in ends] not in (["0", "inf"], ["0.0", "inf"], ["0.0", "Infinity"]):
        raise ValueError(
            f"time_step_limit must be [0, Infinity], got {limit!r:.60}; use a checkpoint with time "
            "steps that are not clamped"
        )


def mixer_types(text: Json, fields: Mamba2Fields, num_layers: int) -> list[str]:
    """Returns the mixer type of each layer, in the terms of `rotary.LAYER_TYPES`.

    Raises:
      ValueError: The list of layers is invalid.
    """
    if fields.layers is None:
        return [FULL] * num_layers
    if fields.layers != "layer_types":
        attending = listed(text, fields.layers, int) or []
        return [FULL if i in attending else LINEAR for i in range(num_layers)]
    types = listed(text, fields.layers, str) or [LINEAR] * num_layers
    if unknown := sorted({*types} - _TYPES.keys()):
        raise ValueError(f"layer_types contains {unknown[0]!r}; supported are {', '.join(_TYPES)}")
    if len(types) != num_layers:
        raise ValueError(
            f"layer_types lists {len(types)} layers, num_hidden_layers is {num_layers}"
        )
    return [_TYPES[each] for each in types]
