"""Records of Gemma."""

from dataclasses import replace

from shared.models.activation import GELU_TANH
from shared.models.config_classes import gemma as config_classes
from shared.models.family import BIASES, Family, SlidingWindowRule

GEMMA2 = Family(
    "gemma2",
    config_classes.GEMMA2,
    biases=BIASES[:1],
    sliding_window=SlidingWindowRule.BY_TYPES,
    full_attention_interval=2,
    scales_embeddings=True,
    has_query_scalar=True,
    has_softcaps=True,
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

FAMILIES = {
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
}

ARCHITECTURES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
}

VLM_ARCHITECTURES = {
    "Gemma3ForConditionalGeneration": (config_classes.GEMMA3_OUTER, "gemma3_text"),
}
