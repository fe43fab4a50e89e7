"""Formats of a draft head's config.json, normalised to one spelling.

Authors store the same settings in different places. The result is one object of fields, with nested
fields merged into the outer ones. Every field must be read, be known to have no effect, or be an
error. A field that is not read and has a neutral value (null, false, 0 or empty) is ignored.
"""

from typing import Any

from shared.drafts.kinds import EAGLE, EAGLE3, FORMATS, HEADS, KINDS, LAYER_FIELDS
from shared.drafts.raw_config import PLACE, RawDraftConfig
from shared.models.config_classes.llama import LLAMA
from shared.models.config_classes.qwen import QWEN3
from shared.models.config_fields import Json, listed, object_of, word
from shared.models.neutral import NEUTRAL

ARCHITECTURES = {name: kind for kind, files in FORMATS.items() for name in files.architectures}
"""Kinds of draft heads by architecture name; `LlamaForCausalLM` is classified by
`draft_vocab_size`."""

SPECULATORS = {files.speculators: kind for kind, files in FORMATS.items() if files.speculators}
"""Kinds by `speculators_model_type`, the field that identifies the speculators format."""

LAYERS = {"llama": LLAMA, "qwen3": QWEN3}
"""Config classes of a head's layers by `model_type`, with the defaults of absent fields."""

MEANINGS = {
    "hot_vocab_size": "a restricted output vocabulary",
    "vision_config": "image input",
    "text_config": "image input",
    "sample_from_anchor": "draft tokens from the newest token's own slot",
    "parallel_drafting": "rows that draft at once, as in P-EAGLE",
    "mask_hidden": "rows that draft at once, as in P-EAGLE",
    "use_mtp_layernorm": "a norm of the hidden state as in MTP layers",
    "kv_lora_rank": "latent attention",
    "shift_label": "shifted labels, as in Domino",
    "pure_draft_prefix_len": "a prefix of true tokens, as in Domino",
    "variable_prefix": "a prefix of variable length, as in D2SD",
    **{
        name: f"{part}, which makes it a {head.title} model"
        for head in HEADS.values()
        for name, part in head.parts.items()
    },
}
"""Features that unsupported fields request."""

_TRAINING = {
    *("speculators_model_type", "speculators_config", "speculators_version"),
    *("embed_requires_grad", "max_window_layers", "ttt_steps", "ttt_length"),
    *("loss_decay_gamma", "num_anchors", "target_model_type", "target_model_name_or_path"),
    *("confidence_head_alpha", "attention_mode", "parallel_draft_heads_num_layers"),
}
NOTHING = NEUTRAL | _TRAINING
"""Fields about training, saving and standalone sampling, which affect no draft."""


def read_raw_config(config: Json) -> RawDraftConfig:
    """Reads and normalises the contents of a head's config.json.

    Raises:
      ValueError: The head is not supported; the message names the field.
    """
    if word(config, "speculators_model_type", "", PLACE):
        return _of_speculators(config)
    kind = _kind(config)
    if HEADS[kind].reads_target_kv:
        reject_unknown_fields(config, kind)
        return RawDraftConfig(kind, config, False, frozenset())
    nested = object_of(config, FORMATS[kind].nested)
    nested = {name: value for name, value in nested.items() if value is not None}
    family = word(config, "model_type", "", PLACE)
    own = _layer_defaults(family if family in LAYERS else FORMATS[kind].layer_type)
    of_target = ("vocab_size", "num_hidden_layers", "max_position_embeddings")
    own = {name: value for name, value in own.items() if name not in of_target}
    settings = {**own, **config, **nested}
    reject_unknown_fields(settings, kind)
    return RawDraftConfig(kind, settings, False, frozenset(nested))


def _of_speculators(config: Json) -> RawDraftConfig:
    named = config["speculators_model_type"]
    if named == "jetspec":
        raise ValueError(
            "the draft model's speculators_model_type jetspec is not supported: its block reads "
            "true tokens instead of masks; use a head with dflash_config.causal_head"
        )
    if named not in SPECULATORS:
        raise ValueError(
            f"the draft model's speculators_model_type {named} is not supported; use one of "
            f"{', '.join(SPECULATORS)}"
        )
    kind, layer = SPECULATORS[named], object_of(config, "transformer_layer_config")
    family = word(layer, "model_type", "qwen3", PLACE)
    outer = {name: value for name, value in config.items() if name != "transformer_layer_config"}
    if KINDS[kind].head is None:
        reject_unknown_fields(outer, kind)
        return RawDraftConfig(kind, config, True, frozenset())
    if family not in LAYERS:
        raise ValueError(
            f"the draft model's transformer_layer_config has model_type {family!r}, which is not "
            f"supported; use a head with layers of {' or '.join(LAYERS)}"
        )
    own = _layer_defaults(family)
    settings = {**FORMATS[kind].defaults, **outer, **own, **layer, "model_type": family}
    reject_unknown_fields(settings, kind)
    return RawDraftConfig(kind, settings, True, frozenset())


def _layer_defaults(family: str) -> dict[str, Any]:
    """Returns the defaults of a config class for absent fields of a head's layers."""
    fields = LAYERS[family].fields.items()
    return {name: value for name, value in fields if value is not None and name in LAYER_FIELDS}


def _kind(config: Json) -> str:
    names = listed(config, "architectures", str, PLACE) or ["LlamaForCausalLM"]
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if "LlamaForCausalLM" in names:
        return EAGLE3.name if "draft_vocab_size" in config else EAGLE.name
    raise ValueError(
        f"architectures in the draft model's config.json is {', '.join(names)}, which is not a "
        "supported draft head without a speculators_model_type; use one of "
        f"{', '.join(ARCHITECTURES)}, or --speculative-algorithm STANDALONE with a small model"
    )


def reject_unknown_fields(settings: Json, kind: str) -> None:
    """Checks that all fields with an effect are supported.

    Raises:
      ValueError: The first unsupported field, by name.
    """
    fixed, read = FORMATS[kind].fixed, FORMATS[kind].fields
    for name, value in settings.items():
        if name in fixed:
            _check_fixed(name, value, fixed[name])
        elif value and name not in read and name not in NOTHING:
            meaning = f" ({MEANINGS[name]})" if name in MEANINGS else ""
            raise ValueError(
                f"the draft model's {name}{meaning} is not supported for {kind}; use another "
                "head, or remove the field from its config.json if it affects no draft"
            )


def _check_fixed(name: str, value: Any, served: Any) -> None:
    if value is not None and value != served:
        raise ValueError(
            f"the draft model's {name} must be {_written(served)}, got {_written(value)}; use "
            "another head"
        )


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
