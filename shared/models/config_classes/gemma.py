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
GEMMA3_OUTER = ConfigClass(
    "Gemma3Config",
    {"tie_word_embeddings": True},
    {f"{x}_token_id": f"{x}_token_index" for x in ("image", "boi", "eoi")},
)
