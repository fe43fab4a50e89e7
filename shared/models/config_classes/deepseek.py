"""Config classes of transformers for DeepSeek, and families with its MoE routing."""

from shared.models.config_classes.config_class import ConfigClass, declared

GLM4_MOE = ConfigClass(
    "Glm4MoeConfig",
    declared(151552, 4096, 10944, 46, (96, 8))
    | {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 1,
    },
    aliases={
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    rotated=0.5,
)
_LATENT = {
    "attention_bias": False,
    "n_shared_experts": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "norm_topk_prob": True,
    "eos_token_id": 1,
    "rope_interleave": True,
}
DEEPSEEK_V3 = ConfigClass(
    "DeepseekV3Config",
    declared(129280, 7168, 18432, 61, (128, 128))
    | _LATENT
    | {
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
    },
    aliases=GLM4_MOE.aliases,
)
GLM4_MOE_LITE = ConfigClass(
    "Glm4MoeLiteConfig",
    declared(154880, 2048, 10240, 47, (20, 20))
    | _LATENT
    | {
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "v_head_dim": 256,
        "qk_nope_head_dim": 192,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": None,
    },
    aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
    extras={"first_k_dense_replace": 1},
)
