"""Config classes of families with Mamba2 layers."""

import math

from shared.models.config_classes.config_class import BIASES, ConfigClass, declared
from shared.models.config_classes.llama import FACTORS

_MAMBA2 = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, math.inf),
}
BAMBA = ConfigClass(
    "BambaConfig",
    declared(128000, 4096, 14336, 32, (32, 8))
    | BIASES
    | _MAMBA2
    | {
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "attn_layer_indices": None,
    },
    aliases={"layer_types": "layers_block_type"},
    rotated=0.5,
)
GRANITE_MOE_HYBRID = ConfigClass(
    "GraniteMoeHybridConfig",
    declared(32000, 4096, 11008, 32, (32, None))
    | FACTORS
    | _MAMBA2
    | {
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        "attention_bias": False,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "position_embedding_type": None,
        "layer_types": None,
    },
    aliases={"layers_block_type": "layer_types"},
)
FALCON_H1 = ConfigClass(
    "FalconH1Config",
    declared(128000, 4096, 14336, 32, (32, 8))
    | BIASES
    | _MAMBA2
    | {
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "projectors_bias": False,
        "lm_head_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "mlp_multipliers": None,
        "key_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
        "ssm_multipliers": None,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
    },
    aliases={"layer_types": "layers_block_type"},
)
