"""How the config.json of each family is read: the only place that knows the fields' names."""

from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from shared.models.config import ModelConfig
from shared.models.experts import Routing, read_experts, refuse_other_experts, sparse_layers
from shared.models.fields import (
    MOST_NAMED,
    Json,
    count,
    flag,
    listed,
    number,
    object_of,
    positive,
    read_json,
    word,
)
from shared.models.file_kind import folder_fault
from shared.models.fp8 import Granularity
from shared.models.layers import (
    CONV_WIDTH,
    AttentionConfig,
    DenseConfig,
    ExpertsConfig,
    GatedDeltaConfig,
    LayerConfig,
)
from shared.models.quantisation import granularity_of, refuse_other_quantisation
from shared.models.rotary import RotaryConfig, read_growth, read_rotary, turned_layers
from shared.models.vision import VisionConfig, read_vision


class Slides(Enum):
    """What switches sliding windows on in a family, and in which layers."""

    NEVER = "nothing; it is refused where it is asked for"
    BY_SIZE = "`sliding_window` alone, in all layers"
    BY_TYPES = "`layer_types`, or three of four layers without it"
    BY_FLAG = "`use_sliding_window`, in those that `layer_types` or `max_window_layers` names"


@dataclass(frozen=True)
class Family:
    """What tells one family's layers from another's.

    Attributes:
      name: What sentences to users call it.
      qk_norm: See `AttentionConfig`.
      is_hybrid: Has gated-delta layers, gates, zero-centred norms, and maybe an MTP layer.
      drafts_trees, stores_joined: See `ModelConfig`.
      input_bias: Queries, keys and values have biases that no field names.
      biases: Fields that switch other biases on.
      slides: What switches windows on.
      has_factors: Multiplies embeddings, scores, outputs and logits by fields of its own.
      skips_rotation: Some layers do not turn with positions.
      grows_queries: Queries grow with their position where the rotary settings say so.
      norms_behind: See `ModelConfig`; queries and keys are normed over all heads.
      scales_full_layers: Layers that slide turn without what `rope_scaling` says.
      routing: How its experts are found and chosen; None: it has none.
      norms_by_flag: Queries and keys are normed where `use_qk_norm` says it.
      plain_out: The outputs of the heads have no bias, whatever the inputs have.
      turned_share: Of a head's dimensions that turn, where no field says it.
      sees: A checkpoint may have a vision tower.
    """

    name: str
    qk_norm: bool = False
    is_hybrid: bool = False
    drafts_trees: bool = False
    stores_joined: bool = False
    input_bias: bool = False
    biases: tuple[str, ...] = ()
    slides: Slides = Slides.NEVER
    has_factors: bool = False
    skips_rotation: bool = False
    grows_queries: bool = False
    norms_behind: bool = False
    scales_full_layers: bool = False
    routing: Routing | None = None
    norms_by_flag: bool = False
    plain_out: bool = False
    turned_share: float = 1.0
    sees: bool = False


BIASES = ("attention_bias", "mlp_bias")
_GROUPED = Routing(
    count_field="n_routed_experts",
    scores="sigmoid",
    is_renormalised=True,
    counts_shared=True,
    has_groups=True,
    begins_dense=True,
)
GLM4_MOE = Family(
    "glm4_moe",
    biases=BIASES[:1],
    routing=_GROUPED,
    norms_by_flag=True,
    plain_out=True,
    turned_share=0.5,
)
GRANITE = Family("granite", biases=BIASES, has_factors=True)
LLAMA = Family("llama", drafts_trees=True, biases=BIASES)
MISTRAL = Family("mistral", slides=Slides.BY_SIZE)
MINISTRAL3 = replace(MISTRAL, name="ministral3", grows_queries=True)
OLMO2 = Family("olmo2", qk_norm=True, biases=BIASES[:1], norms_behind=True)
OLMO3 = replace(OLMO2, name="olmo3", slides=Slides.BY_TYPES, scales_full_layers=True)
PHI3 = Family("phi3", stores_joined=True, slides=Slides.BY_SIZE)
QWEN2 = Family("qwen2", input_bias=True, slides=Slides.BY_FLAG)
QWEN3 = Family("qwen3", qk_norm=True, biases=BIASES[:1], slides=Slides.BY_FLAG)
QWEN3_MOE = replace(QWEN3, name="qwen3_moe", routing=Routing(steps=True))
QWEN3_5 = Family("qwen3_5", qk_norm=True, is_hybrid=True, turned_share=0.25, sees=True)
_WITH_SHARED = Routing(is_renormalised=True, reads_renormalised=False, has_shared=True)
QWEN3_5_MOE = replace(QWEN3_5, name="qwen3_5_moe", routing=_WITH_SHARED)
SMOLLM3 = Family("smollm3", biases=BIASES, skips_rotation=True)

FAMILIES = {
    "Glm4MoeForCausalLM": GLM4_MOE,
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
"""Architecture names of Hugging Face that can be served."""

ARCHITECTURES = {
    "glm4_moe": "Glm4MoeForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
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
"""The architecture of a `model_type`, for a config.json that lists no architecture."""

SEEING = {"Mistral3ForConditionalGeneration"}
"""Architectures that see, of whose text model `text_config` tells the family."""

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def config_from_folder(folder: str | Path, context_length: int | None = None) -> ModelConfig:
    """Reads config.json and, where present, generation_config.json of a checkpoint folder.

    Args:
      context_length: See `config_from_dict`.

    Raises:
      ValueError: A file is missing or broken, or the model cannot be served; one sentence.
    """
    folder = Path(folder)
    if fault := folder_fault(folder):
        raise ValueError(fault)
    generation = folder / "generation_config.json"
    generation_config = read_json(generation) if generation.is_file() else {}
    return config_from_dict(read_json(folder / "config.json"), generation_config, context_length)


def config_from_dict(
    config: Json, generation_config: Json | None = None, context_length: int | None = None
) -> ModelConfig:
    """Parses the contents of config.json (flat, or nested under `text_config`).

    Args:
      context_length: Of the longest text that is served; None: what the model takes. By it models
        are told apart that turn in another way from some length on.

    Raises:
      ValueError: The model cannot be served; one sentence that names the field.
    """
    family = _family(config)
    text = object_of(config, "text_config") if "text_config" in config else config
    _refuse_unsupported(config, text, family)
    stated = positive(text, "max_position_embeddings")
    longest = context_length or stated
    attention = _attention(text, family, longest)
    return ModelConfig(
        name=family.name,
        vocab=positive(text, "vocab_size"),
        hidden=positive(text, "hidden_size"),
        layers=_layers(text, family, attention, longest),
        rms_eps=number(text, "rms_norm_eps", 1e-6),
        tied=flag(config, "tie_word_embeddings", flag(text, "tie_word_embeddings")),
        embedding_factor=_factor(text, family, "embedding_multiplier"),
        residual_factor=_factor(text, family, "residual_multiplier"),
        logits_factor=1 / _factor(text, family, "logits_scaling"),
        zero_centered_norms=family.is_hybrid,
        norms_behind=family.norms_behind,
        stores_joined=family.stores_joined,
        has_mtp=family.is_hybrid and count(text, "mtp_num_hidden_layers") > 0,
        spare_layers=count(text, "num_nextn_predict_layers", MOST_NAMED) if family.routing else 0,
        drafts_trees=family.drafts_trees,
        context_length=_context_length(text, attention.rotary),
        eos_ids=_eos_ids(positive(text, "vocab_size"), config, text, generation_config or {}),
    )


def vision_from_folder(folder: str | Path) -> VisionConfig | None:
    """The vision tower of a folder that can be served; None: it has none that is known here.

    Raises:
      ValueError: It has one that this program does not compute; one sentence that names the field.
    """
    config = read_json(Path(folder) / "config.json")
    if not _family(config).sees:
        return None
    text = config_from_dict(config)
    found = read_vision(config, text.hidden, text.vocab)
    if found is not None and not text.attention.rotary.sections:
        raise ValueError(
            "a model with vision_config needs mrope_interleaved: true and an mrope_section of "
            "three numbers, as many as pairs turn, in its rotary settings"
        )
    return found


def stated_granularity(folder: str | Path) -> Granularity | None:
    """Of the scales of FP8, by the config.json of a folder that can be served; None: no FP8."""
    config = read_json(Path(folder) / "config.json")
    for place in (config, object_of(config, "text_config")):
        if stated := object_of(place, "quantization_config"):
            return granularity_of(stated)
    return None


def _family(config: Json) -> Family:
    names = listed(config, "architectures", str) or []
    model_type = word(config, "model_type", "")
    if SEEING & {*names}:
        inner = word(object_of(config, "text_config"), "model_type", "mistral")
        names = [ARCHITECTURES.get(inner, inner)]
    if not names and model_type in ARCHITECTURES:
        names = [ARCHITECTURES[model_type]]
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    named = ", ".join(names) or f"none, with model_type {config.get('model_type')!r}"
    raise ValueError(
        f"architectures in config.json is {named}, which is not supported; "
        f"serve one of {', '.join(FAMILIES)}"
    )


def _refuse_unsupported(config: Json, text: Json, family: Family) -> None:
    """Refuses by name whatever would change the forward pass and is not implemented."""
    for source in (config, text):
        if quantisation := object_of(source, "quantization_config"):
            refuse_other_quantisation(quantisation)
    refuse_other_experts(text, family.routing, family.name)
    slides = flag(text, "use_sliding_window") or SLIDING in (listed(text, "layer_types", str) or [])
    if slides and family.slides not in (Slides.BY_FLAG, Slides.BY_TYPES):
        raise ValueError(
            f"sliding-window attention (use_sliding_window, layer_types) in a {family.name} model "
            "is not supported; use a checkpoint without windows"
        )
    for field in (*BIASES, "mtp_use_dedicated_embeddings"):
        if flag(text, field) and field not in family.biases:
            raise ValueError(
                f"{field}: true is not supported; use a checkpoint with {field}: false"
            )
    if text.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act must be silu, got {text['hidden_act']!r}")
    if text.get("output_gate_type", "silu") not in ("silu", "swish"):
        raise ValueError(f"output_gate_type must be silu, got {text['output_gate_type']!r}")
    if count(text, "mtp_num_hidden_layers") > 1:
        raise ValueError(
            f"mtp_num_hidden_layers must be 0 or 1, got {text['mtp_num_hidden_layers']}"
        )


def _head_size(text: Json, num_heads: int) -> int:
    """What is given, or a head's share of the hidden state; even, as dimensions turn in pairs."""
    hidden = positive(text, "hidden_size")
    if text.get("head_dim") is None and hidden % num_heads:
        raise ValueError(
            f"hidden_size ({hidden}) is no multiple of num_attention_heads ({num_heads}); "
            "give head_dim"
        )
    size = positive(text, "head_dim", hidden // num_heads)
    if size % 2:
        raise ValueError(f"head_dim in config.json must be even, got {size}")
    return size


def _attention(text: Json, family: Family, context_length: int) -> AttentionConfig:
    num_heads = positive(text, "num_attention_heads")
    head_size = _head_size(text, num_heads)
    rotary = read_rotary(text, head_size, family.turned_share, context_length)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=positive(text, "num_key_value_heads", num_heads),
        head_size=head_size,
        qk_norm=family.qk_norm or (family.norms_by_flag and flag(text, "use_qk_norm")),
        norms_all_heads=family.norms_behind,
        has_gate=family.is_hybrid and flag(text, "attn_output_gate", True),
        input_bias=family.input_bias or flag(text, "attention_bias"),
        out_bias=flag(text, "attention_bias") and not family.plain_out,
        rotary=rotary,
        query_growth=read_growth(text, rotary) if family.grows_queries else 0.0,
        window=None,
        scale=_factor(text, family, "attention_multiplier") if family.has_factors else None,
    )


def _factor(text: Json, family: Family, field: str) -> float:
    return number(text, field, 1.0) if family.has_factors else 1.0


def _layers(
    text: Json, family: Family, attention: AttentionConfig, context_length: int
) -> tuple[LayerConfig, ...]:
    types, feeds = _layer_types(text, family), _feeds(text, family)
    mixers: dict[str, AttentionConfig | GatedDeltaConfig] = {FULL: attention}
    if SLIDING in types:
        window = positive(text, "sliding_window")
        # One that no text outgrows is none: Phi-4-mini has it at twice its context.
        sliding = replace(attention, window=window if window < context_length else None)
        if family.scales_full_layers:
            rotary = attention.rotary
            plain = RotaryConfig(theta=rotary.theta, width=rotary.width)
            sliding = replace(sliding, rotary=plain)
        mixers[SLIDING] = sliding
    if LINEAR in types:
        mixers[LINEAR] = _gated_delta(text)
    layers = [
        LayerConfig(mixer=mixers[kind], feed=feed) for kind, feed in zip(types, feeds, strict=True)
    ]
    return tuple(_unturned(text, layers) if family.skips_rotation else layers)


def _feeds(text: Json, family: Family) -> list[DenseConfig | ExpertsConfig]:
    """What feeds forward in each layer; of what no layer has, no field is read."""
    found: dict[bool, DenseConfig | ExpertsConfig] = {}
    sparse = sparse_layers(text, family.routing, _num_layers(text))
    if family.routing is not None and True in sparse:
        found[True] = read_experts(text, family.routing)
    if False in sparse:
        width = positive(text, "intermediate_size")
        found[False] = DenseConfig(intermediate=width, bias=flag(text, "mlp_bias"))
    return [found[each] for each in sparse]


def _unturned(text: Json, layers: list[LayerConfig]) -> list[LayerConfig]:
    """Layers of which some do not turn."""
    found = []
    for layer, turns in zip(layers, turned_layers(text, len(layers)), strict=True):
        if not turns and isinstance(layer.mixer, AttentionConfig):
            still = replace(layer.mixer.rotary, type="none", attention_factor=1.0)
            layer = replace(layer, mixer=replace(layer.mixer, rotary=still))
        found.append(layer)
    return found


def _num_layers(text: Json) -> int:
    return positive(text, "num_hidden_layers", most=MOST_NAMED)


def _layer_types(text: Json, family: Family) -> list[str]:
    """What each layer mixes with, as `layer_types` says it, or what stands for it."""
    num_layers, types = _num_layers(text), listed(text, "layer_types", str)
    slides = family.slides in (Slides.BY_SIZE, Slides.BY_FLAG) and count(text, "sliding_window") > 0
    if family.slides is Slides.BY_SIZE:
        return [SLIDING if slides else FULL] * num_layers
    if family.slides is Slides.BY_FLAG and not (slides and flag(text, "use_sliding_window")):
        return [FULL] * num_layers
    if family.slides is Slides.BY_FLAG and types is None:
        first = count(text, "max_window_layers")
        types = [SLIDING if i >= first else FULL for i in range(num_layers)]
    if family.slides is Slides.BY_TYPES and types is None:
        types = [SLIDING if (i + 1) % 4 else FULL for i in range(num_layers)]
    if not family.is_hybrid and types is None:
        return [FULL] * num_layers
    if types is None:
        interval = positive(text, "full_attention_interval", 4)
        types = [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
    known = (FULL, LINEAR) if family.is_hybrid else (FULL, SLIDING)
    unknown = sorted(set(types) - set(known))
    if unknown:
        raise ValueError(f"layer_types holds {unknown[0]!r}; known are {', '.join(known)}")
    if len(types) != num_layers:
        raise ValueError(
            f"layer_types lists {len(types)} layers, num_hidden_layers is {num_layers}"
        )
    return types


def _gated_delta(text: Json) -> GatedDeltaConfig:
    width = text.get("linear_conv_kernel_dim", CONV_WIDTH)
    if width != CONV_WIDTH:
        raise ValueError(f"linear_conv_kernel_dim must be {CONV_WIDTH}, got {width}")
    return GatedDeltaConfig(
        num_key_heads=positive(text, "linear_num_key_heads"),
        num_value_heads=positive(text, "linear_num_value_heads"),
        key_size=positive(text, "linear_key_head_dim"),
        value_size=positive(text, "linear_value_head_dim"),
    )


def _context_length(text: Json, rotary: RotaryConfig) -> int:
    """Yarn is switched on by an edit that leaves `max_position_embeddings` at the old length."""
    stated = positive(text, "max_position_embeddings")
    if rotary.type != "yarn":
        return stated
    return max(stated, int(rotary.factor * rotary.original_context))


def _eos_ids(vocab: int, *sources: Json) -> tuple[int, ...]:
    """The union of what the files name: they differ in released checkpoints."""
    eos_ids: set[int] = set()
    for source in sources:
        ids = source.get("eos_token_id")
        if ids is not None:
            eos_ids.update(_checked_ids(ids if isinstance(ids, list) else [ids], vocab))
    return tuple(sorted(eos_ids))


def _checked_ids(ids: list[Any], vocab: int) -> list[int]:
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab:
            raise ValueError(
                f"eos_token_id must name tokens of the vocabulary, 0 to {vocab - 1}, got {token!r}"
            )
    return ids
