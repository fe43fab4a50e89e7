"""Configs of tiny models with Mamba2 layers."""

from typing import Any

_MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_h1_no_norm": ("falcon_h1", {"mamba_rms_norm": False}),
    "granitemoehybrid_dense": ("granitemoehybrid", {"num_local_experts": 0}),
    "nemotron_h_no_mtp": ("nemotron_h", {"moe_latent_size": None}),
}
"""Families again, with other fields: no output norm, no experts, no latent and no MTP layers."""


def mamba2_configs(llama: dict[str, Any], granite: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the contents of config.json by family, from those of two families without Mamba2."""
    unsized, factors = (
        {name: value for name, value in each.items() if name != "head_dim"}
        for each in (llama, granite)
    )
    return {
        "bamba": {
            **unsized,
            **_MAMBA2,
            "architectures": ["BambaForCausalLM"],
            "model_type": "bamba",
            "attn_layer_indices": [1],
        },
        "falcon_h1": {
            **llama,
            **_MAMBA2,
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 0.7,
            "key_multiplier": 0.5,
            "mlp_multipliers": [0.8, 0.6],
            "ssm_in_multiplier": 1.3,
            "ssm_multipliers": [0.8, 1.1, 0.7, 1.2, 0.9],
            "ssm_out_multiplier": 0.6,
        },
        "granitemoehybrid": {
            **factors,
            **_MAMBA2,
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "layer_types": ["mamba", "attention", "mamba"],
            "intermediate_size": 24,
            "shared_intermediate_size": 40,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
    }
