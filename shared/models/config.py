"""What a forward pass needs to know about a model: its layers, and what they share."""

from dataclasses import dataclass, replace

from shared.models.layers import (
    AttentionConfig,
    DenseConfig,
    ExpertsConfig,
    GatedDeltaConfig,
    LayerConfig,
)
from shared.models.rotary import RotaryConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a forward pass needs to know about a model.

    Layers of one kind have the same sizes, as their parameters and pools are stacks; they may turn
    with positions and see in ways of their own.

    Attributes:
      name: What sentences to users call such a model.
      layers: The decoder layers in order, the MTP layer not among them.
      rms_eps: Added to the mean square of every RMS norm.
      tied: The embedding also gives the logits.
      embedding_factor, residual_factor, logits_factor: What embeddings, the outputs of mixers and
        MLPs, and logits are multiplied by.
      zero_centered_norms: Norms scale by 1 + weight (all but the gated-delta output norm).
      norms_behind: Norms stand behind mixers and MLPs, on what is added to the stream, and none
        before them.
      stores_joined: A checkpoint has q, k and v in one tensor, and gate and up in another.
      has_mtp: The config names an MTP layer; the checkpoint may still lack its tensors.
      spare_layers: So many more layers behind the last, which draft, may be in a checkpoint; they
        are left out.
      drafts_trees: Its EAGLE heads draft trees where no shape is asked for.
      context_length: Most tokens of a text.
      eos_ids: Token ids that end a text, ascending.

    Raises:
      ValueError: Layers of one kind differ, or none is attention.
    """

    name: str
    vocab: int
    hidden: int
    layers: tuple[LayerConfig, ...]
    rms_eps: float
    tied: bool
    embedding_factor: float
    residual_factor: float
    logits_factor: float
    zero_centered_norms: bool
    norms_behind: bool
    stores_joined: bool
    has_mtp: bool
    spare_layers: int
    drafts_trees: bool
    context_length: int
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.num_attention_layers:
            raise ValueError("layer_types has no full_attention layer; serve a model with one")
        if len({_stacked(each.mixer) for each in self.layers}) > len(set(self.layer_kinds)):
            raise ValueError("layers of one kind but different sizes are not supported")
        if len({each.feed for each in self.layers}) > len(set(self.feed_kinds)):
            raise ValueError("MLPs of different sizes are not supported")
        if self.experts and (self.norms_behind or self.residual_factor != 1):
            raise ValueError("experts with norms behind them or a factor are not supported")

    @property
    def norm_centre(self) -> float:
        """What a norm's scale has more than its stored weight."""
        return 1.0 if self.zero_centered_norms else 0.0

    @property
    def input_eps(self) -> float | None:
        """`rms_eps` of the norms before mixers and MLPs; None: there are none."""
        return None if self.norms_behind else self.rms_eps

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer's mixer, which names its parameters."""
        return tuple(each.mixer.kind for each in self.layers)

    @property
    def attention(self) -> AttentionConfig:
        """What attention layers are like, those that draft too."""
        return next(x.mixer for x in self.layers if isinstance(x.mixer, AttentionConfig))

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """The attention layers' settings, each once, in the order of the layers."""
        found = (x.mixer for x in self.layers if isinstance(x.mixer, AttentionConfig))
        return tuple(dict.fromkeys(found))

    @property
    def gated_delta(self) -> GatedDeltaConfig | None:
        """What gated-delta layers are like; None where there are none."""
        found = (x.mixer for x in self.layers if isinstance(x.mixer, GatedDeltaConfig))
        return next(found, None)

    @property
    def feed_kinds(self) -> tuple[str, ...]:
        """The kind of what feeds forward in each layer, which names its parameters."""
        return tuple(each.feed.kind for each in self.layers)

    @property
    def dense(self) -> DenseConfig | None:
        """What dense layers are like; None where there are none."""
        return next((x.feed for x in self.layers if isinstance(x.feed, DenseConfig)), None)

    @property
    def experts(self) -> ExpertsConfig | None:
        """What layers with a mixture of experts are like; None where there are none."""
        return next((x.feed for x in self.layers if isinstance(x.feed, ExpertsConfig)), None)

    @property
    def draft_layer(self) -> LayerConfig:
        """What a layer that drafts is like: with attention, and experts where others have some."""
        return LayerConfig(mixer=self.attention, feed=self.experts or self.layers[0].feed)

    @property
    def num_layers(self) -> int:
        """Decoder layers, the MTP layer not counted."""
        return len(self.layers)

    @property
    def num_attention_layers(self) -> int:
        """Layers that have KV pages, the MTP layer not counted."""
        return self.layer_kinds.count(AttentionConfig.kind)

    @property
    def num_gated_delta_layers(self) -> int:
        """Layers that have a recurrent state."""
        return self.layer_kinds.count(GatedDeltaConfig.kind)


def _stacked(mixer: AttentionConfig | GatedDeltaConfig) -> AttentionConfig | GatedDeltaConfig:
    """A mixer without what layers of one stack need not share."""
    if isinstance(mixer, GatedDeltaConfig):
        return mixer
    return replace(mixer, rotary=RotaryConfig(theta=1.0, width=0), window=None)
