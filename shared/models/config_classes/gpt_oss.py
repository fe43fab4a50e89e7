"""Config classes of transformers for gpt-oss."""

from shared.models.config_classes.config_class import ConfigClass, declared

GPT_OSS = ConfigClass(
    "GptOssConfig",
    declared(201088, 2880, 2880, 36, (64, 8))
    | {
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
        "layer_types": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    {"num_experts": "num_local_experts"},
    theta=150000.0,
)
