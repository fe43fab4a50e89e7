"""Token mixers of decoder layers, one module for each kind.

A mixer config answers for its layers: sizes of a TP rank, sizes that must divide, parameters, and
the specification of its cache arrays. A further mixer is one module here.
"""

from shared.models.mixers.attention import AttentionConfig
from shared.models.mixers.gated_delta import GatedDeltaConfig
from shared.models.mixers.latent_attention import LatentAttentionConfig
from shared.models.mixers.mamba2 import Mamba2Config
from shared.models.mixers.no_mixer import NoMixer

SelfAttentionConfig = AttentionConfig | LatentAttentionConfig
"""Mixers that attend to earlier positions, with cache entries in pages."""

RecurrentConfig = GatedDeltaConfig | Mamba2Config
"""Mixers with a recurrent state and a convolution window, both per slot."""

MixerConfig = SelfAttentionConfig | RecurrentConfig | NoMixer
