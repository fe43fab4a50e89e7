"""A tiny model with two groups of attention layers: of a sliding window, and of larger heads."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from shared.models.checkpoint import Weights
from shared.models.config import ModelConfig
from shared.models.mixers import AttentionConfig
from tests.support.tiny_models import tiny_model, tiny_weights

WINDOW = 8
SHARED_KV = (None, None, None, 1, 2)
"""Index of the layer that each layer reads the KV of, or None for KV of its own."""


@lru_cache
def two_groups() -> tuple[ModelConfig, Weights]:
    """Layers with a window of 8 tokens, and full-attention layers with heads of twice the size.

    The last layer of either kind reads the KV of the one before it.
    """
    config, _ = tiny_model("llama", 5)
    like = config.layers[0]
    assert isinstance(like.mixer, AttentionConfig)
    mixer = replace(like.mixer, qk_norm=True)
    wide = replace(
        mixer,
        head_size=2 * mixer.head_size,
        num_kv_heads=1,
        rotary=replace(mixer.rotary, width=2 * mixer.rotary.width),
    )
    slides = replace(mixer, window=WINDOW)
    layers = []
    for index, source in enumerate(SHARED_KV):
        own = replace(wide if index % 2 else slides, has_kv=source is None)
        layers.append(replace(like, mixer=own, kv_shared_layer_index=source))
    mixed = replace(config, layers=tuple(layers))
    return mixed, tiny_weights(mixed, 5)
