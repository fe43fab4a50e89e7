"""Reads the config.json of each model family; the only module that contains its field names."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.models import config_classes, mtp
from shared.models.activation import GELU_TANH, SWIGLU_OAI
from shared.models.config import ModelConfig
from shared.models.config_fields import (
    MOST_NAMED,
    Json,
    count,
    flag,
    listed,
    number,
    object_of,
    positive,
    word,
)
from shared.models.experts import Routing
from shared.models.family import BIASES, Family, SlidingWindowRule
from shared.models.formats.registry import encoding_of
from shared.models.formats.weight_format import TensorEncoding
from shared.models.layer_fields import (
    read_attention,
    read_factor,
    read_latent_attention,
    read_layers,
    read_softcap,
    rotary_settings,
)
from shared.models.mlp import ExpertTensors
from shared.models.model_folder import ModelFolder
from shared.models.mtp import MtpLayers
from shared.models.rotary import RotaryConfig
from shared.models.unsupported_fields import refuse_unsupported
from shared.models.vision_config import VisionConfig, read_vision

_GROUPED = Routing(
    count_field="n_routed_experts",
    scores="sigmoid",
    counts_shared=True,
    has_groups=True,
    begins_dense=True,
)
GLM4_MOE = Family(
    "glm4_moe",
    config_classes.GLM4_MOE,
    biases=BIASES[:1],
    routing=_GROUPED,
    norms_by_flag=True,
    plain_out=True,
    mtp=mtp.DEEPSEEK,
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    config_classes.DEEPSEEK_V3,
    biases=BIASES[:1],
    routing=_GROUPED,
    has_latent_attention=True,
    mtp=mtp.DEEPSEEK,
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    of=config_classes.GLM4_MOE_LITE,
    routing=replace(_GROUPED, reads_types=True),
)
GEMMA2 = Family(
    "gemma2",
    config_classes.GEMMA2,
    biases=BIASES[:1],
    sliding_window=SlidingWindowRule.BY_TYPES,
    full_attention_interval=2,
    scales_embeddings=True,
    has_query_scalar=True,
    has_softcaps=True,
    zero_centered=True,
    sandwich_norms=True,
    activation=GELU_TANH,
)
GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    of=config_classes.GEMMA3,
    qk_norm=True,
    full_attention_interval=6,
)
_OAI_EXPERTS = ExpertTensors(
    router="mlp.router",
    is_transposed=True,
    is_interleaved=True,
    width_field="intermediate_size",
)
GPT_OSS = Family(
    "gpt_oss",
    config_classes.GPT_OSS,
    biases=BIASES[:1],
    sliding_window=SlidingWindowRule.BY_TYPES,
    full_attention_interval=2,
    has_sinks=True,
    routing=Routing(
        count_field="num_local_experts",
        is_renormalised=True,
        reads_renormalised=False,
        has_bias=True,
        activation=SWIGLU_OAI,
        tensors=_OAI_EXPERTS,
    ),
)
GRANITE = Family("granite", config_classes.GRANITE, biases=BIASES, has_factors=True)
LLAMA = Family("llama", config_classes.LLAMA, drafts_trees=True, biases=BIASES)
MISTRAL = Family("mistral", config_classes.MISTRAL, sliding_window=SlidingWindowRule.BY_SIZE)
MINISTRAL3 = replace(MISTRAL, name="ministral3", of=config_classes.MINISTRAL3, scales_queries=True)
OLMO2 = Family("olmo2", config_classes.OLMO2, qk_norm=True, biases=BIASES[:1], post_norm=True)
OLMO3 = replace(
    OLMO2,
    name="olmo3",
    of=config_classes.OLMO3,
    sliding_window=SlidingWindowRule.BY_TYPES,
    scales_full_layers=True,
)
PHI3 = Family(
    "phi3", config_classes.PHI3, fused_projections=True, sliding_window=SlidingWindowRule.BY_SIZE
)
QWEN2 = Family(
    "qwen2", config_classes.QWEN2, input_bias=True, sliding_window=SlidingWindowRule.BY_FLAG
)
QWEN3 = Family(
    "qwen3",
    config_classes.QWEN3,
    qk_norm=True,
    biases=BIASES[:1],
    sliding_window=SlidingWindowRule.BY_FLAG,
)
QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    of=config_classes.QWEN3_MOE,
    sliding_window=SlidingWindowRule.WHOLE_BY_FLAG,
    routing=Routing(steps=True),
)
QWEN3_5 = Family(
    "qwen3_5", config_classes.QWEN3_5, qk_norm=True, is_hybrid=True, mtp=mtp.QWEN, sees=True
)
_WITH_SHARED = Routing(is_renormalised=True, reads_renormalised=False, has_shared=True)
QWEN3_5_MOE = replace(
    QWEN3_5, name="qwen3_5_moe", of=config_classes.QWEN3_5_MOE, routing=_WITH_SHARED
)
SMOLLM3 = Family("smollm3", config_classes.SMOLLM3, biases=BIASES, nope_layers=True)

FAMILIES = {
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
    "GptOssForCausalLM": GPT_OSS,
    "GraniteForCausalLM": GRANITE,
    "LlamaForCausalLM": LLAMA,
    "Ministral3ForCausalLM": MINISTRAL3,
    "MistralForCausalLM": MISTRAL,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO3,
    "Phi3ForCausalLM": PHI3,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE,
    "SmolLM3ForCausalLM": SMOLLM3,
}
"""Supported architecture names of Hugging Face."""

ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "kimi_linear": "KimiLinearForCausalLM",
    "llama": "LlamaForCausalLM",
    "longcat_flash": "LongcatFlashForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mistral4": "Mistral4ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""Architecture of a `model_type`, for a config.json without `architectures`."""

VLM_ARCHITECTURES = {
    "Gemma3ForConditionalGeneration": (config_classes.GEMMA3_OUTER, "gemma3_text"),
    "Mistral3ForConditionalGeneration": (config_classes.MISTRAL3, "mistral"),
}
"""Vision-language architectures whose `text_config` determines the family: the config class around
it, and the `model_type` of a `text_config` without one.
"""

UNSUPPORTED = {
    "DeepseekV2ForCausalLM": "a router with softmax scores and groups by their maximum",
    "DeepseekV32ForCausalLM": "sparse attention with an indexer",
    "DeepseekV4ForCausalLM": "compressed attention and hyper-connections",
    "GlmMoeDsaForCausalLM": "sparse attention with an indexer",
    "KimiK25ForConditionalGeneration": "a vision encoder",
    "KimiLinearForCausalLM": "Kimi Delta Attention layers",
    "LongcatFlashForCausalLM": "layers of two attention blocks, and experts without weights",
    "Mistral4ForCausalLM": "query scaling in latent attention",
}
"""Unsupported architectures with latent attention, and a missing feature that they require."""

HEADS = ("Eagle", "DFlash", "DSpark", "DraftModel", "Speculator", "Medusa")
"""Substrings of architecture names that are draft heads, not models."""


def config_from_folder(folder: str | Path, context_length: int | None = None) -> ModelConfig:
    """Reads the config of a model by the path of its folder; see `model_config`."""
    return model_config(ModelFolder(folder), context_length)


def model_config(folder: ModelFolder, context_length: int | None = None) -> ModelConfig:
    """Reads config.json and, if present, generation_config.json of a model folder.

    Args:
      folder: The model folder.
      context_length: See `config_from_dict`.

    Raises:
      ValueError: A file is missing or invalid, or the model is not supported.
    """
    return config_from_dict(folder.config, folder.generation_config, context_length)


def config_from_dict(
    config: Json, generation_config: Json | None = None, context_length: int | None = None
) -> ModelConfig:
    """Parses the contents of config.json (flat, or nested under `text_config`).

    Args:
      config: Contents of config.json.
      generation_config: Contents of generation_config.json, if any.
      context_length: Maximum tokens of a request; None for the model's own limit. It selects the
        rotary settings of models whose rotation changes from some length on.

    Raises:
      ValueError: The model is not supported; the message names the field.
    """
    family = _family(config)
    stated = object_of(config, "text_config") if "text_config" in config else config
    text = family.of.completed(stated)
    refuse_unsupported(config, text, family)
    text["rope_parameters"] = rotary_settings(stated, family)
    longest = context_length or positive(text, "max_position_embeddings")
    read = read_latent_attention if family.has_latent_attention else read_attention
    attention = read(text, family, longest)
    return ModelConfig(
        name=family.name,
        vocab=positive(text, "vocab_size"),
        hidden=positive(text, "hidden_size"),
        layers=read_layers(text, family, attention, longest),
        rms_eps=number(text, "rms_norm_eps"),
        tied=_is_tied(config, stated, family),
        embedding_factor=_embedding_factor(text, family),
        rounds_embedding_factor=family.scales_embeddings,
        residual_factor=read_factor(text, family, "residual_multiplier"),
        logits_factor=1 / read_factor(text, family, "logits_scaling"),
        logits_softcap=read_softcap(text, family, "final_logit_softcapping"),
        zero_centered_norms=family.is_hybrid or family.zero_centered,
        post_norm=family.post_norm,
        sandwich_norms=family.sandwich_norms,
        fused_projections=family.fused_projections,
        mtp=_read_mtp(text, family),
        drafts_trees=family.drafts_trees,
        context_length=_context_length(text, attention.rotary),
        eos_ids=_eos_ids(positive(text, "vocab_size"), family, config, stated, generation_config),
    )


def _embedding_factor(text: Json, family: Family) -> float:
    if family.scales_embeddings:
        return positive(text, "hidden_size") ** 0.5
    return read_factor(text, family, "embedding_multiplier")


def _read_mtp(text: Json, family: Family) -> MtpLayers | None:
    if family.mtp is None or not (number := count(text, family.mtp.count_field, MOST_NAMED)):
        return None
    return MtpLayers(family.mtp, positive(text, "num_hidden_layers"), number)


def _is_tied(config: Json, stated: Json, family: Family) -> bool:
    """Returns True if config.json ties the embedding to the LM head, by its outermost field.

    A nested `false` is ignored: transformers writes it into each `text_config`, next to an outer
    `true`.
    """
    field = "tie_word_embeddings"
    if stated is config:
        return flag(family.of.completed(config), field)
    named = [VLM_ARCHITECTURES[x][0] for x in _architectures(config) if x in VLM_ARCHITECTURES]
    outer = (*named, config_classes.QWEN3_5_OUTER)[0]
    return flag(config, field, flag(stated, field) or outer.fields[field])


def vision_from_folder(folder: str | Path) -> VisionConfig | None:
    """Reads the vision encoder config of a model by the path of its folder; see
    `vision_config`.
    """
    opened = ModelFolder(folder)
    return vision_config(opened.config, model_config(opened))


def vision_config(config: Json, text: ModelConfig) -> VisionConfig | None:
    """Returns the vision encoder config of a supported model; None if it has no known one.

    Args:
      config: Contents of config.json.
      text: Config of the language model in it.

    Raises:
      ValueError: The vision encoder is not supported; the message names the field.
    """
    if not _family(config).sees:
        return None
    found = read_vision(config, text.hidden, text.vocab)
    if found is not None and not text.attention.rotary.sections:
        raise ValueError(
            "vision_config requires mrope_interleaved: true and an mrope_section of three "
            "numbers in the rotary settings"
        )
    return found


def stated_encoding(config: Json) -> TensorEncoding | None:
    """Returns the encoding of weights in the config.json of a supported model; None if they are not
    quantised.

    Args:
      config: Contents of config.json.
    """
    for place in (config, object_of(config, "text_config")):
        if stated := object_of(place, "quantization_config"):
            return encoding_of(stated)
    return None


def _architectures(config: Json) -> list[str]:
    """Returns the architectures of a config.json, or the one of its `model_type`."""
    model_type = word(config, "model_type", "")
    known = [ARCHITECTURES[model_type]] if model_type in ARCHITECTURES else []
    return listed(config, "architectures", str) or known


def _family(config: Json) -> Family:
    names = _architectures(config)
    if outer := [name for name in names if name in VLM_ARCHITECTURES]:
        if "text_config" not in config:
            raise ValueError(
                f"config.json of {', '.join(names)} has no text_config; copy the field from the "
                "config.json of the published model"
            )
        usual = VLM_ARCHITECTURES[outer[0]][1]
        inner = word(object_of(config, "text_config"), "model_type", usual)
        names = [ARCHITECTURES.get(inner, inner)]
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
        if name in UNSUPPORTED:
            raise ValueError(
                f"architectures in config.json is {name}, which requires {UNSUPPORTED[name]} and "
                f"is not supported; serve one of {', '.join(FAMILIES)}"
            )
    if "speculators_model_type" in config or any(word in x for x in names for word in HEADS):
        raise ValueError(
            f"architectures in config.json is {', '.join(names)}, a draft head; serve its "
            "target, with this folder as --speculative-draft-model-path"
        )
    named = ", ".join(names) or f"none, with model_type {config.get('model_type')!r}"
    raise ValueError(
        f"architectures in config.json is {named}, which is not supported; "
        f"serve one of {', '.join(FAMILIES)}"
    )


def _context_length(text: Json, rotary: RotaryConfig) -> int:
    """Returns the context length; a model extended by YaRN may still state its original one."""
    stated = positive(text, "max_position_embeddings")
    if rotary.type != "yarn":
        return stated
    return max(stated, int(rotary.factor * rotary.original_context))


def _eos_ids(
    vocab: int, family: Family, config: Json, stated: Json, generation_config: Json | None
) -> tuple[int, ...]:
    """Returns the union of the EOS tokens that the files name, because they differ in released
    checkpoints.

    If no file names any, the class default applies. transformers also writes that default into the
    files of models with a smaller vocabulary; it is ignored there.
    """
    sources = (config, stated, generation_config or {})
    default = family.of.fields["eos_token_id"]
    found: set[int] = set()
    for source in sources:
        ids = source.get("eos_token_id")
        found |= {*_token_ids([] if ids is None else ids, vocab, default)}
    if not any("eos_token_id" in source for source in sources) and default is not None:
        found.add(default)
    return tuple(sorted(token for token in found if token < vocab))


def _token_ids(stated: Any, vocab: int, default: int | None) -> list[int]:
    """Returns the token ids in a field, one or a list; each must be in the vocabulary or the class
    default.
    """
    ids = stated if isinstance(stated, list) else [stated]
    for token in ids:
        if type(token) is not int or not (0 <= token < vocab or token == default):
            raise ValueError(
                f"eos_token_id must name tokens of the vocabulary, 0 to {vocab - 1}, got {token!r}"
            )
    return ids
