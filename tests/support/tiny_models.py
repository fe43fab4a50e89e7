"""Small random checkpoints whose text is worth comparing.

The head of an untied model scores, for each token, how much of one other token's embedding is left
in the hidden state, so a part of every next token follows from the newest one alone and the rest
from the whole context. The MTP layer sees the same part, and therefore agrees with the model in
about every second position; without it acceptance would be near 0 and speculation prove little.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from models.make_random import noise_of
from shared.models import mtp
from shared.models.checkpoint import Weights
from shared.models.config import ModelConfig
from shared.models.families import config_from_dict
from shared.models.parameter import Parameter
from shared.models.parameters import parameters
from shared.models.saving import save_checkpoint
from shared.models.stacks import BIAS
from tests.support.tiny_mamba2 import VARIANTS, mamba2_configs
from tests.support.tiny_switched import SWITCHED

FAMILIES = ("llama", "qwen3", "qwen3_5")
DENSE = (
    *("bamba", "falcon_h1", "gemma2", "gemma3", "gemma4", "granite", "llama_bias", "ministral3"),
    *("mistral", "olmo3", "phi3", "qwen2", "smollm3"),
)
"""Dense families with optional features, each with fields of its own."""
LATENT = ("deepseek_v3", "glm4_moe_lite")
"""Families with latent attention, with and without a latent of queries."""
EXPERTS = (
    *("gemma4_moe", "glm4_moe", "gpt_oss", "granitemoehybrid", "minimax_m2", "nemotron_h"),
    *("qwen3_5_moe", "qwen3_moe", "qwen3_next", *LATENT),
)
"""Families with mixtures of experts, between them every kind of router and of layout."""
MATRIX_ONLY = ("gemma4_moe", "minimax_m2", "qwen3_next")
"""Families with slow cells, which only the matrix has."""
EOS_ID = 1

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "eos_token_id": EOS_ID,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 288,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 272,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "attn_output_gate": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
}

_LIKE_LLAMA = {name: value for name, value in _CONFIGS["llama"].items() if name != "rope_scaling"}
_CONFIGS |= {name: _LIKE_LLAMA | switched for name, switched in SWITCHED.items()}
for name in ("gemma4", "ministral3"):
    del _CONFIGS[name]["rope_theta"]  # it is among their `rope_parameters`
_CONFIGS |= mamba2_configs(_LIKE_LLAMA, _CONFIGS["granite"])
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_CONFIGS["qwen3_moe"] = {
    **_CONFIGS["qwen3"],
    **_EXPERTS,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
_CONFIGS["qwen3_5_moe"] = {
    **_CONFIGS["qwen3_5"],
    **_EXPERTS,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "shared_expert_intermediate_size": 40,
}
_CONFIGS["qwen3_next"] = {
    **_CONFIGS["qwen3_5_moe"],
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "norm_topk_prob": False,
    "mlp_only_layers": [2],
}
_CONFIGS["glm4_moe"] = {
    **_LIKE_LLAMA,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
}
_CONFIGS["gpt_oss"] = {
    **_LIKE_LLAMA,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 12,
    "swiglu_limit": 0.75,  # low enough to clamp
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "truncate": False,
    },
}
_CONFIGS["minimax_m2"] = {
    **_LIKE_LLAMA,
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rotary_dim": 8,
    "use_qk_norm": True,
    "use_routing_bias": True,
}
_CONFIGS["nemotron_h"] = {
    **{
        name: value
        for name, value in _LIKE_LLAMA.items()
        if name not in ("rms_norm_eps", "rope_theta", "num_hidden_layers")
    },
    **{"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 16},
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*E-ME",
    "layer_norm_epsilon": 1e-5,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "moe_latent_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
_CONFIGS["gemma4_moe"] = {
    **_CONFIGS["gemma4"],
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
_LATENT: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_CONFIGS["deepseek_v3"] = {
    **{name: value for name, value in _LIKE_LLAMA.items() if name != "head_dim"},
    **_LATENT,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 32,
    "n_group": 4,
    "topk_group": 2,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_CONFIGS["glm4_moe_lite"] = {
    **{name: value for name, value in _LIKE_LLAMA.items() if name != "head_dim"},
    **_LATENT,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
}
_DIVIDED = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
DIVIDED = {"qwen3_5": "qwen3_5_divided", "qwen3_5_moe": "qwen3_5_moe_divided"}
"""Families again, with a number of heads that four ranks divide."""
_CONFIGS |= {divided: _CONFIGS[name] | _DIVIDED for name, divided in DIVIDED.items()}
_CONFIGS |= {variant: _CONFIGS[name] | changed for variant, (name, changed) in VARIANTS.items()}
DELTA = ("qwen3_5", "qwen3_5_moe", "qwen3_next", *DIVIDED.values())
"""Families with GDN layers."""
MAMBA2 = ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h")
"""Families with Mamba2 layers."""
HYBRIDS = (*MAMBA2, *VARIANTS, *DELTA)
"""Families with a recurrent state."""
WITH_MTP = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "nemotron_h", *DELTA)

EMBEDDING_SCALE = 0.6
HEAD_SCALE = 2.5
"""Both were chosen so that about half of the greedy tokens follow from the newest token alone."""


def tiny_config(family: str, *, nested: bool, with_mtp: bool, tied: bool) -> dict[str, Any]:
    """The contents of config.json; `nested` is the form of a checkpoint that can also see."""
    config = {**_COMMON, **_CONFIGS[family], "tie_word_embeddings": tied}
    if family in WITH_MTP:
        field = (mtp.QWEN if family.startswith("qwen") else mtp.DEEPSEEK).count_field
        config[field] = int(with_mtp)
    if not nested:
        return config
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    return {**outer, "tie_word_embeddings": tied, "text_config": config}


def tiny_weights(config: ModelConfig, seed: int) -> Weights:
    """Random weights in float32, under our names."""
    rng = np.random.default_rng(seed)
    weights = {p.name: _random(p, config, rng) for p in parameters(config, config.has_mtp)}
    if not config.tied:
        order = rng.permutation(config.vocab)
        follows = np.empty(config.vocab, np.int64)
        follows[order] = np.roll(order, 1)  # one cycle through all tokens
        unit = weights["embed"] / np.linalg.norm(weights["embed"], axis=1, keepdims=True)
        weights["lm_head"] = np.float32(HEAD_SCALE) * unit[follows]
    if config.has_mtp:
        passed_on = np.eye(config.hidden, dtype=np.float32)
        weights["mtp.fc"][:, : config.hidden] = passed_on
        weights["mtp.fc"][:, config.hidden :] *= np.float32(0.3)
    return weights


def tiny_model(
    family: str,
    seed: int,
    *,
    nested: bool = False,
    with_mtp: bool = True,
    tied: bool = False,
) -> tuple[ModelConfig, Weights]:
    """A config and its weights without a file.

    Only qwen3_5 can be nested, and only `WITH_MTP` have an MTP layer.
    """
    config = config_from_dict(tiny_config(family, nested=nested, with_mtp=with_mtp, tied=tied))
    return config, tiny_weights(config, seed)


def write_tiny(
    folder: str | Path,
    family: str,
    seed: int,
    *,
    nested: bool = False,
    with_mtp: bool = True,
    tied: bool = False,
    num_shards: int = 1,
) -> ModelConfig:
    """Writes a checkpoint folder as it would come from Hugging Face, without a tokenizer."""
    config_dict = tiny_config(family, nested=nested, with_mtp=with_mtp, tied=tied)
    config, weights = tiny_model(family, seed, nested=nested, with_mtp=with_mtp, tied=tied)
    save_checkpoint(folder, config_dict, weights, num_shards)
    generation = json.dumps({"eos_token_id": [EOS_ID]})
    (Path(folder) / "generation_config.json").write_text(generation, encoding="utf-8")
    return config


def _random(
    parameter: Parameter, config: ModelConfig, rng: np.random.Generator
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Normal weights with deviation 1 / sqrt(fan-in), norms around their neutral value."""
    name, shape = parameter.name, parameter.shape
    noise = noise_of(parameter, rng)
    if name == "embed":
        drawn = EMBEDDING_SCALE * noise
    elif name == "final_norm" and config.tied:
        # With one sign for all channels a tied model would repeat its newest token for ever.
        signs = rng.choice([-1.0, 1.0], shape)
        drawn = HEAD_SCALE * 0.5 * signs - float(config.zero_centered_norms)
    elif name.endswith(("layer_scalar", "expert_scale")):
        drawn = 1 + 0.2 * noise
    elif name.endswith("a_log"):
        drawn = np.log(rng.uniform(0.05, 3.5, shape))
    elif name.endswith("dt_bias"):
        drawn = noise - 1
    elif name.endswith("norm"):
        plain = not config.zero_centered_norms or name == "gated_delta.norm"
        drawn = 0.2 * noise + float(plain)
    elif name.endswith("conv"):
        drawn = 0.5 * noise
    elif name.endswith("skip"):
        drawn = 1 + 0.2 * noise
    elif name.endswith((BIAS, "score_bias")):
        drawn = 0.2 * noise
    elif name.endswith("sinks"):
        drawn = noise
    else:
        drawn = noise / np.sqrt(shape[-1])
        if name.endswith("down") and config.experts and not config.experts.activation.is_gated:
            drawn *= 0.2  # squares are larger than outputs of SwiGLU
    return drawn.astype(np.float32)
