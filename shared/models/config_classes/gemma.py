"""Config classes of transformers for Gemma."""

from shared.models.config_classes.config_class import ConfigClass, declared

_GEMMA = declared(256000, 2304, 9216, 26, (8, 4)) | {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "use_bidirectional_attention": None,
}
del _GEMMA["hidden_act"]
GEMMA2 = ConfigClass("Gemma2Config", _GEMMA)
GEMMA3 = ConfigClass(
    "Gemma3TextConfig",
    _GEMMA
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    theta=1000000.0,
    local_theta=10000.0,
    extras={"sliding_window_pattern": 6},
)
_GEMMA4 = {name: value for name, value in _GEMMA.items() if not name.startswith(("query", "attn"))}
_GEMMA4 |= {
    "vocab_size": 262144,
    "num_hidden_layers": 30,
    "final_logit_softcapping": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
_GLOBAL_HEADS = {
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "per_layer_config": None,
}
GEMMA4 = ConfigClass(
    "Gemma4TextConfig",
    _GEMMA4
    | {
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
    },
    theta=1000000.0,
    local_theta=10000.0,
    extras=_GLOBAL_HEADS,
)
GEMMA4_UNIFIED = ConfigClass(
    "Gemma4UnifiedTextConfig",
    _GEMMA4
    | {
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    },
    theta=1000000.0,
    local_theta=10000.0,
    extras=_GLOBAL_HEADS,
)
GEMMA3_OUTER = ConfigClass(
    "Gemma3Config",
    {"tie_word_embeddings": True},
    {f"{x}_token_id": f"{x}_token_index" for x in ("image", "boi", "eoi")},
)
GEMMA4_OUTER = ConfigClass("Gemma4Config", {"tie_word_embeddings": True})
GEMMA4_UNIFIED_OUTER = ConfigClass("Gemma4UnifiedConfig", {"tie_word_embeddings": True})
