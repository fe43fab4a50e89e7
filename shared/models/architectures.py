"""Architectures of config.json: names of Hugging Face, and the family of each."""

from shared.models.config_classes.config_class import ConfigClass
from shared.models.config_fields import Json, listed, object_of, word
from shared.models.family import Family
from shared.models.family_records import (
    deepseek,
    gemma,
    gpt_oss,
    llama,
    mamba2,
    minimax,
    nemotron,
    qwen,
)

FAMILIES: dict[str, Family] = dict(
    sorted(
        (
            deepseek.FAMILIES
            | gemma.FAMILIES
            | gpt_oss.FAMILIES
            | llama.FAMILIES
            | mamba2.FAMILIES
            | minimax.FAMILIES
            | nemotron.FAMILIES
            | qwen.FAMILIES
        ).items()
    )
)
"""Supported architecture names of Hugging Face."""

ARCHITECTURES: dict[str, str] = (
    deepseek.ARCHITECTURES
    | gemma.ARCHITECTURES
    | gpt_oss.ARCHITECTURES
    | llama.ARCHITECTURES
    | mamba2.ARCHITECTURES
    | minimax.ARCHITECTURES
    | nemotron.ARCHITECTURES
    | qwen.ARCHITECTURES
)
"""Architecture of a `model_type`, for a config.json without `architectures`."""

VLM_ARCHITECTURES: dict[str, tuple[ConfigClass, str]] = (
    gemma.VLM_ARCHITECTURES | llama.VLM_ARCHITECTURES
)
"""Vision-language architectures whose `text_config` determines the family: the config class around
it, and the `model_type` of a `text_config` without one.
"""

UNSUPPORTED: dict[str, str] = deepseek.UNSUPPORTED | llama.UNSUPPORTED
"""Unsupported architectures, and a missing feature that they require."""

HEADS = ("Assistant", "Eagle", "DFlash", "DSpark", "DraftModel", "Speculator", "Medusa")
"""Substrings of architecture names that are draft heads, not models."""


def architectures_of(config: Json) -> list[str]:
    """Returns the architectures of a config.json, or the one of its `model_type`."""
    model_type = word(config, "model_type", "")
    known = [ARCHITECTURES[model_type]] if model_type in ARCHITECTURES else []
    return listed(config, "architectures", str) or known


def family_of(config: Json) -> Family:
    """Returns the family of a config.json.

    Raises:
      ValueError: No family of that name is supported; the message names it.
    """
    names = architectures_of(config)
    if outer := [name for name in names if name in VLM_ARCHITECTURES]:
        if "text_config" not in config:
            raise ValueError(
                f"config.json of {', '.join(names)} has no text_config; copy the field from the "
                "config.json of the published model"
            )
        usual = VLM_ARCHITECTURES[outer[0]][1]
        inner = word(object_of(config, "text_config"), "model_type", usual)
        names = [ARCHITECTURES.get(inner, inner)]
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
        if name in UNSUPPORTED:
            raise ValueError(
                f"architectures in config.json is {name}, which requires {UNSUPPORTED[name]} and "
                f"is not supported; serve one of {', '.join(FAMILIES)}"
            )
    if "speculators_model_type" in config or any(word in x for x in names for word in HEADS):
        raise ValueError(
            f"architectures in config.json is {', '.join(names)}, a draft head; serve its "
            "target, with this folder as --speculative-draft-model-path"
        )
    named = ", ".join(names) or f"none, with model_type {config.get('model_type')!r}"
    raise ValueError(
        f"architectures in config.json is {named}, which is not supported; "
        f"serve one of {', '.join(FAMILIES)}"
    )
