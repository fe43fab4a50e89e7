"""Small random EAGLE and EAGLE-3 heads that agree with a tiny target in about half of its tokens.

The `lm_head` of an untied tiny model scores what is left of one token's embedding, and so does a
head's. An EAGLE head passes the embedding of the next token on through `fc`. An EAGLE-3 head sees
it in its attention alone: there queries equal keys, so that a row looks mostly at itself, and
values hand the embedding on.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from shared.checkpoint import SINGLE_FILE, Parameter, Weights, split
from shared.draft_checkpoint import head_parameters
from shared.draft_config import DraftConfig, DraftHead
from shared.model_config import ModelConfig
from tests.tiny_models import EMBEDDING_SCALE, HEAD_SCALE

ARCHITECTURES = {"EAGLE": "LlamaForCausalLMEagle", "EAGLE3": "LlamaForCausalLMEagle3"}
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 6, 3, 16
"""Other ones than the tiny targets have, so that the two KVs cannot be taken for each other."""

NOISE = 0.5
"""Scale of what a head adds of the target's hidden states and of its own MLP; without it, it would
be a table of bigrams, and with more the two would hardly agree."""

SHARPNESS = 2.5
"""Scale of queries and keys; a row's own score is its square times the head size's root."""


def tiny_head_config(target: ModelConfig, kind: str, **fields: Any) -> dict[str, Any]:
    """The contents of a head's config.json; `fields` are added, as they would stand there.

    Examples: `bias`, `draft_vocab_size` (None shares the target's `lm_head`), `norm_before_fc`,
    `fc_norm`, `norm_output`, `rope_theta`, and `hidden_size` with `target_hidden_size`.
    """
    common = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": "llama",
        "vocab_size": target.vocab,
        "hidden_size": target.hidden,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_SIZE,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
    }
    if kind == "EAGLE3":
        common["draft_vocab_size"] = target.vocab * 3 // 4
        common["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, target.num_layers - 1]}
    return {**common, **fields}


def tiny_head(
    target: ModelConfig, target_weights: Weights, kind: str, seed: int, **fields: Any
) -> DraftHead:
    """A head for an untied tiny model, in float32; `fields` as in `tiny_head_config`."""
    config = DraftConfig.from_dict(tiny_head_config(target, kind, **fields), target)
    rng = np.random.default_rng(seed)
    weights = {p.name: _random(p, rng) for p in head_parameters(config, None)}
    if config.has_draft_vocab:
        ids = rng.choice(target.vocab, config.draft_vocab, replace=False)
        weights["draft_ids"] = np.sort(ids).astype(np.int32)
    if config.own_lm_head:
        embed = weights.get("embed", target_weights["embed"])
        follows = _cycle(target_weights)[weights.get("draft_ids", slice(None))]
        weights["lm_head"] = np.float32(HEAD_SCALE) * _unit(embed)[follows]
    if kind == "EAGLE":
        weights["fc"][:, : target.hidden] = np.eye(target.hidden) / EMBEDDING_SCALE
        weights["fc"][:, target.hidden :] *= 2
    else:
        _look_at_itself(config.layer, weights)
    return DraftHead(config, weights)


def write_tiny_head(
    folder: str | Path,
    target: ModelConfig,
    target_weights: Weights,
    kind: str,
    seed: int,
    **fields: Any,
) -> DraftHead:
    """Writes a head's folder as it would come from Hugging Face; returns what it holds."""
    head = tiny_head(target, target_weights, kind, seed, **fields)
    folder = Path(folder)
    folder.mkdir(parents=True)
    config = tiny_head_config(target, kind, **fields)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {}
    for parameter in head_parameters(head.config, None):
        tensors.update(split(parameter, head.weights[parameter.name], ""))
    if "draft_ids" in head.weights:
        ids = np.asarray(head.weights["draft_ids"], np.int64)
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(target.vocab), ids)
    save_file(tensors, folder / SINGLE_FILE)
    return head


def _random(parameter: Parameter, rng: np.random.Generator) -> np.ndarray:
    """Normal weights with deviation 1 / sqrt(fan-in) times `NOISE`, norms around 1."""
    name, noise = parameter.name, rng.standard_normal(parameter.shape)
    if name == "embed":
        drawn = EMBEDDING_SCALE * noise
    elif name.endswith("norm"):
        drawn = 1 + 0.2 * noise
    elif name == "fc_bias":
        drawn = 0.1 * noise
    else:
        drawn = NOISE * noise / np.sqrt(parameter.shape[-1])
    return drawn.astype(np.float32)


def _unit(embed: np.ndarray) -> np.ndarray:
    return embed / np.linalg.norm(embed, axis=1, keepdims=True)


def _cycle(target_weights: Weights) -> np.ndarray:
    """For each token the one whose embedding its row of the target's `lm_head` scores."""
    return np.argmax(target_weights["lm_head"] @ _unit(target_weights["embed"]).T, axis=1)


def _look_at_itself(layer: ModelConfig, weights: Weights) -> None:
    """Sets an EAGLE-3 head's attention; the first half of its input is the normed embedding."""
    D, group = layer.head_size, layer.num_heads // layer.num_kv_heads
    width, passed = D * layer.num_kv_heads, min(D * layer.num_kv_heads, layer.hidden)
    qkv, out = weights["layer.attention.qkv"][0], weights["layer.attention.out"][0]
    q, k, v = np.split(qkv, [group * width, (group + 1) * width])  # views
    k *= SHARPNESS / NOISE
    q.reshape(-1, group, D, q.shape[1])[:] = k.reshape(-1, 1, D, k.shape[1])
    v[:passed, :passed] += np.eye(passed, dtype=np.float32)
    back = np.eye(layer.hidden, width, dtype=np.float32).reshape(layer.hidden, -1, 1, D) / group
    out.reshape(layer.hidden, -1, group, D)[:] += back
