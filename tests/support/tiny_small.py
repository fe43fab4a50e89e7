"""Small random models that draft for a tiny target and often agree with it.

A tiny target scores the remainder of one token's embedding, and a small model does the same with
embeddings of its own, so that the two agree if the newest token decides. Numbers of layers and
heads and the hidden size differ from the target's, so that their memory cannot be confused.
"""

from typing import Any

import numpy as np

from shared.models.checkpoint import Weights
from shared.models.config import ModelConfig
from shared.models.families import config_from_dict
from shared.spec.standalone import SmallModel
from tests.support.tiny_mamba2 import VARIANTS
from tests.support.tiny_models import HEAD_SCALE, tiny_config, tiny_weights

SMALLER: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
SMALLER_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
}
SMALLER_MAMBA2: dict[str, dict[str, Any]] = {
    "bamba": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "falcon_h1": {"mamba_d_ssm": 32},
    "granitemoehybrid": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "nemotron_h": {"hybrid_override_pattern": "M*E", "num_hidden_layers": 3, "mamba_num_heads": 4},
}


def small_config(family: str, **fields: Any) -> dict[str, Any]:
    """The contents of a small model's config.json; `fields` are put into it."""
    config = tiny_config(family, nested=False, with_mtp=False, tied=False)
    own: dict[str, Any] = SMALLER_DELTA if family.startswith("qwen3_5") else {}
    if "layer_types" in config and not own:
        own = {"layer_types": config["layer_types"][-SMALLER["num_hidden_layers"] :]}
    if "num_kv_shared_layers" in config:
        own = own | {"num_kv_shared_layers": 0}
    base = VARIANTS[family][0] if family in VARIANTS else family
    return {**config, **SMALLER, **own, **SMALLER_MAMBA2.get(base, {}), **fields}


def small_model(
    target: ModelConfig, target_weights: Weights, family: str, seed: int, **fields: Any
) -> SmallModel:
    """A model of any family that drafts for a target; see `small_config`."""
    config = config_from_dict(small_config(family, **fields))
    weights = tiny_weights(config, seed)
    weights["lm_head"] = np.float32(HEAD_SCALE) * _unit(weights["embed"])
    common = min(config.vocab, target.vocab)
    follows = _followed(target_weights)[:common] % config.vocab
    weights["lm_head"][:common] = weights["lm_head"][follows]
    return SmallModel(config, weights, target.vocab)


def same_model(target: ModelConfig, weights: Weights) -> SmallModel:
    """The target as its own drafter, without its MTP layer."""
    own = {name: array for name, array in weights.items() if not name.startswith("mtp.")}
    return SmallModel(target, own, target.vocab)


def _unit(embed: np.ndarray) -> np.ndarray:
    return embed / np.linalg.norm(embed, axis=1, keepdims=True)


def _followed(target_weights: Weights) -> np.ndarray:
    """For each token, the token of the embedding that its row of the target's `lm_head` scores."""
    return np.argmax(target_weights["lm_head"] @ _unit(target_weights["embed"]).T, axis=1)
