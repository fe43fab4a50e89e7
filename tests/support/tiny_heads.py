"""Small random heads of all kinds that often agree with a tiny target.

The `lm_head` of an untied tiny model scores the part of one token's embedding that remains in the
hidden state, and so does a head's. An EAGLE head passes the embedding of the next token through
`fc`. An EAGLE-3 head reads it in its attention only: its queries equal its keys, so that a row
attends mostly to itself, and values pass the embedding on.

A DFlash head must predict several next tokens, so its target has embeddings that follow one another
by a rotation. The mask's embedding is 0. The first layer gives slot 1 the newest token's embedding,
and each layer after it passes the content of slot j - 1 to slot j, rotated. The Markov step of a
DSpark head contains the table of successors.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from shared.drafts.checkpoint import head_parameters
from shared.drafts.config import DraftConfig, DraftHead
from shared.drafts.dspark_config import GATED, RNN, MarkovConfig
from shared.models.checkpoint import SINGLE_FILE, Weights
from shared.models.config import ModelConfig
from shared.models.parameter import Parameter
from shared.models.saving import split
from tests.support.tiny_models import EMBEDDING_SCALE, HEAD_SCALE

ARCHITECTURES = {"EAGLE": "LlamaForCausalLMEagle", "EAGLE3": "LlamaForCausalLMEagle3"}
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 6, 3, 16
"""Other ones than the tiny targets have, so that the two KVs cannot be taken for each other."""

NUM_BLOCK_KV_HEADS = 4
"""KV heads: enough for the values of a DFlash head to hold a whole hidden state."""

NOISE = 0.5
"""Scale of what a head adds of the target's hidden states and of its own MLP; without it, it would
be a table of bigrams, and with more the two would hardly agree."""

BLOCK_SIZE, BLOCK_WINDOW = 4, 2
"""Slots of a DFlash block; in a sliding layer a slot attends to itself and its predecessor."""

BLOCK_LAYERS = ("sliding_attention", "sliding_attention", "sliding_attention", "full_attention")
HANDED_ON = (6.0, 2.0, 1.2)
"""Share of the previous slot that each sliding layer of a DFlash head passes on."""

BLOCK_NOISE = 0.25
"""Scale of the other outputs of its layers."""

CONV_NOISE, PAIR_SCALE = 0.05, 0.3
"""Scales of what the convolutions of a DFlash2 head add to a row, and of the numbers of its
tokens."""

SPARK_NOISE, SPARK_SCALE = 0.1, 1.0
"""Scales of the logits of a DSpark head's block, and of its Markov step."""

CONTEXT_NOISE, CONTEXT_SHARPNESS = 3.0, 2.0
"""Scale of what its last layer adds, most of it read from the context, and of how picky it is."""

SHARPNESS = 2.5
"""Scale of queries and keys; a row's own score is its square times the head size's root."""


def tiny_head_config(target: ModelConfig, kind: str, **fields: Any) -> dict[str, Any]:
    """The contents of a head's config.json; `fields` are added.

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
    return drawn_head(config, target, target_weights, seed)


def drawn_head(
    config: DraftConfig, target: ModelConfig, target_weights: Weights, seed: int
) -> DraftHead:
    """A head of these settings; see `tiny_head`."""
    rng = np.random.default_rng(seed)
    weights = {p.name: random_parameter(p, rng) for p in head_parameters(config, None)}
    if config.has_draft_vocab:
        ids = rng.choice(target.vocab, config.draft_vocab, replace=False)
        weights["draft_ids"] = np.sort(ids).astype(np.int32)
    if config.own_lm_head:
        embed = weights.get("embed", target_weights["embed"])
        follows = followers(target_weights)[weights.get("draft_ids", slice(None))]
        weights["lm_head"] = np.float32(HEAD_SCALE) * unit_rows(embed)[follows]
    if config.kind == "EAGLE":
        weights["fc"][:, : target.hidden] = np.eye(target.hidden) / EMBEDDING_SCALE
        weights["fc"][:, target.hidden :] *= 2
    else:
        _look_at_itself(config.layer, weights)
    return DraftHead(config, weights)


def cyclic(config: ModelConfig, weights: Weights) -> Weights:
    """An untied tiny model with a mask as last token and embeddings related by `_turn`."""
    follows, token, order = followers(weights), 0, []
    after = np.argsort(follows)  # the token that is likely after each
    for _ in range(config.vocab):
        order.append(token)
        token = int(after[token])
    embed = np.empty_like(weights["embed"])
    embed[order] = _orbit(config.vocab, config.hidden)
    unit = unit_rows(embed)
    embed[config.vocab - 1] = 0
    return {**weights, "embed": embed, "lm_head": np.float32(HEAD_SCALE) * unit[follows]}


def _angles(vocab: int, hidden: int) -> np.ndarray:
    """Distinct integer numbers of rotations in `vocab` steps, for each pair of dimensions."""
    turns = np.random.default_rng(12).choice(vocab // 2 - 1, hidden // 2, replace=False) + 1
    return 2 * np.pi * turns / vocab


def _orbit(vocab: int, hidden: int) -> np.ndarray:
    phase = np.arange(vocab)[:, None] * _angles(vocab, hidden)
    found = np.concatenate([np.cos(phase), np.sin(phase)], axis=1)
    return (EMBEDDING_SCALE * np.sqrt(2) * found).astype(np.float32)


def _turn(vocab: int, hidden: int) -> np.ndarray:
    """Takes a token's embedding to that of the token that is likely after it."""
    cos, sin = (np.diag(part(_angles(vocab, hidden))) for part in (np.cos, np.sin))
    return np.block([[cos, -sin], [sin, cos]]).astype(np.float32)


def tiny_block_config(target: ModelConfig, **fields: Any) -> dict[str, Any]:
    """The contents of a DFlash head's config.json; `fields` are added.

    Examples: `layer_types`, `sliding_window`, `is_causal`, and `dflash_config` as a whole.
    """
    common = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": target.vocab,
        "hidden_size": target.hidden,
        "intermediate_size": 40,
        "num_hidden_layers": len(BLOCK_LAYERS),
        "layer_types": list(BLOCK_LAYERS),
        "sliding_window": BLOCK_WINDOW,
        "num_attention_heads": 2 * NUM_BLOCK_KV_HEADS,
        "num_key_value_heads": NUM_BLOCK_KV_HEADS,
        "head_dim": HEAD_SIZE,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "num_target_layers": target.num_layers,
        "block_size": BLOCK_SIZE,
        "dflash_config": {
            "mask_token_id": target.vocab - 1,
            "target_layer_ids": [0, target.num_layers - 1],
        },
    }
    return {**common, **fields}


def tiny_block_head(target: ModelConfig, seed: int, **fields: Any) -> DraftHead:
    """A DFlash head for a `cyclic` model, in float32; `fields` as in `tiny_block_config`."""
    return drawn_block(DraftConfig.from_dict(tiny_block_config(target, **fields), target), seed)


def drawn_block(config: DraftConfig, seed: int) -> DraftHead:
    """A DFlash or DFlash2 head of these settings; see `tiny_block_head`."""
    target = config.layer
    rng = np.random.default_rng(seed)
    weights = {p.name: random_parameter(p, rng) for p in head_parameters(config, None)}
    for name in ("layer.attention.out", "layer.mlp.down"):
        weights[name] *= np.float32(BLOCK_NOISE / NOISE)
    turn, passed_on = _turn(target.vocab, target.hidden), np.eye(target.hidden, dtype=np.float32)
    assert config.block is not None
    if config.block.first_slot == 0:  # slot 0 has the newest token itself
        passed_on = 0 * passed_on
    for layer, share in enumerate(HANDED_ON[: config.layer.num_layers]):
        _hand_on(config.layer, weights, layer, np.float32(share) * passed_on)
        passed_on = turn
    weights["layer.attention.out"][-1] *= np.float32(CONTEXT_NOISE / BLOCK_NOISE)
    for name in ("layer.attention.q_norm", "layer.attention.k_norm"):
        weights[name][-1] *= np.float32(CONTEXT_SHARPNESS)
    for name, drawn in weights.items():
        if name.startswith("conv."):
            drawn *= np.float32(CONV_NOISE / NOISE)
            if name.endswith(".base"):
                drawn[:, 0] += 1  # a row itself, and little of those before
        elif name in ("selector.before", "selector.after"):
            drawn *= np.float32(PAIR_SCALE / NOISE * np.sqrt(drawn.shape[1]))
    return DraftHead(config, weights)


def tiny_spark_config(target: ModelConfig, **fields: Any) -> dict[str, Any]:
    """The contents of a DSpark head's config.json; `fields` are added.

    Its chain has the number of nodes of `tiny_block_config`.
    """
    common = {
        "architectures": ["DSparkDraftModel"],
        "block_size": BLOCK_SIZE - 1,
        "markov_rank": target.hidden,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return tiny_block_config(target, **{**common, **fields})


def tiny_spark_head(
    target: ModelConfig, target_weights: Weights, seed: int, **fields: Any
) -> DraftHead:
    """A DSpark head for an untied tiny model, in float32; `fields` as in `tiny_spark_config`."""
    config = DraftConfig.from_dict(tiny_spark_config(target, **fields), target)
    return drawn_spark(config, target_weights, seed)


def tiny_pair_config(target: ModelConfig, **fields: Any) -> dict[str, Any]:
    """The contents of a DFlash2 head's config.json; `fields` are added.

    Its chain has the number of nodes of `tiny_block_config`.
    """
    common = {
        "architectures": ["DFlash2DraftModel"],
        "conv_kernel_size": 2,
        "conv_group_size": 4,
        "selector_rank": 8,
        "selector_top_k": 6,
    }
    return tiny_block_config(target, **{**common, **fields})


def tiny_pair_head(target: ModelConfig, seed: int, **fields: Any) -> DraftHead:
    """A DFlash2 head for a `cyclic` model, in float32; `fields` as in `tiny_pair_config`."""
    return drawn_block(DraftConfig.from_dict(tiny_pair_config(target, **fields), target), seed)


def drawn_spark(config: DraftConfig, target_weights: Weights, seed: int) -> DraftHead:
    """A DSpark head of these settings; its Markov step contains the successor of each token.

    The block itself adds noise, a little more than nothing.
    """
    assert config.block is not None
    rng, markov = np.random.default_rng(seed), config.part(MarkovConfig)
    assert markov is not None
    weights = {p.name: random_parameter(p, rng) for p in head_parameters(config, None)}
    weights["final_norm"] *= np.float32(SPARK_NOISE)
    weights["markov.embed"] = unit_rows(target_weights["embed"])
    weights["markov.lm_head"] = np.float32(SPARK_SCALE) * target_weights["lm_head"]
    if markov.kind == GATED:
        weights["markov.mix_bias"] += np.float32(2)
    if markov.kind == RNN:
        out = weights["markov.mix"][2 * markov.rank :]
        out *= np.float32(0.1)
        out[:, markov.rank : 2 * markov.rank] += np.eye(markov.rank, dtype=np.float32)
    return DraftHead(config, weights)


def _hand_on(
    layer: ModelConfig, weights: dict[str, np.ndarray], number: int, passed_on: np.ndarray
) -> None:
    """Sets values and output of one layer so that `passed_on` of the input is added to it."""
    hidden, width, D = layer.hidden, layer.attention.key_size, layer.attention.head_size
    group = layer.attention.query_size // width
    values = weights["layer.attention.inputs"][number][-width:]
    values[:] = 0
    values[:hidden] = np.eye(hidden, dtype=np.float32)
    padded = np.zeros((hidden, width), np.float32)
    padded[:, :hidden] = passed_on / group
    out = weights["layer.attention.out"][number].reshape(hidden, -1, group, D)
    out[:] = padded.reshape(hidden, -1, 1, D)


def write_tiny_head(
    folder: str | Path,
    target: ModelConfig,
    target_weights: Weights,
    kind: str,
    seed: int,
    **fields: Any,
) -> DraftHead:
    """Writes a head's folder in the format of Hugging Face; returns the head."""
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


def write_tiny_block(
    folder: str | Path, target: ModelConfig, seed: int, **fields: Any
) -> DraftHead:
    """Writes a DFlash head's folder in the format of Hugging Face; returns the head."""
    head = tiny_block_head(target, seed, **fields)
    _write(Path(folder), tiny_block_config(target, **fields), head)
    return head


def write_tiny_pair(folder: str | Path, target: ModelConfig, seed: int, **fields: Any) -> DraftHead:
    """Writes a DFlash2 head's folder in the format of z-lab; returns the head."""
    head = tiny_pair_head(target, seed, **fields)
    _write(Path(folder), tiny_pair_config(target, **fields), head)
    return head


def write_tiny_spark(
    folder: str | Path, target: ModelConfig, target_weights: Weights, seed: int, **fields: Any
) -> DraftHead:
    """Writes a DSpark head's folder in the format of SpecForge; returns the head."""
    head = tiny_spark_head(target, target_weights, seed, **fields)
    _write(Path(folder), tiny_spark_config(target, **fields), head)
    return head


def _write(folder: Path, config: dict[str, Any], head: DraftHead) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {}
    for parameter in head_parameters(head.config, None):
        tensors.update(split(parameter, head.weights[parameter.name], ""))
    save_file(tensors, folder / SINGLE_FILE)


def random_parameter(parameter: Parameter, rng: np.random.Generator) -> np.ndarray:
    """Normal weights with deviation 1 / sqrt(fan-in) times `NOISE`, norms around 1."""
    name, noise = parameter.name, rng.standard_normal(parameter.shape)
    if name == "embed":
        drawn = EMBEDDING_SCALE * noise
    elif name.endswith("norm"):
        drawn = 1 + 0.2 * noise
    elif name.endswith("_bias"):
        drawn = 0.1 * noise
    else:
        drawn = NOISE * noise / np.sqrt(parameter.shape[-1])
    return drawn.astype(np.float32)


def unit_rows(embed: np.ndarray) -> np.ndarray:
    return embed / np.maximum(np.linalg.norm(embed, axis=1, keepdims=True), np.float32(1e-9))


def followers(target_weights: Weights) -> np.ndarray:
    """For each token, the token of the embedding that its row of the target's `lm_head` scores."""
    return np.argmax(target_weights["lm_head"] @ unit_rows(target_weights["embed"]).T, axis=1)


def _look_at_itself(layer: ModelConfig, weights: Weights) -> None:
    """Sets an EAGLE-3 head's attention; the first half of its input is the normed embedding."""
    D, width = layer.attention.head_size, layer.attention.key_size
    group, passed = layer.attention.query_size // width, min(width, layer.hidden)
    qkv, out = weights["layer.attention.inputs"][0], weights["layer.attention.out"][0]
    q, k, v = np.split(qkv, [group * width, (group + 1) * width])  # views
    k *= SHARPNESS / NOISE
    q.reshape(-1, group, D, q.shape[1])[:] = k.reshape(-1, 1, D, k.shape[1])
    v[:passed, :passed] += np.eye(passed, dtype=np.float32)
    back = np.eye(layer.hidden, width, dtype=np.float32).reshape(layer.hidden, -1, 1, D) / group
    out.reshape(layer.hidden, -1, group, D)[:] += back
