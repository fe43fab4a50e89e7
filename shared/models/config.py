"""Model config: the layers of a model, and what they share.

Policy, what may not be added here: names of families and of config.json fields (`families`),
settings of one mixer or MLP (its class in `layers`), weight formats (`formats`), and options.
"""

from dataclasses import dataclass
from functools import cached_property

from shared.models.cache_spec import CacheUnit
from shared.models.groups import (
    CachePool,
    LayerGroup,
    LayerPlace,
    cache_pools,
    check_kv_sharing,
    group,
    parallel_groups,
    places,
    pools_with,
)
from shared.models.layers import LayerConfig
from shared.models.mixers import (
    AttentionConfig,
    MixerConfig,
    RecurrentConfig,
    SelfAttentionConfig,
)
from shared.models.mlp import FeedForwardConfig, MLPConfig, MoEConfig, NoMLP
from shared.models.mtp import MTP_LAYER, MtpLayers
from shared.models.stacks import StackSettings


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Settings of a model that its forward pass needs.

    Layers with the same sizes form groups with their own stacks of parameters and their own cache
    pools (`shared.models.groups`).

    Attributes:
      name: Name of the model family in messages to users.
      vocab: Vocabulary size.
      hidden: Width of the residual stream.
      layers: Decoder layers in order, without the MTP layer.
      rms_eps: Epsilon of all RMS norms.
      tied: True if the embedding is also the LM head.
      embedding_factor, residual_factor, logits_factor: Multipliers of embeddings, of mixer and MLP
        outputs, and of logits.
      rounds_embedding_factor: True if that of embeddings is rounded to their dtype.
      logits_softcap: Soft cap of logits: capped * tanh(logit / capped); None for none.
      zero_centered_norms: True if norms scale by 1 + weight (all but the GDN output norm).
      post_norm: True for post-norm: norms follow mixers and MLPs, and none precede them.
      sandwich_norms: True if norms both precede and follow mixers and MLPs.
      has_layer_scalars: True if a layer multiplies its output by a stored number.
      per_layer_size: Width of the per-layer embeddings of a token (`shared.models.per_layer`); 0
        without them.
      fused_qkv, fused_gate_up: True if the checkpoint fuses q, k and v, and gate and up, into one
        tensor.
      tensor_names: Beginnings of tensor names within a layer, or outside of layers, each with the
        one that replaces it in the checkpoint.
      mtp: MTP layers that the config names; None without any.
      drafts_trees: True if its EAGLE heads draft trees by default.
      context_length: Maximum number of tokens.
      eos_ids: Token ids that end the output, in ascending order.

    Raises:
      ValueError: No layer is an attention layer, only some layers have a single sublayer, a layer
        reads the KV of a layer that it cannot read (`check_kv_sharing`), or recurrent layers or MoE
        blocks differ in size.
    """

    name: str
    vocab: int
    hidden: int
    layers: tuple[LayerConfig, ...]
    rms_eps: float
    tied: bool
    embedding_factor: float
    rounds_embedding_factor: bool
    residual_factor: float
    logits_factor: float
    logits_softcap: float | None
    zero_centered_norms: bool
    post_norm: bool
    sandwich_norms: bool
    has_layer_scalars: bool
    per_layer_size: int
    fused_qkv: bool
    fused_gate_up: bool
    tensor_names: tuple[tuple[str, str], ...]
    mtp: MtpLayers | None
    drafts_trees: bool
    context_length: int
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.attentions:
            raise ValueError("layer_types must contain at least one full_attention layer")
        check_kv_sharing(self.layers)
        if self.has_single_sublayers and not all(each.is_single for each in self.layers):
            raise ValueError("layers must all have a mixer and an MLP, or all have one of both")
        for unique, plural in ((RecurrentConfig, "recurrent layers"), (MoEConfig, "MoE blocks")):
            parts = [each.config for each in (*self.groups, *self.mlp_groups)]
            if sum(isinstance(part, unique) for part in parts) > 1:
                raise ValueError(f"{plural} of different sizes are not supported")
        is_parallel = self.experts is not None and self.experts.parallel is not None
        if self.experts and self.ends_with_norms != is_parallel:
            raise ValueError("MoE layers with post-norms are not supported")
        if self.experts and self.experts.output_factor != self.residual_factor:
            raise ValueError(
                f"output_factor of MoE layers ({self.experts.output_factor:g}) must equal the "
                f"model's residual_factor ({self.residual_factor:g})"
            )

    @cached_property
    def groups(self) -> tuple[LayerGroup[MixerConfig], ...]:
        """Groups of layers with equal mixer sizes, in the order of their first layers."""
        return (*group([each.mixer for each in self.layers]), *parallel_groups(self.layers))

    @cached_property
    def mlp_groups(self) -> tuple[LayerGroup[FeedForwardConfig], ...]:
        """Groups of layers with equal MLP sizes, in the order of their first layers."""
        return group([each.mlp for each in self.layers])

    @cached_property
    def attention_groups(self) -> tuple[LayerGroup[SelfAttentionConfig], ...]:
        """Groups of attention layers."""
        return tuple(
            LayerGroup(each.name, each.config, each.layers)
            for each in self.groups
            if isinstance(each.config, SelfAttentionConfig)
        )

    @cached_property
    def cache_pools(self) -> tuple[CachePool, ...]:
        """Cache pools of all layers, in the order of their first layers."""
        parallel = (CachePool(each.config, each.layers) for each in parallel_groups(self.layers))
        return (*cache_pools([each.mixer for each in self.layers]), *parallel)

    @property
    def kv_pools(self) -> tuple[CachePool, ...]:
        """Cache pools with an entry for each position, which is stored in pages."""
        return pools_with(self.cache_pools, CacheUnit.POSITION)

    @cached_property
    def places(self) -> tuple[LayerPlace, ...]:
        """Place of each layer in its groups and in its pool."""
        return places(self.layers)

    @property
    def stack_settings(self) -> StackSettings:
        """Settings that determine the parameters of mixers and MLPs."""
        return StackSettings(
            hidden=self.hidden,
            inputs=self.hidden,
            norm_centre=self.norm_centre,
            fused_qkv=self.fused_qkv,
            fused_gate_up=self.fused_gate_up,
        )

    @property
    def has_single_sublayers(self) -> bool:
        """True if each layer has either a mixer or an MLP."""
        return any(each.is_single for each in self.layers)

    @property
    def norm_centre(self) -> float:
        """Constant added to the stored weight of a norm."""
        return 1.0 if self.zero_centered_norms else 0.0

    @property
    def ends_with_norms(self) -> bool:
        """True if norms follow mixers and MLPs."""
        return self.post_norm or self.sandwich_norms

    @property
    def input_norm_eps(self) -> float | None:
        """Epsilon of the norms before mixers and MLPs; None for a post-norm model."""
        return None if self.post_norm else self.rms_eps

    @property
    def attention(self) -> AttentionConfig:
        """Config of the first layer with key and value heads, which all layers of draft heads
        have.
        """
        return next(each for each in self.attentions if isinstance(each, AttentionConfig))

    @property
    def attentions(self) -> tuple[SelfAttentionConfig, ...]:
        """Distinct configs of attention layers, in the order of the layers."""
        found = (x.mixer for x in self.layers if isinstance(x.mixer, SelfAttentionConfig))
        return tuple(dict.fromkeys(found))

    @property
    def recurrent(self) -> RecurrentConfig | None:
        """Config of recurrent layers; None if there are none."""
        mixers = (mixer for x in self.layers for mixer in (x.mixer, x.parallel))
        return next((x for x in mixers if isinstance(x, RecurrentConfig)), None)

    @property
    def dense(self) -> MLPConfig | None:
        """Config of dense MLPs; None if there are none."""
        return next((x.mlp for x in self.layers if isinstance(x.mlp, MLPConfig)), None)

    @property
    def experts(self) -> MoEConfig | None:
        """Config of MoE blocks; None if there are none."""
        return next((x.mlp for x in self.layers if isinstance(x.mlp, MoEConfig)), None)

    @property
    def has_mtp(self) -> bool:
        """True if the config names an MTP layer; the checkpoint may lack its tensors."""
        return self.mtp is not None

    @property
    def draft_layer(self) -> LayerConfig:
        """Config of an MTP layer: attention of the model's kind, and an MoE block if the model has
        them.
        """
        mlp = self.experts or self.dense or NoMLP()
        return LayerConfig(mixer=self.attentions[0], mlp=mlp)

    @property
    def draft_place(self) -> LayerPlace:
        """Place of the MTP layer, which is alone in its groups and in its pool."""
        mixer, mlp = self.draft_layer.mixer.kind, self.draft_layer.mlp.kind
        return LayerPlace(f"{MTP_LAYER}{mixer}", 0, f"{MTP_LAYER}{mlp}", 0, pool=0, pool_index=0)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers without the MTP layer."""
        return len(self.layers)
