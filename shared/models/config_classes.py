"""Config classes of transformers for each supported family: field defaults and aliases.

A config.json may omit any field at its class default, and transformers writes some fields under
another name than it reads. `tests/models/test_config_classes.py` compares the table with the
installed transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.models.config_fields import CONFIG, Json

NULLABLE = {"eos_token_id", "num_key_value_heads", "q_lora_rank", "sliding_window"}
"""Fields whose null has its own meaning, different from the class default."""

STRUCTURE = {
    *("decoder_sparse_step", "first_k_dense_replace", "full_attention_interval"),
    *("max_window_layers", "no_rope_layer_interval", "num_nextn_predict_layers"),
    *("in_channels", "n_group", "topk_group", "n_routed_experts", "n_shared_experts"),
    *("num_experts", "num_local_experts"),
}
"""Numeric fields whose null equals an absent field; null in any other numeric field is an error."""


@dataclass(frozen=True, eq=False)
class ConfigClass:
    """A config class of transformers, limited to the fields that are read.

    Attributes:
      name: Name of the class.
      fields: Default of each field that the class declares.
      aliases: Other names of fields, each with its name in `fields`.
      theta: Default base of the rotary frequencies.
      local_theta: The same of sliding-window layers, if those have another one: the default of
        `rope_local_base_freq`; None otherwise.
      rotated: Default fraction of a head that is rotated.
      sections: Default M-RoPE sections: rotated pairs by time, row and column of an image.
      extras: Default of each field that checkpoints contain and the class does not declare.
    """

    name: str
    fields: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    theta: float = 10000.0
    local_theta: float | None = None
    rotated: float = 1.0
    sections: list[int] | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def defaults(self) -> dict[str, Any]:
        """Default of each field."""
        return {**self.extras, **self.fields}

    def completed(self, stated: Json, place: str = CONFIG) -> dict[str, Any]:
        """Returns the stated fields under their canonical names, with defaults for absent ones.

        Raises:
          ValueError: Two spellings of a field have different values.
        """
        defaults, named = self.defaults, self._renamed(stated, place)
        absent = {name for name, value in named.items() if value is None and self._fills(name)}
        return defaults | {name: value for name, value in named.items() if name not in absent}

    def _fills(self, name: str) -> bool:
        """Returns True if null in the field equals an absent field."""
        default = self.defaults.get(name)
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        is_filled = name in STRUCTURE or not is_number
        return name not in NULLABLE and default is not None and is_filled

    def _renamed(self, stated: Json, place: str) -> dict[str, Any]:
        named = {name: value for name, value in stated.items() if name not in self.aliases}
        for alias, name in self.aliases.items():
            if (value := stated.get(alias)) is None:
                continue
            if named.get(name) not in (None, value):
                raise ValueError(
                    f"{alias} and {name} in {place} are spellings of one field and must be "
                    f"equal, got {value!r:.60} and {named[name]!r:.60}; remove one of them"
                )
            if named.get(name) is None:
                named[name] = value
        return named


def _declared(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: tuple[int, int | None]
) -> dict[str, Any]:
    """Returns the defaults of the fields that all classes declare, in the order of their files."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_parameters": None,
        "eos_token_id": None,
        "rms_norm_eps": 1e-6,
    }


_BIASES = {"attention_bias": False, "mlp_bias": False}
_LIKE_LLAMA = _declared(32000, 4096, 11008, 32, (32, None)) | {
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
LLAMA = ConfigClass("LlamaConfig", _LIKE_LLAMA | _BIASES | {"head_dim": None})
GRANITE = ConfigClass(
    "GraniteConfig",
    _LIKE_LLAMA
    | _BIASES
    | {
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
)
_GEMMA = _declared(256000, 2304, 9216, 26, (8, 4)) | {
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
GPT_OSS = ConfigClass(
    "GptOssConfig",
    _declared(201088, 2880, 2880, 36, (64, 8))
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
    _declared(32000, 4096, 14336, 32, (32, 8))
    | {
        "head_dim": None,
        "max_position_embeddings": 131072,
        "eos_token_id": 2,
        "sliding_window": 4096,
    },
)
MINISTRAL3 = ConfigClass(
    "Ministral3Config",
    _declared(131072, 4096, 14336, 34, (32, 8))
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
    _declared(32064, 3072, 8192, 32, (32, None))
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
    _declared(128256, 2048, 11008, 36, (16, 4))
    | _BIASES
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
_SLIDES = {"use_sliding_window": False, "sliding_window": 4096}
QWEN2 = ConfigClass(
    "Qwen2Config",
    _declared(151936, 4096, 22016, 32, (32, 32))
    | _SLIDES
    | {"max_position_embeddings": 32768, "max_window_layers": 28, "layer_types": None},
)
QWEN3 = ConfigClass("Qwen3Config", {**QWEN2.fields, "head_dim": 128, "attention_bias": False})
QWEN3_MOE = ConfigClass(
    "Qwen3MoeConfig",
    _declared(151936, 2048, 6144, 24, (32, 4))
    | _SLIDES
    | {
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
        "mlp_only_layers": None,
    },
    aliases={"num_local_experts": "num_experts"},
)
GLM4_MOE = ConfigClass(
    "Glm4MoeConfig",
    _declared(151552, 4096, 10944, 46, (96, 8))
    | {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 1,
    },
    aliases={
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    rotated=0.5,
)
_LATENT = {
    "attention_bias": False,
    "n_shared_experts": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "norm_topk_prob": True,
    "eos_token_id": 1,
    "rope_interleave": True,
}
DEEPSEEK_V3 = ConfigClass(
    "DeepseekV3Config",
    _declared(129280, 7168, 18432, 61, (128, 128))
    | _LATENT
    | {
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
    },
    aliases=GLM4_MOE.aliases,
)
GLM4_MOE_LITE = ConfigClass(
    "Glm4MoeLiteConfig",
    _declared(154880, 2048, 10240, 47, (20, 20))
    | _LATENT
    | {
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "v_head_dim": 256,
        "qk_nope_head_dim": 192,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": None,
    },
    aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
    extras={"first_k_dense_replace": 1},
)
_HYBRID = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
}
_GATED = {"attn_output_gate": True, "full_attention_interval": 4, "output_gate_type": "silu"}
QWEN3_5 = ConfigClass(
    "Qwen3_5TextConfig",
    _declared(248320, 4096, 12288, 32, (16, 4)) | _HYBRID,
    rotated=0.25,
    sections=[11, 11, 10],
    extras=_GATED,
)
_WITHOUT_DENSE = {
    name: value
    for name, value in _declared(248320, 2048, 0, 40, (16, 2)).items()
    if name != "intermediate_size"
}
QWEN3_5_MOE = ConfigClass(
    "Qwen3_5MoeTextConfig",
    _WITHOUT_DENSE
    | _HYBRID
    | {
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
    rotated=0.25,
    sections=[11, 11, 10],
    extras=_GATED,
)

MISTRAL3 = ConfigClass(
    "Mistral3Config",
    {"tie_word_embeddings": True, "image_token_index": 10},
    aliases={"image_token_id": "image_token_index"},
)
QWEN3_5_OUTER = ConfigClass(
    "Qwen3_5Config", {"tie_word_embeddings": False, "image_token_id": 248056}
)
"""Config classes of vision-language models, which nest the config class of a text model."""

QWEN3_5_VISION = ConfigClass(
    "Qwen3_5VisionConfig",
    {
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "rope_parameters": None,
    },
    aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "depth"},
)
