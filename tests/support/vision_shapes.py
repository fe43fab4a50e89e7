"""Shapes of vision encoders."""

from __future__ import annotations

from shared.models.vision_config import VisionConfig

QWEN3_5 = VisionConfig(
    depth=27,
    hidden=1152,
    num_heads=16,
    intermediate=4304,
    channels=3,
    patch_size=16,
    frames=2,
    merge_size=2,
    table_side=48,
    out=4096,
    image_token=0,
)
"""Vision config of Qwen3.5-9B."""
