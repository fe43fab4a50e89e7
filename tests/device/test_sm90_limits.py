"""Sizes that the Mosaic GPU attention kernels support; the test needs no GPU."""

import jax
import jax.numpy as jnp
import pytest

from kernels.pallas_gpu.attention import attention_layer_sm90


@pytest.mark.parametrize(
    ("q_heads", "k_heads", "head_size", "taken"),
    [
        (128, 2, 64, True),
        (12, 2, 128, True),
        (142, 2, 128, False),  # 71 query heads of a key head are more than a warpgroup's 64 pairs
        (65, 1, 256, False),
        (24, 1, 256, True),
        (24, 3, 64, False),  # an odd key head would have no pair
        (8, 2, 96, False),
    ],
)
def test_attention_sm90_takes_supported_head_counts(
    q_heads: int, k_heads: int, head_size: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_layer_sm90, "has_mosaic", lambda: True)
    kv = jax.ShapeDtypeStruct((1, 2, 9, 64, k_heads, head_size), jnp.bfloat16)
    assert attention_layer_sm90.takes(q_heads, kv, 64) is taken
