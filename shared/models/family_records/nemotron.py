"""Records of Nemotron."""

from shared.models import mtp
from shared.models.activation import RELU2
from shared.models.config_classes import nemotron as config_classes
from shared.models.experts import Routing
from shared.models.family import Family

NEMOTRON_H = Family(
    "nemotron_h",
    config_classes.NEMOTRON_H,
    activation=RELU2,
    block_types=True,
    mtp=mtp.NEMOTRON,
    tensor_names=(
        ("embed_tokens.", "embeddings."),
        ("input_layernorm.", "norm."),
        ("post_attention_layernorm.", "norm."),
        ("self_attn.", "mixer."),
        ("mamba.", "mixer."),
        ("mlp.", "mixer."),
        ("norm.", "norm_f."),
    ),
    routing=Routing(
        count_field="n_routed_experts",
        scores="sigmoid",
        has_groups=True,
        has_latent=True,
        activation=RELU2,
        shared_field="moe_shared_expert_intermediate_size",
    ),
    fixed=(
        ("mamba_hidden_act", "silu"),
        ("mamba_proj_bias", False),
        ("n_shared_experts", 1),
        ("residual_in_fp32", False),
        ("use_bias", False),
    ),
)

FAMILIES = {
    "NemotronHForCausalLM": NEMOTRON_H,
}

ARCHITECTURES = {
    "nemotron_h": "NemotronHForCausalLM",
}
