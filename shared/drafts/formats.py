"""Who wrote a draft head's config.json, and what it says in one spelling.

Makers name the same things in different places. What comes out here is one object of fields, nested
ones beside the outer ones; every field is one that is read, one that is known to change nothing, or
refused by its name. A field that is not read and asks for nothing (null, false, 0 or empty) is as
good as absent.
"""

from dataclasses import dataclass
from typing import Any

from shared.models import fields
from shared.models.config_classes import LLAMA, QWEN3
from shared.models.fields import Json, listed, object_of, word
from shared.models.neutral import NEUTRAL

PLACE = "the draft model's config.json"
"""Where the fields stand, for the reader of a sentence."""

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
"""Architecture names of draft heads; `LlamaForCausalLM` is told by `draft_vocab_size`."""

SPECULATORS = {
    "eagle3": "EAGLE3",
    "dflash": "DFLASH",
    "dflash2": "DFLASH2",
    "dspark": "DSPARK",
    "mtp": "NEXTN",
}
"""Values of `speculators_model_type`, the field by which the speculators format is told."""

BLOCKS = ("DFLASH", "DSPARK", "DFLASH2")
"""Kinds of heads that fill a block in one pass."""

LAYERS = {"llama": LLAMA, "qwen3": QWEN3}
"""Classes of the layers of heads, by `model_type`: they have what a config.json leaves out."""

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
"""What fields of the speculators format itself have that are left out."""

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
"""Fields that are read, by the kind of head."""

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
"""Fields with the one value that is served; stated otherwise they are refused."""

FIXED_OF = {
    "EAGLE": {**FIXED, "use_aux_hidden_state": False},
    "DSPARK": {**FIXED, "projector_type": "dspark"},
}
"""Those of kinds that differ; an EAGLE head reads one hidden state."""

MEANINGS = {
    "hot_vocab_size": "a restricted output vocabulary",
    "vision_config": "image input",
    "text_config": "image input",
    "sample_from_anchor": "a draft of the newest token's own slot",
    "parallel_drafting": "rows that draft at once, as in P-EAGLE",
    "mask_hidden": "rows that draft at once, as in P-EAGLE",
    "use_mtp_layernorm": "a norm of the hidden state as in MTP layers",
    "kv_lora_rank": "latent attention",
    "conv_kernel_size": "a convolution, which makes it a DFlash2 model",
    "selector_rank": "a selector of candidates, which makes it a DFlash2 model",
    "markov_rank": "a Markov step, which makes it a DSpark model",
}
"""What fields ask for that are not served."""

_TRAINING = {
    *("speculators_model_type", "speculators_config", "speculators_version"),
    *("embed_requires_grad", "max_window_layers", "ttt_steps", "ttt_length"),
    *("loss_decay_gamma", "num_anchors", "target_model_type", "target_model_name_or_path"),
    *("confidence_head_alpha", "attention_mode", "parallel_draft_heads_num_layers"),
}
NOTHING = NEUTRAL | _TRAINING
"""Fields of how a head was trained and written, or would sample alone; they change no draft."""


@dataclass(frozen=True)
class Stated:
    """What a head's config.json says.

    Attributes:
      kind: "EAGLE", "EAGLE3", "DFLASH", "DSPARK", "DFLASH2", or "NEXTN" of an MTP layer.
      settings: Its fields, those of nested objects beside the outer ones.
      is_speculators: It is in the speculators format.
      nested: Names of the fields that stood in `eagle_config` or `dflash_config`.
    """

    kind: str
    settings: Json
    is_speculators: bool
    nested: frozenset[str]

    @property
    def is_block(self) -> bool:
        """It fills a block in one pass."""
        return self.kind in BLOCKS

    def flag(self, field: str, default: bool = False) -> bool:
        """True or false; the default where it is absent or null."""
        return fields.flag(self.settings, field, default, PLACE)


def stated(config: Json) -> Stated:
    """Reads the contents of a head's config.json.

    Raises:
      ValueError: It is of no head that is served; one sentence that names the field.
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
    refuse_unknown(settings, kind)
    return Stated(kind, settings, False, frozenset(nested))


def _of_speculators(config: Json) -> Stated:
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
        refuse_unknown(outer, kind)
        return Stated(kind, config, True, frozenset())
    if family not in LAYERS:
        raise ValueError(
            f"the draft model's transformer_layer_config has model_type {family!r}, which is not "
            f"supported; use a head with layers of {' or '.join(LAYERS)}"
        )
    own = _layer_defaults(family)
    settings = {**LEFT_OUT[kind], **outer, **own, **layer, "model_type": family}
    refuse_unknown(settings, kind)
    return Stated(kind, settings, True, frozenset())


def _layer_defaults(family: str) -> dict[str, Any]:
    """Returns the defaults of a class for absent fields of a head's layers."""
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
        f"architectures in the draft model's config.json is {', '.join(names)}, which is no "
        f"supported draft head without a speculators_model_type; use one of "
        f"{', '.join(ARCHITECTURES)}, or --speculative-algorithm STANDALONE with a small model"
    )


def refuse_unknown(settings: Json, kind: str) -> None:
    """Refuses fields that ask for something and are not known to be served.

    Raises:
      ValueError: The first of them, by its name.
    """
    fixed = FIXED_OF.get(kind, FIXED)
    for name, value in settings.items():
        if name in fixed:
            _check_fixed(name, value, fixed[name])
        elif value and name not in READ[kind] and name not in NOTHING:
            meaning = f" ({MEANINGS[name]})" if name in MEANINGS else ""
            raise ValueError(
                f"the draft model's {name}{meaning} is not supported for {kind}; use another head, "
                "or take the field out of its config.json if it changes no draft"
            )


def _check_fixed(name: str, value: Any, served: Any) -> None:
    if value is not None and value != served:
        raise ValueError(
            f"the draft model's {name} must be {_written(served)}, got {_written(value)}; use "
            "another head"
        )


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
