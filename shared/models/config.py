"""A checkpoint's config.json as one dataclass: layer kinds, head counts, rotary settings."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
}
"""Architecture names of Hugging Face that can be served, and the family whose code runs them."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
"""The architecture of a `model_type`, for a config.json that lists no architecture."""

LAYER_KINDS = {"full_attention": "attention", "linear_attention": "gated_delta"}
ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
CONV_WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary embedding settings.

    Attributes:
      theta: Base of the frequencies.
      width: Rotated dimensions of a head; the rest pass through.
      type: One of "default", "linear", "llama3", "yarn".
      factor: By how much positions are stretched (linear, llama3, yarn).
      low_freq_factor, high_freq_factor: Bounds of the llama3 ramp.
      original_context: Context length the model was first trained with (llama3, yarn).
      beta_fast, beta_slow: Rotations at the two ends of the yarn ramp.
      attention_factor: Multiplies cos and sin; 1 except for yarn.
    """

    theta: float
    width: int
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig:
    """Sizes of a gated-delta-net layer; value head h reads key head h // (value / key heads)."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_width: int = CONV_WIDTH

    @property
    def channels(self) -> int:
        """Convolution channels: all q heads, then all k heads, then all v heads."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a forward pass needs to know about a model.

    Attributes:
      family: "llama", "qwen3" or "qwen3_5".
      layer_kinds: One of "attention", "gated_delta" per decoder layer.
      qk_norm: Queries and keys get an RMS norm per head before the rotation.
      attention_gate: The query projection carries an output gate per head (q rows, gate rows).
      zero_centered_norms: Norms scale by 1 + weight (all but the gated-delta output norm).
      gated_delta: Sizes of the gated-delta layers, None where there are none.
      has_mtp: The config names an MTP layer; the checkpoint may still lack its tensors.
      eos_ids: Token ids that end a text, ascending.
    """

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layer_kinds: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_eps: float
    rotary: RotaryConfig
    tied: bool
    qk_norm: bool
    attention_gate: bool
    zero_centered_norms: bool
    gated_delta: GatedDeltaConfig | None
    has_mtp: bool
    context_length: int
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        delta = self.gated_delta
        if delta and delta.num_value_heads % delta.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads ({delta.num_value_heads}) must be a multiple of "
                f"linear_num_key_heads ({delta.num_key_heads})"
            )

    @property
    def num_layers(self) -> int:
        """Decoder layers, the MTP layer not counted."""
        return len(self.layer_kinds)

    @property
    def num_attention_layers(self) -> int:
        """Layers that have KV pages, the MTP layer not counted."""
        return self.layer_kinds.count("attention")

    @property
    def num_gated_delta_layers(self) -> int:
        """Layers that have a recurrent state."""
        return self.layer_kinds.count("gated_delta")

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Reads config.json and, where present, generation_config.json of a checkpoint folder.

        Raises:
          ValueError: A file is missing or broken, or the model cannot be served; one sentence.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"the model folder {folder} does not exist")
        if not (folder / "config.json").is_file():
            raise ValueError(f"the model folder {folder} has no config.json")
        generation = folder / "generation_config.json"
        generation_config = read_json(generation) if generation.is_file() else {}
        return cls.from_dict(read_json(folder / "config.json"), generation_config)

    @classmethod
    def from_dict(cls, config: Json, generation_config: Json | None = None) -> "ModelConfig":
        """Parses the contents of config.json (flat, or nested under `text_config`).

        Raises:
          ValueError: The model cannot be served; one sentence that names the field.
        """
        family = _family(config)
        text = _object(config, "text_config") if "text_config" in config else config
        _refuse_unsupported(config, text)
        kinds = _layer_kinds(text, family)
        hybrid = family == "qwen3_5"
        num_heads = _positive(text, "num_attention_heads")
        head_size = _head_size(text, num_heads)
        rotary = _rotary(text, head_size, 0.25 if hybrid else 1.0)
        return cls(
            family=family,
            vocab=_positive(text, "vocab_size"),
            hidden=_positive(text, "hidden_size"),
            intermediate=_positive(text, "intermediate_size"),
            layer_kinds=kinds,
            num_heads=num_heads,
            num_kv_heads=_positive(text, "num_key_value_heads", num_heads),
            head_size=head_size,
            rms_eps=_number(text, "rms_norm_eps", 1e-6),
            rotary=rotary,
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            qk_norm=family != "llama",
            attention_gate=hybrid and bool(text.get("attn_output_gate", True)),
            zero_centered_norms=hybrid,
            gated_delta=_gated_delta(text) if "gated_delta" in kinds else None,
            has_mtp=hybrid and _count(text, "mtp_num_hidden_layers") > 0,
            context_length=_context_length(text, rotary),
            eos_ids=_eos_ids(_positive(text, "vocab_size"), config, text, generation_config or {}),
        )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ValueError: It holds something else, or cannot be read.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if isinstance(loaded, dict):
        return loaded
    raise ValueError(f"{path} must hold a JSON object, got {type(loaded).__name__}")


def _family(config: Json) -> str:
    names = list(config.get("architectures") or [])
    model_type = config.get("model_type")
    if not names and model_type in ARCHITECTURES:
        names = [ARCHITECTURES[model_type]]
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    named = ", ".join(map(str, names)) or f"none, with model_type {model_type!r}"
    raise ValueError(
        f"architectures in config.json is {named}, which is not supported; "
        f"serve one of {', '.join(FAMILIES)}"
    )


def _refuse_unsupported(config: Json, text: Json) -> None:
    """Refuses by name whatever would change the forward pass and is not implemented."""
    if config.get("quantization_config") or text.get("quantization_config"):
        raise ValueError("quantization_config is not supported; use an unquantised checkpoint")
    if text.get("num_experts"):
        raise ValueError(
            "num_experts: mixture-of-experts layers are not supported; use a dense model"
        )
    if text.get("use_sliding_window") or "sliding_attention" in (text.get("layer_types") or []):
        raise ValueError(
            "sliding-window attention (use_sliding_window, layer_types) is not supported"
        )
    for field in ("attention_bias", "mlp_bias", "mtp_use_dedicated_embeddings"):
        if text.get(field):
            raise ValueError(
                f"{field}: true is not supported; use a checkpoint with {field}: false"
            )
    if text.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act must be silu, got {text['hidden_act']!r}")
    if text.get("output_gate_type", "silu") not in ("silu", "swish"):
        raise ValueError(f"output_gate_type must be silu, got {text['output_gate_type']!r}")
    if _count(text, "mtp_num_hidden_layers") > 1:
        raise ValueError(
            f"mtp_num_hidden_layers must be 0 or 1, got {text['mtp_num_hidden_layers']}"
        )


def _is_number(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _positive(text: Json, field: str, default: int | None = None) -> int:
    """A whole number above 0; the default where it is absent or null."""
    value = default if text.get(field) is None else text[field]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field} in config.json must be a positive integer, got {value!r}")
    return value


def _count(text: Json, field: str) -> int:
    """A whole number, 0 where it is absent or null."""
    value = text.get(field) or 0
    if not _is_number(value, int) or value < 0:
        raise ValueError(f"{field} in config.json must be a whole number, got {value!r}")
    return value


def _number(text: Json, field: str, default: float) -> float:
    """A finite number above 0; the default where it is absent."""
    value = text.get(field, default)
    if not _is_number(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{field} in config.json must be a positive number, got {value!r}")
    return float(value)


def _object(text: Json, field: str) -> Json:
    """An object, empty where it is absent or null."""
    value = text.get(field)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{field} in config.json must be an object, got {value!r}")
    return value or {}


def _head_size(text: Json, num_heads: int) -> int:
    """What is given, or a head's share of the hidden state; even, as dimensions turn in pairs."""
    hidden = _positive(text, "hidden_size")
    if text.get("head_dim") is None and hidden % num_heads:
        raise ValueError(
            f"hidden_size ({hidden}) is no multiple of num_attention_heads ({num_heads}); "
            "give head_dim"
        )
    size = _positive(text, "head_dim", hidden // num_heads)
    if size % 2:
        raise ValueError(f"head_dim in config.json must be even, got {size}")
    return size


def _layer_kinds(text: Json, family: str) -> tuple[str, ...]:
    num_layers = _positive(text, "num_hidden_layers")
    if family != "qwen3_5":
        return ("attention",) * num_layers
    types = text.get("layer_types")
    if types is None:
        interval = _positive(text, "full_attention_interval", 4)
        types = [
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(num_layers)
        ]
    unknown = sorted(set(types) - set(LAYER_KINDS))
    if unknown:
        raise ValueError(f"layer_types holds {unknown[0]!r}; known are {', '.join(LAYER_KINDS)}")
    if len(types) != num_layers:
        raise ValueError(
            f"layer_types lists {len(types)} layers, num_hidden_layers is {num_layers}"
        )
    return tuple(LAYER_KINDS[kind] for kind in types)


def _gated_delta(text: Json) -> GatedDeltaConfig:
    width = text.get("linear_conv_kernel_dim", CONV_WIDTH)
    if width != CONV_WIDTH:
        raise ValueError(f"linear_conv_kernel_dim must be {CONV_WIDTH}, got {width}")
    return GatedDeltaConfig(
        num_key_heads=_positive(text, "linear_num_key_heads"),
        num_value_heads=_positive(text, "linear_num_value_heads"),
        key_size=_positive(text, "linear_key_head_dim"),
        value_size=_positive(text, "linear_value_head_dim"),
    )


def _rotary(text: Json, head_size: int, default_share: float) -> RotaryConfig:
    """Merges the old spelling, `rope_scaling` and `rope_theta`, and the new, `rope_parameters`."""
    rope = {**_object(text, "rope_scaling"), **_object(text, "rope_parameters")}
    rope = {name: value for name, value in rope.items() if value is not None}
    if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        raise ValueError(f"rope_parameters by layer type ({nested[0]}) are not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "mrope":  # the old name of plain rotation with three-row positions
        kind = "default"
    if kind not in ROTARY_TYPES:
        raise ValueError(
            f"rope_type {kind!r} is not supported; known are {', '.join(ROTARY_TYPES)}"
        )
    share, theta = (
        _number(rope, field, _number(text, field, default))
        for field, default in (("partial_rotary_factor", default_share), ("rope_theta", 10000.0))
    )
    plain = {"theta": theta, "width": int(head_size * share), "type": kind}
    return RotaryConfig(**plain) if kind == "default" else _scaled_rotary(text, rope, plain)


def _scaled_rotary(text: Json, rope: Json, plain: dict[str, Any]) -> RotaryConfig:
    kind = plain["type"]
    for field in ("mscale", "mscale_all_dim"):
        if rope.get(field):
            raise ValueError(
                f"{field} in the rotary settings is not supported; give attention_factor"
            )
    if rope.get("truncate") is False:
        raise ValueError("truncate: false in the rotary settings is not supported")
    if "factor" not in rope:
        raise ValueError(f"the rotary settings of rope_type {kind!r} need a factor")
    factor = _number(rope, "factor", 1.0)
    context = _positive(text, "max_position_embeddings")
    return RotaryConfig(
        **plain,
        factor=factor,
        low_freq_factor=_number(rope, "low_freq_factor", 1.0),
        high_freq_factor=_number(rope, "high_freq_factor", 4.0),
        original_context=_positive(rope, "original_max_position_embeddings", context),
        beta_fast=_number(rope, "beta_fast", 32.0),
        beta_slow=_number(rope, "beta_slow", 1.0),
        attention_factor=_number(rope, "attention_factor", _attention_factor(kind, factor)),
    )


def _attention_factor(kind: str, factor: float) -> float:
    """Where none is given."""
    return 0.1 * math.log(factor) + 1.0 if kind == "yarn" and factor > 1 else 1.0


def _context_length(text: Json, rotary: RotaryConfig) -> int:
    """Yarn is switched on by an edit that leaves `max_position_embeddings` at the old length."""
    stated = _positive(text, "max_position_embeddings")
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
        if not _is_number(token, int) or not 0 <= token < vocab:
            raise ValueError(
                f"eos_token_id must name tokens of the vocabulary, 0 to {vocab - 1}, got {token!r}"
            )
    return ids
