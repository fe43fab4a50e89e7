"""Random configs of models for `bench.kernels.random_configs`.

Random are the family, heads and their sizes, latents, widths, vocabularies, experts, sliding
windows, GDN heads and Mamba2 heads.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

DENSE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Olmo2ForCausalLM")
MIXTURES = ("Qwen3MoeForCausalLM", "Qwen3_5MoeForCausalLM")
HYBRIDS = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
LATENT = ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
GEMMA4, GPT_OSS = "Gemma4ForCausalLM", "GptOssForCausalLM"
NEMOTRON, GRANITE = "NemotronHForCausalLM", "GraniteMoeHybridForCausalLM"
MAMBA2 = (NEMOTRON, GRANITE, "FalconH1ForCausalLM", "BambaForCausalLM")
FAMILIES = (*DENSE, *DENSE, *MIXTURES, *HYBRIDS, *HYBRIDS, *LATENT, GEMMA4, GPT_OSS, *MAMBA2)
WITH_MTP = (*HYBRIDS, *LATENT, NEMOTRON)
VOCABULARIES = (64, 257, 259, 1000, 2048, 4095, 4096, 4097, 8192, 32000, 50257, 151936)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 71)
EXPERTS = (2, 4, 6, 8, 12, 16, 40, 60, 128)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
Json = dict[str, Any]


class Draws:
    """Random choices of a model."""

    def __init__(self, seed: int, number: int) -> None:
        self._rng = np.random.default_rng([seed, number])

    def of(self, *values: Any) -> Any:
        """Returns one of the values."""
        return values[self._rng.integers(len(values))]

    def is_one_of(self, count: int) -> bool:
        """Returns True with probability 1 / n."""
        return not self._rng.integers(count)

    def multiple(self, unit: int, most: int) -> int:
        """Returns a random multiple of a unit, up to a maximum."""
        return unit * int(self._rng.integers(1, most // unit + 1))


def attention(draws: Draws, most: int = 142) -> Json:
    size, kv_heads = draws.multiple(16, 256), draws.of(1, 1, 2, 2, 3, 4, 5, 8)
    group = draws.of(*GROUPS)
    while kv_heads * group > most:
        kv_heads, group = max(1, kv_heads // 2), max(1, group // 2)
    return {
        "head_dim": draws.of(size, 64, 128),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * group,
    }


def target(draws: Draws, family: str, is_fp8: bool, unit: int) -> Json:
    config: Json = {
        "architectures": [family],
        "hidden_size": draws.multiple(unit, 2048),
        "intermediate_size": draws.multiple(unit, 4096),
        "num_hidden_layers": 4 if family in HYBRIDS else 3,
        "vocab_size": draws.of(*VOCABULARIES),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": draws.is_one_of(2),
        "eos_token_id": 1,
        **attention(draws),
    }
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    if is_fp8:
        config["quantization_config"] = FP8 | {"activation_scheme": "dynamic"}
    if family in MIXTURES:
        experts = draws.of(*EXPERTS)
        width = draws.multiple(unit, 512)
        config |= {
            "num_experts": experts,
            "num_experts_per_tok": min(experts, draws.of(1, 2, 3, 4, 6, 8)),
            "moe_intermediate_size": width,
            "norm_topk_prob": True,
        }
        if family in HYBRIDS:
            config["shared_expert_intermediate_size"] = width
    if family in HYBRIDS:
        config["rope_parameters"]["partial_rotary_factor"] = draws.of(0.25, 0.5)
        key_heads = draws.of(1, 2, 3, 4, 8)
        config |= {
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "attn_output_gate": True,
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": key_heads * draws.of(1, 2, 3, 4),
            "linear_key_head_dim": draws.of(16, 32, 64, 128),
            "linear_value_head_dim": draws.of(16, 32, 64, 128),
            "linear_conv_kernel_dim": 4,
            "mtp_num_hidden_layers": 1,
        }
    more = _more_of(family)
    return config if more is None else more(draws, config, unit)


def _more_of(family: str) -> Callable[[Draws, Json, int], Json] | None:
    """Returns what draws the other fields of a family; None without any."""
    if family in LATENT:
        return _latent
    if family in MAMBA2:
        return _nemotron if family == NEMOTRON else _mamba2
    return {GEMMA4: _gemma4, GPT_OSS: _gpt_oss}.get(family)


def _latent(draws: Draws, config: Json, unit: int) -> Json:
    """Returns the config of a model with latent attention and grouped experts."""
    groups, size = draws.of(1, 1, 2, 4), draws.of(2, 4, 8, 16)
    latent = {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": draws.of(None, draws.multiple(16, 1536)),
        "kv_lora_rank": draws.of(512, draws.multiple(16, 512)),
        "qk_nope_head_dim": draws.multiple(16, 192),
        "qk_rope_head_dim": draws.of(16, 32, 64),
        "v_head_dim": draws.multiple(16, 256),
        "first_k_dense_replace": 1,
        "n_routed_experts": groups * size,
        "n_shared_experts": 1,
        "num_experts_per_tok": min(size, draws.of(1, 2, 4, 8)),
        "moe_intermediate_size": draws.multiple(unit, 512),
        "n_group": groups,
        "topk_group": draws.of(1, groups),
        "num_nextn_predict_layers": 1,
    }
    return {name: value for name, value in config.items() if name != "head_dim"} | latent


def _gemma4(draws: Draws, config: Json, unit: int) -> Json:
    """Returns the config of a model with two kinds of attention heads, which may share KV."""
    has_experts = draws.is_one_of(3)
    heads = config["num_attention_heads"]
    experts = draws.of(*EXPERTS)
    config |= {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": draws.of(16, 64, 1000),
        "global_head_dim": draws.of(config["head_dim"], 64, 256, 512),
        "num_global_key_value_heads": draws.of(None, 1, heads),
        "attention_k_eq_v": draws.is_one_of(2),
        "num_kv_shared_layers": 0 if has_experts else draws.of(0, 2),
        "use_double_wide_mlp": not has_experts and draws.is_one_of(2),
        "hidden_size_per_layer_input": draws.of(0, draws.multiple(16, 256)),
        "vocab_size_per_layer_input": config["vocab_size"],
        "final_logit_softcapping": draws.of(None, 30.0),
        "enable_moe_block": has_experts,
        "num_experts": experts,
        "top_k_experts": min(experts, draws.of(1, 2, 4, 8)),
        "moe_intermediate_size": draws.multiple(unit, 512),
    }
    return {name: value for name, value in config.items() if name != "rope_parameters"}


def _gpt_oss(draws: Draws, config: Json, unit: int) -> Json:
    """Returns the config of a model with attention sinks, sliding windows and biases."""
    experts = draws.of(*EXPERTS)
    return config | {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": draws.of(16, 64, 128),
        "intermediate_size": draws.multiple(unit, 512),
        "num_local_experts": experts,
        "num_experts_per_tok": min(experts, draws.of(1, 2, 4)),
        "swiglu_limit": 7.0,
    }


def _mamba2_sizes(draws: Draws, unit: int) -> tuple[int, int, int]:
    """Returns groups, heads and head size; the inner width is a multiple of two units."""
    while True:
        groups, size = draws.of(1, 1, 2, 8), draws.of(16, 32, 64, 128)
        heads = groups * draws.of(1, 2, 3, 4, 6, 8, 16, 48)
        if heads * size <= 8192 and heads * size % (2 * unit) == 0:
            return groups, heads, size


def _nemotron(draws: Draws, config: Json, unit: int) -> Json:
    """Returns the config of a model with one sublayer per layer."""
    groups, heads, size = _mamba2_sizes(draws, unit)
    chosen, in_group = draws.of(1, 1, 2, 4), draws.of(2, 4, 8, 16)
    width = draws.multiple(unit, 512)
    return config | {
        "model_type": "nemotron_h",
        "mlp_hidden_act": "relu2",
        "hybrid_override_pattern": draws.of("ME*E", "M*-M", "M-*E", "*EME"),
        "num_hidden_layers": 4,
        "mamba_num_heads": heads,
        "mamba_head_dim": size,
        "n_groups": groups,
        "ssm_state_size": draws.of(16, 32, 64, 128, 256),
        "use_conv_bias": draws.is_one_of(2),
        "n_routed_experts": chosen * in_group,
        "n_group": chosen,
        "topk_group": draws.of(1, chosen),
        "num_experts_per_tok": min(in_group, draws.of(1, 2, 6)),
        "moe_intermediate_size": width,
        "moe_shared_expert_intermediate_size": draws.of(width, draws.multiple(unit, 1024)),
        "moe_latent_size": draws.of(None, draws.multiple(unit, 512)),
        "num_nextn_predict_layers": 1,
    }


def _mamba2(draws: Draws, config: Json, unit: int) -> Json:
    """Returns the config of a model with attention and Mamba2, in other layers or in parallel."""
    (family,) = config["architectures"]
    groups, heads, size = _mamba2_sizes(draws, unit)
    config |= {
        "num_hidden_layers": 4,
        "mamba_n_groups": groups,
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_d_state": draws.of(16, 32, 64, 128, 256),
        "mamba_conv_bias": draws.is_one_of(2),
        "mamba_proj_bias": draws.is_one_of(4),
    }
    if family not in (GRANITE, "BambaForCausalLM"):
        return config | _falcon_h1(draws, heads * size, config["mamba_proj_bias"])
    # The inner width is twice the hidden size, of which attention heads have equal parts.
    hidden = heads * size // 2
    own = draws.of(*(n for n in (16, 32, 64, 128) if hidden % n == 0))
    count = hidden // own
    config |= {
        "hidden_size": hidden,
        "mamba_expand": 2,
        "num_attention_heads": count,
        "num_key_value_heads": draws.of(*(n for n in (1, 2, 3, 4, 8) if count % n == 0)),
    }
    del config["head_dim"]
    if family == GRANITE:
        experts = draws.of(0, *EXPERTS)
        return config | {
            "layer_types": draws.of(["mamba", "attention"] * 2, [*["mamba"] * 3, "attention"]),
            "intermediate_size": draws.multiple(unit, 512),
            "shared_intermediate_size": draws.multiple(unit, 1024),
            "num_local_experts": experts,
            "num_experts_per_tok": min(experts, draws.of(1, 2, 8)),
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "position_embedding_type": draws.of("nope", "rope"),
        }
    return config | {"attn_layer_indices": draws.of([1], [0, 3])}


def _falcon_h1(draws: Draws, width: int, has_biases: bool) -> Json:
    """Returns the fields of Falcon-H1; multipliers are not supported with biases."""
    norms = {"mamba_rms_norm": draws.is_one_of(2), "mamba_norm_before_gate": draws.is_one_of(2)}
    if has_biases:
        return norms | {"mamba_d_ssm": width}
    factors = {"ssm_multipliers": [0.8, 1.1, 0.7, 1.2, 0.9], "mlp_multipliers": [0.8, 0.6]}
    return norms | factors | {"mamba_d_ssm": width, "ssm_out_multiplier": 0.6}
