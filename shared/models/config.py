"""Model config: the layers of a model, and what they share.

Policy, what may not be added here: names of families and of config.json fields (`families`),
settings of one mixer or MLP (its class in `layers`), weight formats (`formats`), and options.
"""

from dataclasses import dataclass, replace

from shared.models.layers import (
    AttentionConfig,
    GatedDeltaConfig,
    LayerConfig,
    MLPConfig,
    MoEConfig,
)
from shared.models.rotary import RotaryConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Settings of a model that its forward pass needs.

    Layers of one kind have the same sizes, because their parameters and pools are stacked. Their
    rotary settings and attention windows may differ.

    Attributes:
      name: Name of the model family in messages to users.
      vocab: Vocabulary size.
      hidden: Width of the residual stream.
      layers: Decoder layers in order, without the MTP layer.
      rms_eps: Epsilon of all RMS norms.
      tied: True if the embedding is also the LM head.
      embedding_factor, residual_factor, logits_factor: Multipliers of embeddings, of mixer and MLP
        outputs, and of logits.
      zero_centered_norms: True if norms scale by 1 + weight (all but the GDN output norm).
      post_norm: True for post-norm: norms follow mixers and MLPs, and none precede them.
      fused_projections: True if the checkpoint fuses q, k and v into one tensor, and gate and up
        into another.
      has_mtp: True if the config names an MTP layer; the checkpoint may lack its tensors.
      num_nextn_predict_layers: Number of extra (next-token prediction) layers after the last one in
        a checkpoint; they are not loaded.
      drafts_trees: True if its EAGLE heads draft trees by default.
      context_length: Maximum number of tokens.
      eos_ids: Token ids that end the output, in ascending order.

    Raises:
      ValueError: Layers of one kind differ, or none is an attention layer.
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
    post_norm: bool
    fused_projections: bool
    has_mtp: bool
    num_nextn_predict_layers: int
    drafts_trees: bool
    context_length: int
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.num_attention_layers:
            raise ValueError("layer_types must contain at least one full_attention layer")
        if len({_stacked(each.mixer) for each in self.layers}) > len(set(self.layer_kinds)):
            raise ValueError("layers of one kind but different sizes are not supported")
        if len({each.mlp for each in self.layers}) > len(set(self.feed_kinds)):
            raise ValueError("MLPs of different sizes are not supported")
        if self.experts and (self.post_norm or self.residual_factor != 1):
            raise ValueError(
                "MoE layers with post-norms or with a residual multiplier are not supported"
            )

    @property
    def norm_centre(self) -> float:
        """Constant added to the stored weight of a norm."""
        return 1.0 if self.zero_centered_norms else 0.0

    @property
    def input_norm_eps(self) -> float | None:
        """Epsilon of the norms before mixers and MLPs; None for a post-norm model."""
        return None if self.post_norm else self.rms_eps

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kind of each layer's mixer, which names its parameters."""
        return tuple(each.mixer.kind for each in self.layers)

    @property
    def attention(self) -> AttentionConfig:
        """Config of attention layers, including the drafter's."""
        return next(x.mixer for x in self.layers if isinstance(x.mixer, AttentionConfig))

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """Distinct configs of attention layers, in the order of the layers."""
        found = (x.mixer for x in self.layers if isinstance(x.mixer, AttentionConfig))
        return tuple(dict.fromkeys(found))

    @property
    def gated_delta(self) -> GatedDeltaConfig | None:
        """Config of GDN layers; None if there are none."""
        found = (x.mixer for x in self.layers if isinstance(x.mixer, GatedDeltaConfig))
        return next(found, None)

    @property
    def feed_kinds(self) -> tuple[str, ...]:
        """Kind of each layer's MLP, which names its parameters."""
        return tuple(each.mlp.kind for each in self.layers)

    @property
    def dense(self) -> MLPConfig | None:
        """Config of dense MLPs; None if there are none."""
        return next((x.mlp for x in self.layers if isinstance(x.mlp, MLPConfig)), None)

    @property
    def experts(self) -> MoEConfig | None:
        """Config of MoE blocks; None if there are none."""
        return next((x.mlp for x in self.layers if isinstance(x.mlp, MoEConfig)), None)

    @property
    def draft_layer(self) -> LayerConfig:
        """Config of an MTP layer: attention, and an MoE block if the model has them."""
        return LayerConfig(mixer=self.attention, mlp=self.experts or self.layers[0].mlp)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers without the MTP layer."""
        return len(self.layers)

    @property
    def num_attention_layers(self) -> int:
        """Number of layers with KV pages, without the MTP layer."""
        return self.layer_kinds.count(AttentionConfig.kind)

    @property
    def num_gated_delta_layers(self) -> int:
        """Number of layers with a recurrent state."""
        return self.layer_kinds.count(GatedDeltaConfig.kind)


def _stacked(mixer: AttentionConfig | GatedDeltaConfig) -> AttentionConfig | GatedDeltaConfig:
    """Returns a mixer config without the settings that may differ within a stack."""
    if isinstance(mixer, GatedDeltaConfig):
        return mixer
    return replace(mixer, rotary=RotaryConfig(theta=1.0, width=0), window=None)
