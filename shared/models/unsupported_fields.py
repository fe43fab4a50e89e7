"""Fields of a config.json that are not supported in a model family."""

from typing import Any

from shared.models.activation import GELU_TANH, RELU2, SILU
from shared.models.config_fields import Json, count, flag, listed, object_of
from shared.models.experts import refuse_other_experts
from shared.models.family import BIASES, Family, SlidingWindowRule
from shared.models.formats.registry import refuse_other_quantisation
from shared.models.rotary import LAYER_TYPES

SLIDING = LAYER_TYPES[1]
_ACTIVATIONS = {
    SILU: ("hidden_act", ("silu", "swish")),
    GELU_TANH: ("hidden_activation", ("gelu_pytorch_tanh",)),
    RELU2: ("mlp_hidden_act", ("relu2",)),
}
"""Field with the activation of dense MLPs by its kind, and the spellings of the kind."""


def refuse_unsupported(config: Json, text: Json, family: Family) -> None:
    """Checks that a config.json has no settings that change the forward pass unsupported.

    Args:
      config: Contents of config.json.
      text: Fields of its language model.
      family: The model family.

    Raises:
      ValueError: It has one; the message names the field.
    """
    for source in (config, text):
        if quantisation := object_of(source, "quantization_config"):
            refuse_other_quantisation(quantisation)
    refuse_other_experts(text, family.routing, family.name)
    slides = flag(text, "use_sliding_window") or SLIDING in (listed(text, "layer_types", str) or [])
    if slides and family.sliding_window in (SlidingWindowRule.NEVER, SlidingWindowRule.BY_SIZE):
        raise ValueError(
            "sliding-window attention (use_sliding_window, layer_types) is not supported in a "
            f"{family.name} model; use a checkpoint without it"
        )
    for field in (*BIASES, "mtp_use_dedicated_embeddings"):
        if flag(text, field) and field not in family.biases:
            raise ValueError(
                f"{field}: true is not supported; use a checkpoint with {field}: false"
            )
    for field, served in family.fixed:
        _refuse_others(text, field, served)
    field, known = _ACTIVATIONS[family.activation]
    if text[field] not in known:
        raise ValueError(f"{field} must be {known[0]}, got {text[field]!r}")
    field = "use_bidirectional_attention"
    # "vision" concerns the tokens of images only.
    if field in family.of.fields and text[field] not in (None, False, "vision"):
        raise ValueError(
            f"use_bidirectional_attention: {text[field]!r} is not supported; use a checkpoint for "
            "generation"
        )
    if text.get("output_gate_type", "silu") not in ("silu", "swish"):
        raise ValueError(f"output_gate_type must be silu, got {text['output_gate_type']!r}")
    if count(text, "mtp_num_hidden_layers") > 1:
        raise ValueError(
            f"mtp_num_hidden_layers must be 0 or 1, got {text['mtp_num_hidden_layers']}"
        )


def _refuse_others(text: Json, field: str, served: Any) -> None:
    stated = text.get(field, served)
    for value in stated if isinstance(stated, list) else [stated]:
        if value != served:
            raise ValueError(f"{field} must be {served}, got {stated!r:.60}")
