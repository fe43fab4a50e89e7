"""Records of families with Mamba2 layers."""

from shared.models.config_classes import mamba2 as config_classes
from shared.models.experts import Routing
from shared.models.family import BIASES, Family
from shared.models.mamba2_fields import Mamba2Fields
from shared.models.mlp import ExpertTensors

_FEED_FORWARD = (
    ("mlp.", "feed_forward."),
    ("post_attention_layernorm.", "pre_ff_layernorm."),
    ("norm.", "final_layernorm."),
)
BAMBA = Family(
    "bamba",
    config_classes.BAMBA,
    biases=BIASES,
    mamba=Mamba2Fields(layers="attn_layer_indices"),
    tensor_names=_FEED_FORWARD,
)
FALCON_H1 = Family(
    "falcon_h1",
    config_classes.FALCON_H1,
    biases=BIASES,
    mamba=Mamba2Fields(layers=None),
    tensor_names=_FEED_FORWARD,
)
GRANITE_MOE_HYBRID = Family(
    "granitemoehybrid",
    config_classes.GRANITE_MOE_HYBRID,
    biases=BIASES[:1],
    mamba=Mamba2Fields(layers="layer_types"),
    has_optional_rope=True,
    mlp_width_field="shared_intermediate_size",
    fused_gate_up=True,
    routing=Routing(
        count_field="num_local_experts",
        is_renormalised=True,
        reads_renormalised=False,
        shared_field="shared_intermediate_size",
        tensors=ExpertTensors(width_field="intermediate_size"),
    ),
    tensor_names=(
        ("mlp.gate_up_proj.", "shared_mlp.input_linear."),
        ("mlp.down_proj.", "shared_mlp.output_linear."),
        ("mlp.shared_experts.gate_up_proj.", "shared_mlp.input_linear."),
        ("mlp.shared_experts.down_proj.", "shared_mlp.output_linear."),
        ("mlp.gate.", "block_sparse_moe.router.layer."),
        ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
        ("mlp.experts.down_proj", "block_sparse_moe.output_linear.weight"),
    ),
)

FAMILIES = {
    "BambaForCausalLM": BAMBA,
    "FalconH1ForCausalLM": FALCON_H1,
    "GraniteMoeHybridForCausalLM": GRANITE_MOE_HYBRID,
}

ARCHITECTURES = {
    "bamba": "BambaForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
}
