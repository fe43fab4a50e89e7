"""Records of MiniMax."""

from shared.models.config_classes import minimax as config_classes
from shared.models.experts import Routing
from shared.models.family import Family
from shared.models.mlp import ExpertTensors

_EXPERTS = ExpertTensors(
    router="block_sparse_moe.gate",
    score_bias="block_sparse_moe.e_score_correction_bias",
    experts="block_sparse_moe.experts",
    gate="w1",
    up="w3",
    down="w2",
    width_field="intermediate_size",
)
MINIMAX_M2 = Family(
    "minimax_m2",
    config_classes.MINIMAX_M2,
    qk_norm=True,
    norms_all_heads=True,
    routing=Routing(
        count_field="num_local_experts",
        scores="sigmoid",
        is_renormalised=True,
        reads_renormalised=False,
        tensors=_EXPERTS,
    ),
    fixed=(
        ("attn_type_list", 1),
        ("qk_norm_type", "per_layer"),
        ("shared_intermediate_size", 0),
        ("use_qk_norm", True),
        ("use_routing_bias", True),
    ),
)

FAMILIES = {
    "MiniMaxM2ForCausalLM": MINIMAX_M2,
}

ARCHITECTURES = {
    "minimax_m2": "MiniMaxM2ForCausalLM",
}
