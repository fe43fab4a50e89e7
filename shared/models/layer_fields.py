"""Reads the layers of a model from the fields of its config.json."""

from dataclasses import replace
from typing import Any

from shared.models.activation import Activation
from shared.models.block_types import BlockType, read_block_types
from shared.models.config_fields import (
    MOST_NAMED,
    Json,
    count,
    flag,
    listed,
    number,
    object_of,
    positive,
)
from shared.models.experts import read_experts, sparse_layers
from shared.models.family import Family, SlidingWindowRule
from shared.models.layers import LayerConfig
from shared.models.mamba2_fields import mixer_types, parallel_layers, read_mamba2
from shared.models.mixers import (
    AttentionConfig,
    GatedDeltaConfig,
    LatentAttentionConfig,
    MixerConfig,
    NoMixer,
    SelfAttentionConfig,
)
from shared.models.mixers.gated_delta import CONV_WIDTH
from shared.models.mlp import FeedForwardConfig, MLPConfig, MoEConfig, NoMLP
from shared.models.rotary import (
    LAYER_TYPES,
    are_nested,
    completed_settings,
    read_query_scaling,
    read_rotary,
    read_score_factor,
    rope_layers,
)

FULL, SLIDING, LINEAR = LAYER_TYPES


def _head_size(text: Json, num_heads: int) -> int:
    """Returns the head size: `head_dim`, or hidden size / heads; always even."""
    hidden = positive(text, "hidden_size")
    if text.get("head_dim") is None and hidden % num_heads:
        raise ValueError(
            f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({num_heads}); "
            "otherwise give head_dim"
        )
    size = positive(text, "head_dim", hidden // num_heads)
    if size % 2:
        raise ValueError(f"head_dim in config.json must be even, got {size}")
    return size


def rotary_settings(stated: Json, family: Family) -> dict[str, dict[str, Any]]:
    """Returns the rotary settings of each type of attention layer.

    Args:
      stated: Fields of the config.json as stored.
      family: The model family.

    Raises:
      ValueError: Two spellings of a setting have different values.
    """
    full, sliding = (completed_settings(stated, family.of, kind) for kind in (FULL, SLIDING))
    if family.of.local_theta is not None and not are_nested(stated):
        sliding = {"rope_type": "default", "rope_theta": family.of.local_theta}
        sliding |= {"partial_rotary_factor": family.of.rotated}
        if stated.get("rope_local_base_freq") is not None:
            sliding["rope_theta"] = stated["rope_local_base_freq"]
    if family.scales_full_layers and not are_nested(stated):
        kept = ("rope_theta", "partial_rotary_factor")
        sliding = {"rope_type": "default", **{name: full[name] for name in kept}}
    return {FULL: full, SLIDING: sliding}


def read_attention(text: Json, family: Family, context_length: int) -> AttentionConfig:
    """Reads the config of full-attention layers.

    Args:
      text: Fields of a config.json with defaults for absent ones, and the `rotary_settings` as
        `rope_parameters`.
      family: The model family.
      context_length: See `read_rotary`.
    """
    num_heads = positive(text, "num_attention_heads")
    of_full = {**text, **_full_layer_sizes(text, family)}
    head_size, rope = _head_size(of_full, num_heads), text["rope_parameters"][FULL]
    rotary = read_rotary(text, rope, head_size, context_length)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=positive(of_full, "num_key_value_heads", num_heads),
        head_size=head_size,
        qk_norm=family.qk_norm or (family.norms_by_flag and flag(text, "use_qk_norm")),
        norms_all_heads=family.norms_all_heads,
        has_gate=family.is_hybrid and flag(text, "attn_output_gate"),
        input_bias=family.input_bias or flag(text, "attention_bias"),
        out_bias=flag(text, "attention_bias") and not family.plain_out,
        rotary=rotary,
        query_scaling_beta=read_query_scaling(rope, rotary) if family.scales_queries else 0.0,
        window=None,
        scale=_read_scale(text, family),
        has_kv=True,
        has_sinks=family.has_sinks,
        value_norm=family.has_value_norm,
        keys_as_values=flag(text, "attention_k_eq_v"),
        softcap=read_softcap(text, family, "attn_logit_softcapping"),
    )


_NEWER_FEATURES = {
    "compress_rates": "compressed attention",
    "hc_mult": "hyper-connections",
    "index_topk": "sparse attention with an indexer",
}
"""Fields of models that followed DeepSeek-V3, each with the feature that it configures."""


def read_latent_attention(text: Json, family: Family, context_length: int) -> LatentAttentionConfig:
    """Reads the config of latent attention layers; for the arguments see `read_attention`."""
    nope, rope = positive(text, "qk_nope_head_dim"), positive(text, "qk_rope_head_dim")
    settings, has_bias = text["rope_parameters"][FULL], flag(text, "attention_bias")
    rank = None if text["q_lora_rank"] is None else positive(text, "q_lora_rank")
    if has_bias and rank is None:
        raise ValueError(
            "attention_bias: true is not supported without q_lora_rank; use a checkpoint with "
            "attention_bias: false"
        )
    for field, feature in _NEWER_FEATURES.items():
        if field in text:
            raise ValueError(
                f"{field} ({feature}) is not supported in a {family.name} model; use a checkpoint "
                "without it"
            )
    rotary = read_rotary(text, settings, rope, context_length)
    return LatentAttentionConfig(
        num_heads=positive(text, "num_attention_heads"),
        nope_size=nope,
        rope_size=rope,
        value_size=positive(text, "v_head_dim"),
        query_rank=rank,
        latent_rank=positive(text, "kv_lora_rank"),
        has_bias=has_bias,
        latent_eps=number(text, "rms_norm_eps"),
        rotary=replace(rotary, interleaved=flag(text, "rope_interleave")),
        scale=(nope + rope) ** -0.5 * read_score_factor(settings, rotary),
    )


def read_factor(text: Json, family: Family, field: str) -> float:
    """Returns a multiplier of a family that has such a field; 1 for other families."""
    return number(text, field) if field in family.of.fields else 1.0


def read_softcap(text: Json, family: Family, field: str) -> float | None:
    """Returns a soft cap; None without one."""
    return number(text, field) if field in family.of.fields and text[field] is not None else None


def _read_scale(text: Json, family: Family) -> float | None:
    """Returns the multiplier of attention scores; None for that of the head size."""
    if family.has_unit_scale:
        return 1.0
    if family.has_query_scalar:
        return number(text, "query_pre_attn_scalar") ** -0.5
    field = "attention_multiplier"
    return read_factor(text, family, field) if field in family.of.fields else None


def read_layers(
    text: Json, family: Family, attention: SelfAttentionConfig, context_length: int
) -> tuple[LayerConfig, ...]:
    """Reads the decoder layers in order; for the arguments see `read_attention`.

    Raises:
      ValueError: A field is missing, or contradicts another; the message names it.
    """
    if family.block_types:
        return _single_sublayers(text, family, attention)
    types, feeds = _layer_types(text, family), _feeds(text, family)
    if family.has_optional_rope and text["position_embedding_type"] != "rope":
        attention = _without_rope(attention)
    mixers: dict[str, MixerConfig] = {FULL: attention}
    if SLIDING in types:
        assert isinstance(attention, AttentionConfig)  # families with windows have no other
        mixers[SLIDING] = _sliding(text, attention, context_length)
    if LINEAR in types:
        mixers[LINEAR] = read_mamba2(text) if family.mamba else _gated_delta(text, family)
    layers = [
        LayerConfig(mixer=mixers[kind], mlp=feed) for kind, feed in zip(types, feeds, strict=True)
    ]
    if family.mamba is not None and family.mamba.layers is None:
        layers = parallel_layers(text, layers)
    layers = _with_shared_kv(text, types, layers)
    return tuple(_unturned(text, layers) if family.nope_layers else layers)


def _single_sublayers(
    text: Json, family: Family, attention: SelfAttentionConfig
) -> tuple[LayerConfig, ...]:
    """Reads the layers of a model with one sublayer per layer."""
    types = read_block_types(text)
    assert family.routing is not None  # families of this kind have both kinds of MLPs
    parts: dict[BlockType, tuple[MixerConfig, FeedForwardConfig]] = {
        BlockType.ATTENTION: (_without_rope(attention), NoMLP())
    }
    if BlockType.MAMBA in types:
        parts[BlockType.MAMBA] = read_mamba2(text), NoMLP()
    if BlockType.MLP in types:
        parts[BlockType.MLP] = NoMixer(), _dense(text, family)
    if BlockType.EXPERTS in types:
        parts[BlockType.EXPERTS] = NoMixer(), read_experts(text, family.routing, 1.0)
    return tuple(LayerConfig(mixer=parts[x][0], mlp=parts[x][1]) for x in types)


def _sliding(text: Json, attention: AttentionConfig, context_length: int) -> AttentionConfig:
    """Returns the attention of sliding-window layers from that of full-attention layers."""
    window, num_heads = positive(text, "sliding_window"), attention.num_heads
    head_size = _head_size(text, num_heads)
    return replace(
        attention,
        head_size=head_size,
        num_kv_heads=positive(text, "num_key_value_heads", num_heads),
        keys_as_values=False,
        # A window that exceeds the context has no effect: Phi-4-mini has twice its context.
        window=window if window < context_length else None,
        rotary=read_rotary(text, text["rope_parameters"][SLIDING], head_size, context_length),
    )


def _full_layer_sizes(text: Json, family: Family) -> dict[str, Any]:
    """Returns the sizes that only full-attention layers have, by the fields that they replace.

    They are fields of their own, or settings of the layers in `per_layer_config`.
    """
    if "global_head_dim" not in text:
        return {}
    if stated := object_of(text, "per_layer_config"):
        types = _layer_types(text, family)
        return _equal_settings([str(i) for i, kind in enumerate(types) if kind == FULL], stated)
    sizes = {"head_dim": text["global_head_dim"]}
    if flag(text, "attention_k_eq_v") and text["num_global_key_value_heads"] is not None:
        sizes["num_key_value_heads"] = positive(text, "num_global_key_value_heads")
    return sizes


def _equal_settings(full: list[str], stated: Json) -> dict[str, Any]:
    """Returns the settings of `per_layer_config`, which all full-attention layers must share."""
    settings = [object_of(stated, layer, "per_layer_config") for layer in stated]
    known = {"head_dim", "num_key_value_heads"}
    if sorted(stated) != sorted(full) or any(x != settings[0] or {*x} - known for x in settings):
        raise ValueError(
            "per_layer_config must give each full_attention layer, and no other, the same "
            f"{' and '.join(sorted(known))}; use global_head_dim and num_global_key_value_heads"
        )
    return dict(settings[0])


def _with_shared_kv(text: Json, types: list[str], layers: list[LayerConfig]) -> list[LayerConfig]:
    """Returns the layers, of which the last `num_kv_shared_layers` read the KV of the last earlier
    layer of their type.
    """
    first = len(layers) - count(text, "num_kv_shared_layers")
    if first == len(layers):
        return layers
    if {*types[: max(first, 0)]} != {*types}:
        raise ValueError(
            f"num_kv_shared_layers ({len(layers) - first}) leaves no layer of "
            f"{' or '.join(sorted({*types} - {*types[: max(first, 0)]}))} with KV of its own"
        )
    factor = 2 if flag(text, "use_double_wide_mlp") else 1
    last = {kind: index for index, kind in enumerate(types[:first])}
    return layers[:first] + [
        _reading(layer, last[kind], factor)
        for layer, kind in zip(layers[first:], types[first:], strict=True)
    ]


def _reading(layer: LayerConfig, source: int, factor: int) -> LayerConfig:
    """Returns the layer without KV of its own, and with a wider dense MLP."""
    assert isinstance(layer.mixer, AttentionConfig)  # families with shared KV have no other
    mlp = layer.mlp
    if isinstance(mlp, MLPConfig):
        mlp = replace(mlp, intermediate=factor * mlp.intermediate)
    elif isinstance(mlp, MoEConfig) and mlp.parallel is not None:
        wide = replace(mlp.parallel, intermediate=factor * mlp.parallel.intermediate)
        mlp = replace(mlp, parallel=wide)
    mixer = replace(layer.mixer, has_kv=False)
    return replace(layer, mixer=mixer, mlp=mlp, kv_shared_layer_index=source)


def read_per_layer_size(text: Json) -> int:
    """Reads the width of per-layer embeddings; 0 for a model without them.

    Raises:
      ValueError: Their table has another vocabulary than the model.
    """
    size, field = count(text, "hidden_size_per_layer_input"), "vocab_size_per_layer_input"
    if size and text[field] != text["vocab_size"]:
        raise ValueError(f"{field} must be vocab_size ({text['vocab_size']}), got {text[field]!r}")
    return size


def _feeds(text: Json, family: Family) -> list[MLPConfig | MoEConfig]:
    """Returns the MLP or MoE config of each layer; fields of a kind that no layer has are not
    read.
    """
    found: dict[bool, MLPConfig | MoEConfig] = {}
    sparse = sparse_layers(text, family.routing, _num_layers(text))
    if family.routing is not None and True in sparse:
        factor = read_factor(text, family, "residual_multiplier")
        found[True] = read_experts(text, family.routing, factor)
    if False in sparse:
        found[False] = _dense(text, family)
    return [found[each] for each in sparse]


def _dense(text: Json, family: Family) -> MLPConfig:
    return MLPConfig(
        intermediate=positive(text, family.mlp_width_field),
        bias=flag(text, "mlp_bias"),
        activation=Activation(family.activation),
    )


def _unturned(text: Json, layers: list[LayerConfig]) -> list[LayerConfig]:
    """Removes the rotary embedding from NoPE layers."""
    found = []
    for layer, turns in zip(layers, rope_layers(text, len(layers)), strict=True):
        if not turns and isinstance(layer.mixer, AttentionConfig):
            layer = replace(layer, mixer=_without_rope(layer.mixer))
        found.append(layer)
    return found


def _without_rope(attention: SelfAttentionConfig) -> SelfAttentionConfig:
    still = replace(attention.rotary, type="none", attention_factor=1.0)
    return replace(attention, rotary=still)


def _num_layers(text: Json) -> int:
    return positive(text, "num_hidden_layers", most=MOST_NAMED)


def _layer_types(text: Json, family: Family) -> list[str]:
    """Returns the mixer type of each layer, from `layer_types` or the fields that replace it."""
    num_layers = _num_layers(text)
    if family.mamba is not None:
        return mixer_types(text, family.mamba, num_layers)
    types = listed(text, "layer_types", str)
    by_flag = family.sliding_window in (SlidingWindowRule.BY_FLAG, SlidingWindowRule.WHOLE_BY_FLAG)
    asks = family.sliding_window is SlidingWindowRule.BY_SIZE or (
        by_flag and flag(text, "use_sliding_window")
    )
    slides = asks and count(text, "sliding_window") > 0
    if family.sliding_window is SlidingWindowRule.BY_SIZE or (by_flag and not slides):
        return [SLIDING if slides else FULL] * num_layers
    if family.sliding_window is SlidingWindowRule.WHOLE_BY_FLAG:
        _refuse_full_layers(text, types, family)
        return [SLIDING] * num_layers
    if family.sliding_window is SlidingWindowRule.BY_FLAG and types is None:
        first = count(text, "max_window_layers")
        types = [SLIDING if i >= first else FULL for i in range(num_layers)]
    if family.sliding_window is SlidingWindowRule.BY_TYPES and types is None:
        interval = family.full_attention_interval
        if (field := "sliding_window_pattern") in family.of.extras:
            interval = positive(text, field)
        types = [SLIDING if (i + 1) % interval else FULL for i in range(num_layers)]
    if types is not None and family.ends_full:
        types = [*types[:-1], FULL]
    if not family.is_hybrid and types is None:
        return [FULL] * num_layers
    if types is None:
        interval = positive(text, "full_attention_interval")
        types = [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
    known = (FULL, LINEAR) if family.is_hybrid else (FULL, SLIDING)
    unknown = sorted(set(types) - set(known))
    if unknown:
        raise ValueError(f"layer_types contains {unknown[0]!r}; supported are {', '.join(known)}")
    if len(types) != num_layers:
        raise ValueError(
            f"layer_types lists {len(types)} layers, num_hidden_layers is {num_layers}"
        )
    return types


def _refuse_full_layers(text: Json, types: list[str] | None, family: Family) -> None:
    """Checks that no field excludes layers from a sliding window that all layers have."""
    excepted = {
        "layer_types": FULL in (types or []),
        "max_window_layers": count(text, "max_window_layers") > 0,
    }
    if named := [field for field, is_stated in excepted.items() if is_stated]:
        raise ValueError(
            f"{named[0]} with use_sliding_window: true is not supported in a {family.name} "
            "model, because all its layers have a sliding window; use a checkpoint without "
            f"{named[0]}"
        )


def _gated_delta(text: Json, family: Family) -> GatedDeltaConfig:
    width = text["linear_conv_kernel_dim"]
    if width != CONV_WIDTH:
        raise ValueError(f"linear_conv_kernel_dim must be {CONV_WIDTH}, got {width}")
    return GatedDeltaConfig(
        num_key_heads=positive(text, "linear_num_key_heads"),
        num_value_heads=positive(text, "linear_num_value_heads"),
        key_size=positive(text, "linear_key_head_dim"),
        value_size=positive(text, "linear_value_head_dim"),
        has_fused_inputs=family.has_fused_delta,
    )
