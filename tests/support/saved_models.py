"""Tiny models of the served families as transformers makes and writes them.

Every field except sizes has the default of its class, unless a case sets it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 3}
DELTA: dict[str, Any] = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
PIXTRAL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
}
MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32}
PADDING = {"pad_token_id": 0}
"""The classes' own may be beyond the vocabulary."""

LATENT: dict[str, Any] = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
GLOBAL_HEADS: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GEMMA4: dict[str, Any] = {
    **GLOBAL_HEADS,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA2, "attn_layer_indices": [1, 3]},
    "deepseek_v3": {**LATENT, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 128},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": {**GLOBAL_HEADS, "sliding_window": 8},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 8, "num_experts_per_tok": 3},
    "glm4_moe_lite": LATENT,
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 8},
    "granite": {},
    "granitemoehybrid": {
        **MAMBA2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 8,
        "shared_intermediate_size": 48,
    },
    "llama": {},
    "minimax_m2": {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3},
    "ministral3": {},
    "mistral": {},
    "nemotron_h": {
        **EXPERTS,
        "head_dim": 16,
        "n_routed_experts": 8,
        "moe_shared_expert_intermediate_size": 40,
        "layers_block_type": ["mamba", "moe", "full_attention", "mlp", "mamba"],
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16},
    },
    "olmo2": {},
    "olmo3": {},
    "phi3": PADDING,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "num_experts": 8},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {
        **DELTA,
        **EXPERTS,
        "num_experts": 8,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_next": {
        **DELTA,
        **EXPERTS,
        "num_experts": 8,
        "shared_expert_intermediate_size": 40,
    },
    "smollm3": PADDING,
}
"""Fields of each family besides `SIZES`, by `model_type`."""

NESTED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral3": ("mistral", PIXTRAL),
    "qwen3_5": ("qwen3_5_text", VISION),
    "qwen3_5_moe": ("qwen3_5_moe_text", VISION),
}
"""Models that also read images: the `model_type` of their text, and their `vision_config`."""

_YARN = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0}
_YARN["original_max_position_embeddings"] = 64  # type: ignore[assignment]
_TWO_BASES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 20000, "factor": 4},
}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 8}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3, biases, rotation in halves": (
        "deepseek_v3",
        {"attention_bias": True, "rope_interleave": False},
    ),
    "deepseek_v3, one group": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "deepseek_v3, weights not renormalised": ("deepseek_v3", {"norm_topk_prob": False}),
    "deepseek_v3, yarn": (
        "deepseek_v3",
        {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "glm4_moe_lite, dense layers": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse", "dense", "dense", "sparse"], "n_shared_experts": 2},
    ),
    "glm4_moe_lite, no query rank": ("glm4_moe_lite", {"q_lora_rank": None}),
    "glm4_moe, switched": (
        "glm4_moe",
        {"use_qk_norm": True, "attention_bias": True, "n_group": 4, "topk_group": 2},
    ),
    "gemma2, other scalar": ("gemma2", {"query_pre_attn_scalar": 24, "head_dim": 32}),
    "gemma3, other bases": (
        "gemma3_text",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": _TWO_BASES,
        },
    ),
    "gemma4, shared KV, wide MLPs": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 5,
            "layer_types": [*GLOBAL_HEADS["layer_types"], "full_attention"],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4, K = V": (
        "gemma4_text",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4, experts": (
        "gemma4_text",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gpt_oss, rounded yarn, no windows": (
        "gpt_oss",
        {
            "rope_parameters": {**_YARN, "truncate": True},
            "layer_types": ["full_attention"] * 4,
            "swiglu_limit": 0.5,
        },
    ),
    "granite, factors": ("granite", {"attention_multiplier": 0.3, "logits_scaling": 2}),
    "falcon_h1, multipliers, norm": (
        "falcon_h1",
        {
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 0.7,
            "key_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.4,
            "mlp_multipliers": [0.8, 0.6],
            "ssm_in_multiplier": 1.3,
            "ssm_multipliers": [0.8, 1.1, 0.7, 1.2, 0.9],
            "ssm_out_multiplier": 0.6,
        },
    ),
    "falcon_h1, norm before gate, biases": (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
        },
    ),
    "granitemoehybrid, dense, factors, rotated": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 2,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2,
            "residual_multiplier": 0.5,
        },
    ),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama, yarn": ("llama", {"rope_parameters": _YARN}),
    "minimax_m2, rotated dimensions": (
        "minimax_m2",
        {"head_dim": 16, "rotary_dim": 4, "num_key_value_heads": 1},
    ),
    "mistral, windows": ("mistral", {"sliding_window": 8}),
    "olmo3, two bases": ("olmo3", {"sliding_window": 8, "rope_parameters": _TWO_BASES}),
    "olmo3, windows": ("olmo3", {"sliding_window": 8}),
    "phi3, longrope": (
        "phi3",
        {
            "rope_parameters": _LONG | {"long_factor": [1.5] * 8},
            "max_position_embeddings": 8192,
        },
    ),
    "nemotron_h, latent": (
        "nemotron_h",
        {
            "layers_block_type": ["full_attention", "moe", "mlp", "mlp"],
            "moe_latent_size": 24,
            "moe_shared_expert_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "qwen2, windows": ("qwen2", {**_WINDOWS, "max_window_layers": 2}),
    "qwen3_moe, windows": ("qwen3_moe", _WINDOWS),
    "qwen3_moe, dense layers": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_next, dense layers": (
        "qwen3_next",
        {"mlp_only_layers": [1], "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "smollm3, untied": ("smollm3", {"tie_word_embeddings": False, "no_rope_layer_interval": 2}),
}
"""Cases with fields of their own: the `model_type`, and those fields."""


def make(name: str) -> Any:
    """A model of one of `FAMILIES`, `NESTED` or `VARIANTS`, in float32, with drawn weights."""
    model_type, fields = VARIANTS.get(name, (name, {}))
    torch.manual_seed(0)  # transformers draws the time steps of Mamba2
    if model_type in NESTED:
        text, vision = NESTED[model_type]
        nested = {"text_config": {**_text(text), "model_type": text}, "vision_config": vision}
        config = transformers.AutoConfig.for_model(model_type, **nested, image_token_id=VOCAB - 1)
        model = transformers.AutoModelForImageTextToText.from_config(config)
    else:
        config = transformers.AutoConfig.for_model(model_type, **{**_text(model_type), **fields})
        model = transformers.AutoModelForCausalLM.from_config(config)
    _draw(model)
    return model.float().eval()


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """The most likely tokens after a prompt, each by a pass over the whole text."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(num_tokens):
            logits = model(input_ids=ids, use_cache=False).logits[0, -1]
            ids = torch.cat((ids, logits.argmax().reshape(1, 1)), 1)
    return ids[0, len(prompt) :].tolist()


def reloaded(folder: Path) -> Any:
    """The model of a folder as transformers reads it."""
    is_nested = "text_config" in (folder / "config.json").read_text(encoding="utf-8")
    of = (
        transformers.AutoModelForImageTextToText if is_nested else transformers.AutoModelForCausalLM
    )
    return of.from_pretrained(folder, dtype=torch.float32).eval()


def _text(model_type: str) -> dict[str, Any]:
    return {**SIZES, **FAMILIES[model_type]}


def _draw(model: Any) -> None:
    """Weights that distinguish tokens: matrices scaled by inputs, norms near their defaults."""
    drawn, seen = torch.Generator().manual_seed(0), set()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.data_ptr() in seen:
                continue
            seen.add(weight.data_ptr())
            noise = torch.randn(weight.shape, generator=drawn)
            if weight.ndim > 1:
                weight.copy_(noise / weight.shape[-1] ** 0.5)
            elif name.endswith(("norm.weight", "bias", "scale")) or "layernorm" in name:
                weight.add_(0.2 * noise)
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(0.2 * torch.randn(bias.shape, generator=drawn))
            if name.endswith("layer_scalar"):
                bias.copy_(1 + 0.2 * torch.randn(bias.shape, generator=drawn))
    model.tie_weights()
