"""Small random Gemma 4 assistants that often agree with a tiny target.

The `lm_head` of an untied tiny model scores the part of one token's embedding that remains in the
hidden state. An assistant passes a projection of the newest token's embedding through `fc`, and its
`lm_head` has the same scores in the projected space. Its layers add what they read of the target.
"""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from shared.drafts.assistant import TOKEN_CLUSTERS, TOKEN_ORDERING
from shared.drafts.checkpoint import head_parameters
from shared.drafts.config import DraftConfig, DraftHead
from shared.models.checkpoint import SINGLE_FILE, Weights
from shared.models.config import ModelConfig
from shared.models.mixers import AttentionConfig
from shared.models.saving import split
from tests.support.tiny_heads import NOISE, followers, random_parameter, unit_rows
from tests.support.tiny_models import EMBEDDING_SCALE, HEAD_SCALE, tiny_model

HIDDEN, LAYERS = 32, ("sliding_attention", "sliding_attention", "full_attention")
NUM_CLUSTERS, TOP_K = 16, 6
ADDED = 0.3
"""Scale of what each half of a layer adds."""


def _last_mixer(target: ModelConfig, *, slides: bool) -> tuple[int, AttentionConfig]:
    """Returns the last layer of a type with KV of its own."""
    return [
        (index, each.mixer)
        for index, each in enumerate(target.layers)
        if isinstance(each.mixer, AttentionConfig)
        and each.mixer.has_kv
        and (each.mixer.window is not None) == slides
    ][-1]


def tiny_assistant_config(target: ModelConfig, **fields: Any) -> dict[str, Any]:
    """The contents of an assistant's config.json for a tiny Gemma 4; `fields` are added."""
    (_, sliding), (_, full) = (_last_mixer(target, slides=x) for x in (True, False))
    text = {
        "model_type": "gemma4_text",
        "vocab_size": target.vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": len(LAYERS),
        "layer_types": list(LAYERS),
        "num_kv_shared_layers": len(LAYERS),
        "num_attention_heads": sliding.num_heads,
        "num_key_value_heads": sliding.num_kv_heads,
        "head_dim": sliding.head_size,
        "global_head_dim": full.head_size,
        "num_global_key_value_heads": full.num_kv_heads,
        "attention_k_eq_v": full.num_kv_heads != sliding.num_kv_heads,
        "sliding_window": sliding.window,
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    common = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target.hidden,
        "use_ordered_embeddings": True,
        "num_centroids": NUM_CLUSTERS,
        "centroid_intermediate_top_k": TOP_K,
        "text_config": text,
        "tie_word_embeddings": True,
    }
    return {**common, **fields}


def tiny_assistant(
    target: ModelConfig, target_weights: Weights, seed: int, **fields: Any
) -> DraftHead:
    """An assistant for an untied tiny Gemma 4, in float32; `fields` as above."""
    config = DraftConfig.from_dict(tiny_assistant_config(target, **fields), target)
    return drawn_assistant(config, target, target_weights, seed)


@lru_cache
def _gemma4() -> ModelConfig:
    return tiny_model("gemma4", 7)[0]


def assistant_of_layers(target: ModelConfig, target_weights: Weights, seed: int) -> DraftHead:
    """An assistant for any target of the sizes of the tiny Gemma 4, with windows in some layers."""
    config = DraftConfig.from_dict(tiny_assistant_config(_gemma4()), _gemma4())
    pairs = [_last_mixer(target, slides=kind == LAYERS[0]) for kind in LAYERS]
    layers = tuple(
        replace(layer, mixer=replace(mixer, has_kv=False))
        for layer, (_, mixer) in zip(config.layer.layers, pairs, strict=True)
    )
    config = replace(
        config,
        layer=replace(config.layer, layers=layers),
        kv_layers=tuple(index for index, _ in pairs),
    )
    return drawn_assistant(config, target, target_weights, seed)


def drawn_assistant(
    config: DraftConfig, target: ModelConfig, target_weights: Weights, seed: int
) -> DraftHead:
    """An assistant of these settings; see `tiny_assistant`."""
    rng = np.random.default_rng(seed)
    weights = {p.name: random_parameter(p, rng) for p in head_parameters(config, None)}
    projection, _ = np.linalg.qr(rng.standard_normal((target.hidden, HIDDEN)))
    projection = projection.T.astype(np.float32)
    weights["fc"][:, : target.hidden] = projection / (EMBEDDING_SCALE * target.embedding_factor)
    follows = unit_rows(target_weights["embed"])[followers(target_weights)]
    weights["lm_head"] = np.float32(HEAD_SCALE) * follows @ projection.T
    for name in ("mixer_end_norm", "feed_end_norm"):
        weights[name] *= np.float32(ADDED)
    weights["layer_scalar"] = 1 + weights["layer_scalar"] * np.float32(0.1 / NOISE)
    if config.clusters is not None:
        number, size = config.clusters.num_clusters, target.vocab // config.clusters.num_clusters
        weights[TOKEN_CLUSTERS] = (rng.permutation(target.vocab) // size).astype(np.int32)
        for cluster in range(number):
            rows = weights["lm_head"][weights[TOKEN_CLUSTERS] == cluster]
            weights["centroids"][cluster] += rows.mean(axis=0)
    return DraftHead(config, weights)


def write_tiny_assistant(
    folder: str | Path, target: ModelConfig, target_weights: Weights, seed: int, **fields: Any
) -> DraftHead:
    """Writes an assistant's folder in the format of Hugging Face; returns the head."""
    head, folder = tiny_assistant(target, target_weights, seed, **fields), Path(folder)
    folder.mkdir(parents=True)
    config = tiny_assistant_config(target, **fields)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors: dict[str, np.ndarray] = {}
    for parameter in head_parameters(head.config, None):
        tensors.update(split(parameter, head.weights[parameter.name], ""))
    if head.config.clusters is not None:
        ordering = np.argsort(head.weights[TOKEN_CLUSTERS], kind="stable")
        tensors[TOKEN_ORDERING] = ordering.astype(np.int64)
    save_file(tensors, folder / SINGLE_FILE)
    return head
