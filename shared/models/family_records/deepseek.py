"""Records of DeepSeek, and families with its MoE routing."""

from dataclasses import replace

from shared.models import mtp
from shared.models.config_classes import deepseek as config_classes
from shared.models.experts import Routing
from shared.models.family import BIASES, Family

_GROUPED = Routing(
    count_field="n_routed_experts",
    scores="sigmoid",
    counts_shared=True,
    has_groups=True,
    begins_dense=True,
)
GLM4_MOE = Family(
    "glm4_moe",
    config_classes.GLM4_MOE,
    biases=BIASES[:1],
    routing=_GROUPED,
    norms_by_flag=True,
    plain_out=True,
    mtp=mtp.DEEPSEEK,
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    config_classes.DEEPSEEK_V3,
    biases=BIASES[:1],
    routing=_GROUPED,
    has_latent_attention=True,
    mtp=mtp.DEEPSEEK,
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    of=config_classes.GLM4_MOE_LITE,
    routing=replace(_GROUPED, reads_types=True),
)

FAMILIES = {
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
}

ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "kimi_linear": "KimiLinearForCausalLM",
    "longcat_flash": "LongcatFlashForCausalLM",
}

UNSUPPORTED = {
    "DeepseekV2ForCausalLM": "a router with softmax scores and groups by their maximum",
    "DeepseekV32ForCausalLM": "sparse attention with an indexer",
    "DeepseekV4ForCausalLM": "compressed attention and hyper-connections",
    "GlmMoeDsaForCausalLM": "sparse attention with an indexer",
    "KimiK25ForConditionalGeneration": "a vision encoder",
    "KimiLinearForCausalLM": "Kimi Delta Attention layers",
    "LongcatFlashForCausalLM": "layers of two attention blocks, and experts without weights",
}
