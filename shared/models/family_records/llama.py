"""Records of Llama, and families with dense layers like its own."""

from dataclasses import replace

from shared.models.config_classes import llama as config_classes
from shared.models.family import BIASES, Family, SlidingWindowRule

GRANITE = Family("granite", config_classes.GRANITE, biases=BIASES)
LLAMA = Family("llama", config_classes.LLAMA, drafts_trees=True, biases=BIASES)
MISTRAL = Family("mistral", config_classes.MISTRAL, sliding_window=SlidingWindowRule.BY_SIZE)
MINISTRAL3 = replace(MISTRAL, name="ministral3", of=config_classes.MINISTRAL3, scales_queries=True)
OLMO2 = Family(
    "olmo2",
    config_classes.OLMO2,
    qk_norm=True,
    norms_all_heads=True,
    biases=BIASES[:1],
    post_norm=True,
)
OLMO3 = replace(
    OLMO2,
    name="olmo3",
    of=config_classes.OLMO3,
    sliding_window=SlidingWindowRule.BY_TYPES,
    scales_full_layers=True,
)
PHI3 = Family(
    "phi3",
    config_classes.PHI3,
    fused_qkv=True,
    fused_gate_up=True,
    sliding_window=SlidingWindowRule.BY_SIZE,
)
SMOLLM3 = Family("smollm3", config_classes.SMOLLM3, biases=BIASES, nope_layers=True)

FAMILIES = {
    "GraniteForCausalLM": GRANITE,
    "LlamaForCausalLM": LLAMA,
    "Ministral3ForCausalLM": MINISTRAL3,
    "MistralForCausalLM": MISTRAL,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO3,
    "Phi3ForCausalLM": PHI3,
    "SmolLM3ForCausalLM": SMOLLM3,
}

ARCHITECTURES = {
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mistral4": "Mistral4ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}

VLM_ARCHITECTURES = {
    "Mistral3ForConditionalGeneration": (config_classes.MISTRAL3, "mistral"),
}

UNSUPPORTED = {
    "Mistral4ForCausalLM": "query scaling in latent attention",
}
