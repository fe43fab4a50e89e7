"""Config classes of transformers for Llama, and families with dense layers like its own."""

from shared.models.config_classes.config_class import BIASES, ConfigClass, declared

FACTORS = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
"""Fields of Granite models with multipliers."""

_LIKE_LLAMA = declared(32000, 4096, 11008, 32, (32, None)) | {
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
LLAMA = ConfigClass("LlamaConfig", _LIKE_LLAMA | BIASES | {"head_dim": None})
GRANITE = ConfigClass(
    "GraniteConfig",
    _LIKE_LLAMA | BIASES | FACTORS,
)
OLMO2 = ConfigClass(
    "Olmo2Config",
    _LIKE_LLAMA
    | {"vocab_size": 50304, "eos_token_id": 50279, "rms_norm_eps": 1e-5, "attention_bias": False},
)
OLMO3 = ConfigClass(
    "Olmo3Config", {**OLMO2.fields, "sliding_window": 4096, "layer_types": None}, theta=500000.0
)
MISTRAL = ConfigClass(
    "MistralConfig",
    declared(32000, 4096, 14336, 32, (32, 8))
    | {
        "head_dim": None,
        "max_position_embeddings": 131072,
        "eos_token_id": 2,
        "sliding_window": 4096,
    },
)
MINISTRAL3 = ConfigClass(
    "Ministral3Config",
    declared(131072, 4096, 14336, 34, (32, 8))
    | {
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
)
PHI3 = ConfigClass(
    "Phi3Config",
    declared(32064, 3072, 8192, 32, (32, None))
    | {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
        "sliding_window": None,
    },
)
SMOLLM3 = ConfigClass(
    "SmolLM3Config",
    declared(128256, 2048, 11008, 36, (16, 4))
    | BIASES
    | {
        "max_position_embeddings": 32768,
        "eos_token_id": 128001,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "layer_types": None,
        "tie_word_embeddings": True,
    },
    theta=2000000.0,
)
MISTRAL3 = ConfigClass(
    "Mistral3Config",
    {"tie_word_embeddings": True, "image_token_index": 10},
    aliases={"image_token_id": "image_token_index"},
)
