"""Config classes of transformers for MiniMax."""

from shared.models.config_classes.config_class import ConfigClass, declared

MINIMAX_M2 = ConfigClass(
    "MiniMaxM2Config",
    declared(200064, 3072, 1536, 62, (48, 8))
    | {
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "eos_token_id": 200020,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
    },
    {"num_experts": "num_local_experts"},
    theta=5000000.0,
    extras={"rotary_dim": None},
)
