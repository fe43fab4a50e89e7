"""Reads the Mamba2 layers of a model from the fields of its config.json."""

from dataclasses import dataclass

from shared.models.config_fields import Json, flag, listed, positive
from shared.models.mixers import Mamba2Config
from shared.models.mixers.gated_delta import CONV_WIDTH
from shared.models.mixers.mamba2 import OutputNorm
from shared.models.rotary import LAYER_TYPES

FULL, _, LINEAR = LAYER_TYPES

_TYPES = {"attention": FULL, FULL: FULL, "mamba": LINEAR, LINEAR: LINEAR}
"""Mixer type of each spelling in `layer_types`."""


@dataclass(frozen=True)
class Mamba2Fields:
    """Fields of a family with Mamba2 layers.

    Attributes:
      layers: Field of the mixers: a list of types, or of the indices of attention layers.
    """

    layers: str


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
            f"mamba_n_heads ({heads}) times mamba_d_head ({size}) must equal mamba_expand times "
            f"hidden_size ({_inner_width(text)})"
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
    return positive(text, "mamba_expand") * positive(text, "hidden_size")


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
