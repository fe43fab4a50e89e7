"""Records of Gemma."""

from dataclasses import replace

from shared.models.activation import GELU_TANH
from shared.models.config_classes import gemma as config_classes
from shared.models.experts import Routing
from shared.models.family import BIASES, Family, SlidingWindowRule
from shared.models.mlp import ExpertTensors

GEMMA2 = Family(
    "gemma2",
    config_classes.GEMMA2,
    biases=BIASES[:1],
    sliding_window=SlidingWindowRule.BY_TYPES,
    full_attention_interval=2,
    scales_embeddings=True,
    has_query_scalar=True,
    zero_centered=True,
    sandwich_norms=True,
    activation=GELU_TANH,
)
GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    of=config_classes.GEMMA3,
    qk_norm=True,
    full_attention_interval=6,
)
GEMMA4 = replace(
    GEMMA3,
    name="gemma4",
    of=config_classes.GEMMA4,
    has_query_scalar=False,
    zero_centered=False,
    has_unit_scale=True,
    ends_full=True,
    has_value_norm=True,
    has_layer_scalars=True,
    routing=Routing(
        is_renormalised=True,
        reads_renormalised=False,
        activation=GELU_TANH,
        top_k_field="top_k_experts",
        enabled_by="enable_moe_block",
        is_parallel=True,
        tensors=ExpertTensors(router="router.proj", experts="experts"),
    ),
)
GEMMA4_UNIFIED = replace(
    GEMMA4, name="gemma4_unified", of=config_classes.GEMMA4_UNIFIED, routing=None
)

FAMILIES = {
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4UnifiedForCausalLM": GEMMA4_UNIFIED,
}

ARCHITECTURES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_assistant": "Gemma4AssistantForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "gemma4_unified_assistant": "Gemma4UnifiedAssistantForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
}

VLM_ARCHITECTURES = {
    "Gemma3ForConditionalGeneration": (config_classes.GEMMA3_OUTER, "gemma3_text"),
    "Gemma4ForConditionalGeneration": (config_classes.GEMMA4_OUTER, "gemma4_text"),
    "Gemma4UnifiedForConditionalGeneration": (
        config_classes.GEMMA4_UNIFIED_OUTER,
        "gemma4_unified_text",
    ),
}
