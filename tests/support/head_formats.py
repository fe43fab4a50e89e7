"""Heads in the formats of their publishers, which draft well only if they are read correctly.

Layer 1 of their target changes nothing, so hidden states 1 and 2 are equal. A head's `fc` subtracts
one from the other, with a large factor. The correct hidden states cancel, and the head drafts the
successor of the newest token; any others dominate the result. Formats that test another field have
a large remainder, which only the norm enabled by the field makes small.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from shared.drafts.checkpoint import head_parameters
from shared.drafts.config import DraftConfig, DraftHead
from shared.models.checkpoint import SINGLE_FILE, Weights
from shared.models.config import ModelConfig
from shared.models.families import config_from_dict
from shared.models.saving import split
from tests.support.tiny_heads import (
    cyclic,
    drawn_block,
    drawn_head,
    tiny_block_config,
    tiny_head_config,
)
from tests.support.tiny_models import tiny_config, tiny_weights

LAYERS = 4
INPUTS, OUTPUTS = [1, 2, 3], [0, 1, 2]
"""The streams as one list of layers and as the other."""

MUCH = 40.0

CALM = 0.4
"""Scale of the output of other layers, so that most tokens follow from the newest."""


def still_target(name: str) -> tuple[ModelConfig, Weights]:
    """A tiny model with a layer 1 that adds nothing, for heads of a format."""
    fields = tiny_config("qwen3", nested=False, with_mtp=False, tied=False)
    config = config_from_dict(fields | {"num_hidden_layers": LAYERS})
    weights = dict(tiny_weights(config, 3))
    for stack in ("attention.out", "mlp.down"):
        weights[stack] = np.float32(CALM) * weights[stack]
        weights[stack][1] = 0
    return config, cyclic(config, weights) if FORMATS[name].is_block else weights


@dataclass(frozen=True)
class Format:
    """Format in which a publisher writes a head.

    Attributes:
      config: The contents of its config.json for a target.
      is_block: It is a DFlash, DSpark or DFlash2 head.
      renames: Pairs of a part of tensor names and its replacement.
      prefix: Prefix of all names.
      switch: A field that enables a norm, without which the head drafts badly; None if the test
        changes the auxiliary layers instead.
    """

    config: Callable[[ModelConfig], dict[str, Any]]
    is_block: bool = False
    renames: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    switch: str | None = None


def _speculators(target: ModelConfig) -> dict[str, Any]:
    """Two layers, the second of which slides; a residual after its norm."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}  # that ranks divide
    flat = tiny_head_config(target, "EAGLE3", **heads)
    outer = ("architectures", "draft_vocab_size", "eagle_config")
    layer = {name: value for name, value in flat.items() if name not in outer}
    slides = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "eagle3"},
        "draft_vocab_size": flat["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": INPUTS,
        "norm_before_residual": True,
        "transformer_layer_config": {**layer, "num_hidden_layers": 2, **slides},
    }


def _specforge(target: ModelConfig) -> dict[str, Any]:
    listed = {"eagle_aux_hidden_state_layer_ids": OUTPUTS}
    return tiny_head_config(target, "EAGLE3", eagle_config=listed)


def _modelopt(target: ModelConfig) -> dict[str, Any]:
    fixed = ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm")
    nested = {
        "eagle_aux_hidden_state_layer_ids": OUTPUTS,
        **dict.fromkeys((*fixed, "next_layer_regular"), True),
        "use_mtp_layernorm": False,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }
    return tiny_head_config(target, "EAGLE3", eagle_config=nested)


def _torchspec(target: ModelConfig) -> dict[str, Any]:
    listed = {"eagle_aux_hidden_state_layer_ids": [*INPUTS, LAYERS]}
    fields = {"fc_norm": True, "norm_output": True, "eagle_config": None}
    return tiny_head_config(target, "EAGLE3", **fields, **listed)


def _zlab(target: ModelConfig) -> dict[str, Any]:
    flat = tiny_block_config(target, num_target_layers=LAYERS)
    return flat | {"dflash_config": {**flat["dflash_config"], "target_layer_ids": OUTPUTS}}


def _speculators_block(target: ModelConfig) -> dict[str, Any]:
    flat = tiny_block_config(target)
    outer = ("architectures", "block_size", "dflash_config", "num_target_layers")
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "draft_vocab_size": target.vocab * 3 // 4,
        "block_size": flat["block_size"],
        "mask_token_id": flat["dflash_config"]["mask_token_id"],
        "aux_hidden_state_layer_ids": INPUTS,
        "transformer_layer_config": {k: v for k, v in flat.items() if k not in outer},
    }


def _speculators_spark(target: ModelConfig) -> dict[str, Any]:
    fields = {"speculators_model_type": "dspark", "sample_from_anchor": True, "markov_rank": 16}
    return {**_speculators_block(target), "architectures": ["DSparkSpeculator"], **fields}


def _specforge_spark(target: ModelConfig) -> dict[str, Any]:
    fields = {"projector_type": "dspark", "markov_rank": 16, "markov_head_type": "gated"}
    flat = _zlab(target) | {"architectures": ["DSparkDraftModel"]}
    return flat | {"dflash_config": {**flat["dflash_config"], **fields}}


PAIRS = {
    "conv_kernel_size": 2,
    "conv_group_size": 8,
    "selector_rank": 8,
    "selector_top_k": 8,
}


def _speculators_pair(target: ModelConfig) -> dict[str, Any]:
    fields = {"speculators_model_type": "dflash2", "draft_vocab_size": target.vocab, **PAIRS}
    fields["sliding_window_non_causal"] = False
    return {**_speculators_block(target), "architectures": ["DFlash2DraftModel"], **fields}


def _zlab_pair(target: ModelConfig) -> dict[str, Any]:
    flat = _zlab(target) | {"architectures": ["DFlash2DraftModel"]}
    return flat | {"dflash_config": {**flat["dflash_config"], **PAIRS}}


FORMATS = {
    "speculators": Format(_speculators, renames=(("midlayer.", "layers.0."),)),
    "speculators with a norm": Format(
        _speculators, renames=(("midlayer.", "layers.0."),), switch="norm_before_residual"
    ),
    "SpecForge": Format(_specforge),
    "ModelOpt": Format(_modelopt),
    "TorchSpec": Format(_torchspec, renames=(("midlayer.", "layers.0."),), prefix="model."),
    "z-lab": Format(_zlab, is_block=True),
    "speculators DFlash": Format(_speculators_block, is_block=True),
    "speculators DSpark": Format(_speculators_spark, is_block=True),
    "SpecForge DSpark": Format(_specforge_spark, is_block=True),
    "speculators DFlash2": Format(_speculators_pair, is_block=True),
    "z-lab DFlash2": Format(_zlab_pair, is_block=True),
}


def made_head(name: str, target: ModelConfig, target_weights: Weights) -> DraftHead:
    """The head of a format, with its weights."""
    config = DraftConfig.from_dict(FORMATS[name].config(target), target)
    if FORMATS[name].is_block:
        head = drawn_block(config, 5)
    else:
        head = drawn_head(config, target, target_weights, 5)
    weights = dict(head.weights)
    if config.has_draft_vocab and FORMATS[name].is_block:
        ids = np.random.default_rng(1).choice(target.vocab, config.draft_vocab, replace=False)
        weights["draft_ids"] = np.sort(ids).astype(np.int32)
        weights["lm_head"] = target_weights["lm_head"][weights["draft_ids"]]
    _count_streams(FORMATS[name], config, weights)
    return DraftHead(config, weights)


def _count_streams(how: Format, config: DraftConfig, weights: dict[str, np.ndarray]) -> None:
    """Sets `fc` and the norms around it."""
    H = config.target_hidden
    # A norm after `fc` amplifies everything, rounding errors too.
    is_normed = how.is_block or config.norm_residual
    much = np.float32(1 if is_normed else MUCH)
    fc = weights["fc"] = weights["fc"].copy()
    fc[:, : 2 * H] = much * np.concatenate([np.eye(H), -np.eye(H)], axis=1)
    fc[:, 2 * H :] *= 0 if is_normed else 0.01
    if config.norm_aux:
        weights["aux_norm"] = np.ones_like(weights["aux_norm"])
    if how.switch:
        fc[:] = 0
        fc[:, 2 * H : 3 * H] = MUCH * np.eye(H)
        weights["layer.hidden_norm"] = 0.05 * weights["layer.hidden_norm"]
    elif config.norm_residual:
        weights["layer.hidden_norm"] = MUCH * weights["layer.hidden_norm"]
    if how.is_block:
        weights["hidden_norm"] = MUCH * weights["hidden_norm"]
        # The first layer makes the first draft; the others add little, except for the last one.
        out = weights["layer.attention.out"] = weights["layer.attention.out"].copy()
        out[1:-1] *= np.float32(0.1)
        out[-1] *= np.float32(0.5)


def write_format(
    folder: Path, name: str, target: ModelConfig, target_weights: Weights
) -> DraftHead:
    """Writes the folder of a format; returns its head."""
    how, head = FORMATS[name], made_head(name, target, target_weights)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(how.config(target)), encoding="utf-8")
    tensors: dict[str, np.ndarray] = {}
    for parameter in head_parameters(head.config, None):
        tensors.update(split(parameter, head.weights[parameter.name], ""))
    if "draft_ids" in head.weights:
        ids = np.asarray(head.weights["draft_ids"], np.int64)
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(target.vocab), ids)
    for old, new in how.renames:
        tensors = {key.replace(old, new): array for key, array in tensors.items()}
    save_file({how.prefix + key: array for key, array in tensors.items()}, folder / SINGLE_FILE)
    return head
