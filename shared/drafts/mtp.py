"""MTP layers in the speculators format, which replace the MTP layer of the target's checkpoint.

Such a layer was extracted from a checkpoint and usually trained further. Its tensors have their own
names. It shares the target's embedding and `lm_head`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shared.drafts.checkpoint import IGNORED, SPECULATORS_MTP
from shared.drafts.config_formats import read_raw_config
from shared.drafts.kinds import NEXTN
from shared.models.checkpoint import Checkpoint, CheckpointError
from shared.models.config import ModelConfig
from shared.models.config_fields import Json, object_of
from shared.models.mtp import QWEN, MtpLayers
from shared.models.rotary import settings_of

MODEL_TYPES = ("qwen3_5_text", "qwen3_5_moe_text")
"""Model types with supported MTP layers, by the `model_type` of the layer."""

RENAMED = {
    "input_proj.": "mtp.fc.",
    "token_layernorm.": "mtp.pre_fc_norm_embedding.",
    "hidden_layernorm.": "mtp.pre_fc_norm_hidden.",
    "final_layernorm.": "mtp.norm.",
}
"""Prefixes of tensors after the number of their layer, with their names in a checkpoint."""

FIRST = f"{SPECULATORS_MTP}0."


class WithMtp(Checkpoint):
    """Checkpoint of a model in which the MTP layer comes from another folder."""

    def __init__(self, checkpoint: Checkpoint, layer: Checkpoint) -> None:
        """Combines opened checkpoints without opening files.

        Raises:
          CheckpointError: The layer's folder has a tensor that is not part of one MTP layer.
        """
        super().__init__(())
        self.files = (*checkpoint.files, *layer.files)
        for name, owner in checkpoint._owners.items():
            if not name.startswith("mtp."):
                self._owners[name] = owner
        for name, owner in layer._owners.items():
            if name.startswith(FIRST):
                self._owners[_renamed(name)] = owner
            elif name not in IGNORED:
                raise CheckpointError(
                    f"tensor {name} is not part of an MTP layer; use a draft model without it"
                )


def with_mtp_of(
    config: Json, layer: Checkpoint, model: ModelConfig, checkpoint: Checkpoint
) -> tuple[ModelConfig, Checkpoint]:
    """Returns a model's config and files with the MTP layer of a draft model's folder.

    Args:
      config: Contents of the draft model's config.json.
      layer: Files of the draft model.
      model, checkpoint: Config and files of the target.

    Raises:
      ValueError: The layer belongs to another model, by its config.json or its tensors.
    """
    raw = read_raw_config(config)
    if raw.kind != NEXTN.name:
        raise ValueError(
            f"the draft model's config.json describes {raw.kind}, but its tensors are those of "
            "an MTP layer; use a config.json that belongs to the tensors"
        )
    number = raw.settings.get("num_nextn_predict_layers", 1)
    if number != 1:
        raise ValueError(f"the draft model's num_nextn_predict_layers must be 1, got {number}")
    own = object_of(raw.settings, "transformer_layer_config")
    if own.get("model_type") not in MODEL_TYPES:
        raise ValueError(
            f"the draft model is an MTP layer of a {own.get('model_type')} model, which is not "
            f"supported; use one of {' or '.join(MODEL_TYPES)}"
        )
    if not model.zero_centered_norms:
        raise ValueError(
            f"the draft model is an MTP layer, which is not supported for a {model.name} model; "
            "use an EAGLE or DFlash head"
        )
    for field, value in _sizes(model):
        if own.get(field) not in (None, value):
            raise ValueError(
                f"the draft model's {field} ({own[field]}) is not the target's ({value}); use a "
                "layer that was trained for this model"
            )
    theta = settings_of(own).get("rope_theta")
    if theta not in (None, model.attention.rotary.theta):
        raise ValueError(
            f"the draft model's rope_theta ({theta}) is not the target's "
            f"({model.attention.rotary.theta}); use a layer that was trained for this model"
        )
    named = MtpLayers(QWEN, model.num_layers, 1)
    return replace(model, mtp=named), WithMtp(checkpoint, layer)


def _sizes(model: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Yields the settings that the layer must share with its target, by field name."""
    yield "vocab_size", model.vocab
    yield "hidden_size", model.hidden
    yield "rms_norm_eps", model.rms_eps
    yield "num_attention_heads", model.attention.num_heads
    yield "num_key_value_heads", model.attention.num_kv_heads
    yield "head_dim", model.attention.head_size
    yield "attn_output_gate", model.attention.has_gate
    if model.dense is not None:
        yield "intermediate_size", model.dense.intermediate
    if model.experts is not None:
        yield "num_experts", model.experts.num_experts
        yield "num_experts_per_tok", model.experts.top_k
        yield "moe_intermediate_size", model.experts.intermediate


def _renamed(name: str) -> str:
    part = name.removeprefix(FIRST)
    for begin, other in RENAMED.items():
        if part.startswith(begin):
            return other + part.removeprefix(begin)
    return f"mtp.layers.0.{part}"
