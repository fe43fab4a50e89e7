"""Reads the config.json of a model of any supported family."""

from pathlib import Path
from typing import Any

from shared.models.architectures import VLM_ARCHITECTURES, architectures_of, family_of
from shared.models.block_types import check_mtp_types
from shared.models.config import ModelConfig
from shared.models.config_classes.qwen import QWEN3_5_OUTER
from shared.models.config_fields import (
    MOST_NAMED,
    Json,
    count,
    flag,
    number,
    object_of,
    positive,
)
from shared.models.family import Family
from shared.models.formats.registry import encoding_of
from shared.models.formats.weight_format import TensorEncoding
from shared.models.layer_fields import (
    read_attention,
    read_factor,
    read_latent_attention,
    read_layers,
    read_per_layer_size,
    read_softcap,
    rotary_settings,
)
from shared.models.model_folder import ModelFolder
from shared.models.mtp import MtpLayers
from shared.models.rotary import RotaryConfig
from shared.models.unsupported_fields import refuse_unsupported
from shared.models.vision_config import VisionConfig, read_vision


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
    family = family_of(config)
    stated = object_of(config, "text_config") if "text_config" in config else config
    text = family.of.completed(stated)
    refuse_unsupported(config, text, family)
    text["rope_parameters"] = rotary_settings(stated, family)
    longest = context_length or positive(text, "max_position_embeddings")
    read = read_latent_attention if family.has_latent_attention else read_attention
    attention = read(text, family, longest)
    layers = read_layers(text, family, attention, longest)
    return ModelConfig(
        name=family.name,
        vocab=positive(text, "vocab_size"),
        hidden=positive(text, "hidden_size"),
        layers=layers,
        rms_eps=number(text, "rms_norm_eps"),
        tied=_is_tied(config, stated, family),
        embedding_factor=_embedding_factor(text, family),
        rounds_embedding_factor=family.scales_embeddings,
        residual_factor=read_factor(text, family, "residual_multiplier"),
        logits_factor=_logits_factor(text, family),
        logits_softcap=read_softcap(text, family, "final_logit_softcapping"),
        zero_centered_norms=family.is_hybrid or family.zero_centered,
        post_norm=family.post_norm,
        sandwich_norms=family.sandwich_norms,
        has_layer_scalars=family.has_layer_scalars,
        per_layer_size=read_per_layer_size(text),
        fused_qkv=family.fused_qkv,
        fused_gate_up=family.fused_gate_up,
        tensor_names=family.tensor_names,
        mtp=_read_mtp(text, family, len(layers)),
        drafts_trees=family.drafts_trees,
        context_length=_context_length(text, attention.rotary),
        eos_ids=_eos_ids(positive(text, "vocab_size"), family, config, stated, generation_config),
    )


def _logits_factor(text: Json, family: Family) -> float:
    factor = read_factor(text, family, "lm_head_multiplier")
    return factor / read_factor(text, family, "logits_scaling")


def _embedding_factor(text: Json, family: Family) -> float:
    if family.scales_embeddings:
        return positive(text, "hidden_size") ** 0.5
    return read_factor(text, family, "embedding_multiplier")


def _read_mtp(text: Json, family: Family, num_layers: int) -> MtpLayers | None:
    if family.mtp is None or not (number := count(text, family.mtp.count_field, MOST_NAMED)):
        return None
    if family.block_types:
        check_mtp_types(text)
    return MtpLayers(family.mtp, num_layers, number)


def _is_tied(config: Json, stated: Json, family: Family) -> bool:
    """Returns True if config.json ties the embedding to the LM head, by its outermost field.

    A nested `false` is ignored: transformers writes it into each `text_config`, next to an outer
    `true`.
    """
    field = "tie_word_embeddings"
    if stated is config:
        return flag(family.of.completed(config), field)
    named = [VLM_ARCHITECTURES[x][0] for x in architectures_of(config) if x in VLM_ARCHITECTURES]
    outer = (*named, QWEN3_5_OUTER)[0]
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
    if not family_of(config).sees:
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
