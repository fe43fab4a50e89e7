"""Differences between model families, as values."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from shared.models.activation import SILU
from shared.models.config_classes.config_class import ConfigClass
from shared.models.experts import Routing
from shared.models.mamba2_fields import Mamba2Fields
from shared.models.mtp import MtpFormat


class SlidingWindowRule(Enum):
    """Config fields that enable sliding windows in a family, and the layers concerned."""

    NEVER = "nothing; sliding windows are not supported"
    BY_SIZE = "`sliding_window` alone, in all layers"
    BY_TYPES = "`layer_types`, or all but every n-th layer if it is absent"
    WHOLE_BY_FLAG = "`use_sliding_window`, in all layers"
    BY_FLAG = "`use_sliding_window`, in the layers that `layer_types` or `max_window_layers` names"


@dataclass(frozen=True)
class Family:
    """Properties that distinguish the layers of one model family.

    Attributes:
      name: Name in messages to users.
      of: Config class with the fields of its config.json, their defaults and aliases.
      qk_norm: See `AttentionConfig`.
      is_hybrid: True for GDN layers, output gates and zero-centred norms.
      has_fused_delta: See `GatedDeltaConfig.has_fused_inputs`.
      mtp: Format of MTP layers; None if no checkpoint of the family has any.
      mamba: Fields of Mamba2 layers; None for a family without them.
      drafts_trees, fused_qkv, fused_gate_up, tensor_names: See `ModelConfig`.
      block_types: True if a list or a pattern defines the single sublayer of each layer. Attention
        then has no rotary embeddings.
      input_bias: True if q, k and v have biases that no field names.
      biases: Fields that enable other biases.
      sliding_window: Fields that enable sliding windows.
      has_optional_rope: True if only `position_embedding_type: rope` enables rotary embedding.
      nope_layers: True if some layers have no rotary embedding (NoPE).
      scales_queries: True if queries may be scaled by position (long-context query scaling).
      post_norm: See `ModelConfig`.
      full_attention_interval: Without `layer_types`, layers of which the last one has full
        attention, in a family with sliding windows `BY_TYPES`.
      has_sinks: See `AttentionConfig`.
      scales_embeddings: True if embeddings are multiplied by the root of the hidden size, rounded
        to the dtype of the model.
      has_query_scalar: True if `query_pre_attn_scalar` defines the scale of attention scores.
      has_unit_scale: True if attention scores are not scaled, because QK norms carry the scale.
      ends_full: True if the last layer has full attention, whatever `layer_types` contains.
      has_value_norm: See `AttentionConfig`.
      has_layer_scalars: See `ModelConfig`.
      zero_centered, sandwich_norms: See `ModelConfig`; hybrid families are zero-centred, too.
      activation: Kind of activation of dense MLPs.
      mlp_width_field: Field with the width of dense MLPs.
      scales_full_layers: True if `rope_scaling` does not apply to sliding-window layers.
      routing: MoE settings; None for a dense family.
      norms_all_heads: See `AttentionConfig`.
      norms_by_flag: True if `use_qk_norm` enables QK norms.
      plain_out: True if the attention output projection never has a bias.
      has_latent_attention: True for multi-head latent attention (MLA).
      sees: True if a checkpoint may contain a vision encoder.
      fixed: Optional fields with their only supported value, of each element in a list.
    """

    name: str
    of: ConfigClass
    qk_norm: bool = False
    is_hybrid: bool = False
    has_fused_delta: bool = False
    mtp: MtpFormat | None = None
    drafts_trees: bool = False
    mamba: Mamba2Fields | None = None
    fused_qkv: bool = False
    fused_gate_up: bool = False
    tensor_names: tuple[tuple[str, str], ...] = ()
    block_types: bool = False
    input_bias: bool = False
    biases: tuple[str, ...] = ()
    sliding_window: SlidingWindowRule = SlidingWindowRule.NEVER
    has_optional_rope: bool = False
    nope_layers: bool = False
    scales_queries: bool = False
    post_norm: bool = False
    full_attention_interval: int = 4
    has_sinks: bool = False
    scales_embeddings: bool = False
    has_query_scalar: bool = False
    has_unit_scale: bool = False
    ends_full: bool = False
    has_value_norm: bool = False
    has_layer_scalars: bool = False
    zero_centered: bool = False
    sandwich_norms: bool = False
    activation: str = SILU
    mlp_width_field: str = "intermediate_size"
    scales_full_layers: bool = False
    routing: Routing | None = None
    norms_all_heads: bool = False
    norms_by_flag: bool = False
    plain_out: bool = False
    has_latent_attention: bool = False
    sees: bool = False
    fixed: tuple[tuple[str, Any], ...] = ()


BIASES = ("attention_bias", "mlp_bias")
"""Fields that enable biases."""
