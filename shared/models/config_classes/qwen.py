"""Config classes of transformers for Qwen."""

from shared.models.config_classes.config_class import ConfigClass, declared

_SLIDES = {"use_sliding_window": False, "sliding_window": 4096}
QWEN2 = ConfigClass(
    "Qwen2Config",
    declared(151936, 4096, 22016, 32, (32, 32))
    | _SLIDES
    | {"max_position_embeddings": 32768, "max_window_layers": 28, "layer_types": None},
)
QWEN3 = ConfigClass("Qwen3Config", {**QWEN2.fields, "head_dim": 128, "attention_bias": False})
QWEN3_MOE = ConfigClass(
    "Qwen3MoeConfig",
    declared(151936, 2048, 6144, 24, (32, 4))
    | _SLIDES
    | {
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
        "mlp_only_layers": None,
    },
    aliases={"num_local_experts": "num_experts"},
)
_HYBRID = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
}
_GATED = {"attn_output_gate": True, "full_attention_interval": 4, "output_gate_type": "silu"}
QWEN3_5 = ConfigClass(
    "Qwen3_5TextConfig",
    declared(248320, 4096, 12288, 32, (16, 4)) | _HYBRID,
    rotated=0.25,
    sections=[11, 11, 10],
    extras=_GATED,
)
_WITHOUT_DENSE = {
    name: value
    for name, value in declared(248320, 2048, 0, 40, (16, 2)).items()
    if name != "intermediate_size"
}
QWEN3_5_MOE = ConfigClass(
    "Qwen3_5MoeTextConfig",
    _WITHOUT_DENSE
    | _HYBRID
    | {
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
    rotated=0.25,
    sections=[11, 11, 10],
    extras=_GATED,
)
QWEN3_NEXT = ConfigClass(
    "Qwen3NextConfig",
    declared(151936, 2048, 5632, 48, (16, 2))
    | _HYBRID
    | {
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
        "mlp_only_layers": None,
    },
    rotated=0.25,
    # Releases have an MTP layer, which their config.json does not name.
    extras=_GATED | {"mtp_num_hidden_layers": 1},
)
QWEN3_5_OUTER = ConfigClass(
    "Qwen3_5Config", {"tie_word_embeddings": False, "image_token_id": 248056}
)
"""Config class of vision-language models, which nest that of a text model."""

QWEN3_5_VISION = ConfigClass(
    "Qwen3_5VisionConfig",
    {
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "rope_parameters": None,
    },
    aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "depth"},
)
