"""A forward pass of the whole text without a cache, for models with several kinds of attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.models.mixers import AttentionConfig
from shared.spec import layers
from tests.support.equality import Oracle


class CachelessOracle(Oracle):
    """Plain decoding that computes all positions at once, with one matrix of scores per head.

    Supports pre-norm models with QK norms of each head, without biases and gates.
    """

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        config, weights = self._config, self._weights
        written: list[tuple[np.ndarray, np.ndarray]] = []
        x = weights["embed"][tokens]
        for index, (each, at) in enumerate(zip(config.layers, config.places, strict=True)):
            assert isinstance(each.mixer, AttentionConfig)
            normed = layers.rms_norm(x, weights["input_norm"][index], config.rms_eps)
            projected = normed @ weights[f"{at.mixer}.inputs"][at.mixer_index].T
            names = (f"{at.mixer}.{x}_norm" for x in "qk")
            norms = [weights[name][at.mixer_index] for name in names if name in weights]
            q, k, v = _heads(projected, each.mixer, norms, config.rms_eps)
            source = each.kv_shared_layer_index
            written.append((k, v) if source is None else written[source])
            mixed = _attended(q, *written[-1], each.mixer.window)
            x = x + mixed @ weights[f"{at.mixer}.out"][at.mixer_index].T
            normed = layers.rms_norm(x, weights["post_attention_norm"][index], config.rms_eps)
            gate, up = np.split(normed @ weights["mlp.gate_up"][index].T, 2, axis=1)
            x = x + layers.silu(gate) * up @ weights["mlp.down"][index].T
        hidden = layers.rms_norm(x, weights["final_norm"], config.rms_eps)
        return hidden @ weights["lm_head"].T


def _heads(
    projected: np.ndarray, mixer: AttentionConfig, norms: Sequence[np.ndarray], eps: float
) -> list[np.ndarray]:
    """Queries and keys after norm and rotation, and values: [tokens, heads, head_size] of each."""
    heads = projected.reshape(len(projected), -1, mixer.head_size)
    *parts, v = np.split(heads, [mixer.num_heads, mixer.num_heads + mixer.num_kv_heads], axis=1)
    for index, norm in enumerate(norms):
        parts[index] = layers.rms_norm(parts[index], norm, eps)
    cos_sin = layers.rotary_angles(np.arange(len(heads)), mixer.rotary)
    return [*(layers.apply_rotary(x, *cos_sin) for x in parts), v]


def _attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """Softmax attention of all tokens to themselves and to tokens before them."""
    group, token = q.shape[1] // k.shape[1], np.arange(len(q))
    distance = token[:, None] - token
    is_seen = (distance >= 0) & (distance < (window or len(q)))
    k, v = (np.repeat(each, group, axis=1) for each in (k, v))
    scores = np.where(is_seen, np.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)
