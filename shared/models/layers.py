"""Config of a decoder layer: its token mixer, and its MLP or MoE block.

A layer's parameters are named by the groups of its mixer and its MLP (`shared.models.groups`):
`attention.inputs` of an attention layer, `gated_delta.inputs` of a GDN layer, `mlp.down` of a dense
MLP, `experts.down` of an MoE block.
"""

from dataclasses import dataclass

from shared.models.mixers import MixerConfig
from shared.models.mlp import FeedForwardConfig


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """A decoder layer."""

    mixer: MixerConfig
    mlp: FeedForwardConfig

    def local(self, count: int) -> "LayerConfig":
        """Returns the config of one of `count` TP ranks."""
        return LayerConfig(mixer=self.mixer.local(count), mlp=self.mlp.local(count))
