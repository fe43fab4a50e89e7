"""A tiny model with two groups of attention layers: of a sliding window, and of larger heads."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from shared.models.checkpoint import Weights
from shared.models.config import ModelConfig
from shared.models.mixers import AttentionConfig
from tests.support.tiny_models import tiny_model, tiny_weights

WINDOW = 8


@lru_cache
def two_groups() -> tuple[ModelConfig, Weights]:
    """Layers with a window of 8 tokens, and full-attention layers with heads of twice the size."""
    config, _ = tiny_model("llama", 5)
    layers = []
    for index, layer in enumerate(config.layers):
        mixer = layer.mixer
        assert isinstance(mixer, AttentionConfig)
        wide = replace(
            mixer,
            head_size=2 * mixer.head_size,
            num_kv_heads=1,
            rotary=replace(mixer.rotary, width=2 * mixer.rotary.width),
        )
        layers.append(replace(layer, mixer=wide if index % 2 else replace(mixer, window=WINDOW)))
    mixed = replace(config, layers=tuple(layers))
    return mixed, tiny_weights(mixed, 5)
