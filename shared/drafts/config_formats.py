"""Formats of a draft head's config.json, normalised to one spelling.

Authors store the same settings in different places. The result is one object of fields, with nested
fields merged into the outer ones. Every field must be read, be known to have no effect, or be an
error. A field that is not read and has a neutral value (null, false, 0 or empty) is ignored.
"""

from dataclasses import dataclass
from typing import Any

from shared.models import config_fields
from shared.models.config_classes import LLAMA, QWEN3
from shared.models.config_fields import Json, listed, object_of, word
from shared.models.neutral import NEUTRAL

PLACE = "the draft model's config.json"
"""Name of the file in messages."""

ARCHITECTURES = {
    "LlamaForCausalLMEagle": "EAGLE",
    "EagleLlamaForCausalLM": "EAGLE",
    "LlamaForCausalLMEagle3": "EAGLE3",
    "Eagle3LlamaForCausalLM": "EAGLE3",
    "DFlashDraftModel": "DFLASH",
    "DFlash2DraftModel": "DFLASH2",
    "DSparkDraftModel": "DSPARK",
    "Qwen3DSparkModel": "DSPARK",
}
"""Kinds of draft heads by architecture name; `LlamaForCausalLM` is classified by
`draft_vocab_size`."""

SPECULATORS = {
    "eagle3": "EAGLE3",
    "dflash": "DFLASH",
    "dflash2": "DFLASH2",
    "dspark": "DSPARK",
    "mtp": "NEXTN",
}
"""Kinds by `speculators_model_type`, the field that identifies the speculators format."""

BLOCKS = ("DFLASH", "DSPARK", "DFLASH2")
"""Kinds of heads that predict a block in one pass."""

LAYERS = {"llama": LLAMA, "qwen3": QWEN3}
"""Config classes of a head's layers by `model_type`, with the defaults of absent fields."""

LEFT_OUT = {
    "EAGLE3": {"draft_vocab_size": 32000},
    "DFLASH": {"draft_vocab_size": 32000, "block_size": 8},
    "DSPARK": {"draft_vocab_size": 32000, "block_size": 8, "markov_rank": 256},
    "DFLASH2": {
        "draft_vocab_size": 32000,
        "block_size": 8,
        "sliding_window_non_causal": True,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}
"""Defaults of absent fields of the speculators format, by kind."""

_LAYER = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    *("max_position_embeddings", "attention_bias", "mlp_bias", "tie_word_embeddings"),
    *("layer_types", "sliding_window", "use_sliding_window", "target_hidden_size"),
    *("quantization_config", "architectures", "model_type"),
}
_STREAMS = {"eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"}
_BLOCK = (
    _LAYER
    | _STREAMS
    | {"draft_vocab_size", "block_size", "mask_token_id", "num_target_layers", "target_layer_ids"}
    | {"is_causal", "sliding_window_non_causal", "dflash_config"}
)
READ = {
    "EAGLE": _LAYER | {"bias", "qkv_bias", "eagle_config"},
    "EAGLE3": _LAYER
    | _STREAMS
    | {"bias", "qkv_bias", "draft_vocab_size", "num_aux_hidden_states", "eagle_config"}
    | {"fc_norm", "use_aux_norm", "norm_before_fc", "norm_before_residual", "norm_output"},
    "DFLASH": _BLOCK,
    "DSPARK": _BLOCK
    | {"sample_from_anchor", "markov_rank", "markov_head_type"}
    | {"enable_confidence_head", "confidence_head_with_markov"},
    "DFLASH2": _BLOCK
    | {"sample_from_anchor", "conv_kernel_size", "conv_group_size"}
    | {"selector_rank", "selector_top_k"},
    "NEXTN": _LAYER | {"num_nextn_predict_layers"},
}
"""Fields that are read, by kind."""

FIXED: dict[str, Any] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "next_layer_regular": True,
    "has_lm_head": True,
    "parallel_draft_step": 1,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "projector_type": "dflash",
}
"""Fields with one supported value; other values are errors."""

FIXED_OF = {
    "EAGLE": {**FIXED, "use_aux_hidden_state": False},
    "DSPARK": {**FIXED, "projector_type": "dspark"},
}
"""The same for kinds that differ; an EAGLE head reads one hidden state."""

MEANINGS = {
    "hot_vocab_size": "a restricted output vocabulary",
    "vision_config": "image input",
    "text_config": "image input",
    "sample_from_anchor": "draft tokens from the newest token's own slot",
    "parallel_drafting": "rows that draft at once, as in P-EAGLE",
    "mask_hidden": "rows that draft at once, as in P-EAGLE",
    "use_mtp_layernorm": "a norm of the hidden state as in MTP layers",
    "kv_lora_rank": "latent attention",
    "conv_kernel_size": "a convolution, which makes it a DFlash2 model",
    "selector_rank": "a selector of candidates, which makes it a DFlash2 model",
    "markov_rank": "a Markov step, which makes it a DSpark model",
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


@dataclass(frozen=True)
class RawDraftConfig:
    """Normalised config.json of a draft head.

    Attributes:
      kind: "EAGLE", "EAGLE3", "DFLASH", "DSPARK", "DFLASH2", or "NEXTN" for an MTP layer.
      settings: Its fields, with those of nested objects merged in.
      is_speculators: True for the speculators format.
      nested: Names of the fields from `eagle_config` or `dflash_config`.
    """

    kind: str
    settings: Json
    is_speculators: bool
    nested: frozenset[str]

    @property
    def is_block(self) -> bool:
        """True if the head predicts a block in one pass."""
        return self.kind in BLOCKS

    def flag(self, field: str, default: bool = False) -> bool:
        """Returns a boolean field; the default if it is absent or null."""
        return config_fields.flag(self.settings, field, default, PLACE)


def read_raw_config(config: Json) -> RawDraftConfig:
    """Reads and normalises the contents of a head's config.json.

    Raises:
      ValueError: The head is not supported; the message names the field.
    """
    if word(config, "speculators_model_type", "", PLACE):
        return _of_speculators(config)
    kind = _kind(config)
    nested = object_of(config, "dflash_config" if kind in BLOCKS else "eagle_config")
    nested = {name: value for name, value in nested.items() if value is not None}
    family = word(config, "model_type", "", PLACE)
    own = _layer_defaults(family if family in LAYERS else "qwen3" if kind in BLOCKS else "llama")
    of_target = ("vocab_size", "num_hidden_layers", "max_position_embeddings")
    own = {name: value for name, value in own.items() if name not in of_target}
    settings = {**own, **config, **nested}
    reject_unknown_fields(settings, kind)
    return RawDraftConfig(kind, settings, False, frozenset(nested))


def _of_speculators(config: Json) -> RawDraftConfig:
    named = config["speculators_model_type"]
    if named not in SPECULATORS:
        raise ValueError(
            f"the draft model's speculators_model_type {named} is not supported; use one of "
            f"{', '.join(SPECULATORS)}"
        )
    kind, layer = SPECULATORS[named], object_of(config, "transformer_layer_config")
    family = word(layer, "model_type", "qwen3", PLACE)
    outer = {name: value for name, value in config.items() if name != "transformer_layer_config"}
    if kind == "NEXTN":
        reject_unknown_fields(outer, kind)
        return RawDraftConfig(kind, config, True, frozenset())
    if family not in LAYERS:
        raise ValueError(
            f"the draft model's transformer_layer_config has model_type {family!r}, which is not "
            f"supported; use a head with layers of {' or '.join(LAYERS)}"
        )
    own = _layer_defaults(family)
    settings = {**LEFT_OUT[kind], **outer, **own, **layer, "model_type": family}
    reject_unknown_fields(settings, kind)
    return RawDraftConfig(kind, settings, True, frozenset())


def _layer_defaults(family: str) -> dict[str, Any]:
    """Returns the defaults of a config class for absent fields of a head's layers."""
    fields = LAYERS[family].fields.items()
    return {name: value for name, value in fields if value is not None and name in _LAYER}


def _kind(config: Json) -> str:
    names = listed(config, "architectures", str, PLACE) or ["LlamaForCausalLM"]
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if "LlamaForCausalLM" in names:
        return "EAGLE3" if "draft_vocab_size" in config else "EAGLE"
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
    fixed = FIXED_OF.get(kind, FIXED)
    for name, value in settings.items():
        if name in fixed:
            _check_fixed(name, value, fixed[name])
        elif value and name not in READ[kind] and name not in NOTHING:
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
