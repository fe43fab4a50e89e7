"""Config of a decoder layer: its token mixer, its MLP or MoE block, and the source of its KV.

Most layers have both. In a model with one sublayer per layer, a layer has a mixer with `NoMLP`, or
an MLP with `NoMixer`.

A layer's parameters are named by the groups of its mixer and its MLP (`shared.models.groups`):
`attention.inputs` of an attention layer, `gated_delta.inputs` of a GDN layer, `mlp.down` of a dense
MLP, `experts.down` of an MoE block.
"""

from dataclasses import dataclass, replace

from shared.models.mixers import AttentionConfig, MixerConfig, NoMixer, RecurrentConfig
from shared.models.mlp import FeedForwardConfig, NoMLP


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """A decoder layer.

    Attributes:
      mixer: Token mixer.
      mlp: MLP or MoE block.
      parallel: Mixer next to it with the same input; both outputs are added. None without one.
      kv_shared_layer_index: Index of the earlier layer that an attention layer reads the KV of;
        None for a layer with KV or states of its own.
    """

    mixer: MixerConfig
    mlp: FeedForwardConfig
    kv_shared_layer_index: int | None = None
    parallel: RecurrentConfig | None = None

    @property
    def reads_target_kv(self) -> bool:
        """True if an attention layer of a drafter reads the KV of a target layer: it has no KV of
        its own, and names no layer of its own model.
        """
        has_none = isinstance(self.mixer, AttentionConfig) and not self.mixer.has_kv
        return has_none and self.kv_shared_layer_index is None

    @property
    def is_single(self) -> bool:
        """True if the layer has a mixer without an MLP, or an MLP without a mixer."""
        return isinstance(self.mixer, NoMixer) != isinstance(self.mlp, NoMLP)

    def local(self, count: int) -> "LayerConfig":
        """Returns the config of one of `count` TP ranks."""
        own = None if self.parallel is None else self.parallel.local(count)
        local = replace(self, mixer=self.mixer.local(count), mlp=self.mlp.local(count))
        return replace(local, parallel=own)
