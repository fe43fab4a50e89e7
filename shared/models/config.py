"""What a forward pass needs to know about a model: kinds of layers, counts of heads, rotation."""

from dataclasses import dataclass

from shared.models.rotary import RotaryConfig

CONV_WIDTH = 4


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
