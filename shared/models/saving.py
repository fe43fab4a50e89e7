"""Writes checkpoints: config.json, and safetensors files with Hugging Face tensor names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from shared.models.checkpoint import INDEX_FILE, SINGLE_FILE, Array, Weights
from shared.models.families import config_from_dict
from shared.models.parameter import Parameter
from shared.models.parameter_arrays import to_stored, unsliced
from shared.models.parameters import parameters


def save_checkpoint(
    folder: str | Path, config_dict: Mapping[str, Any], weights: Weights, num_shards: int = 1
) -> None:
    """Writes config.json and the weights under their Hugging Face names.

    Args:
      folder: Folder to create or fill.
      config_dict: Contents of config.json.
      weights: Arrays by parameter name; the MTP layer is written if `mtp.fc` is present.
      num_shards: 1 writes a single file; more write shards and an index.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_dict, indent=1), encoding="utf-8")
    config = config_from_dict(config_dict)
    prefix = tensor_prefix(config_dict)
    tensors = {}
    for parameter in parameters(config, "mtp.fc" in weights):
        tensors.update(split(parameter, weights[parameter.name], prefix))
    _save_files(folder, tensors, num_shards)


def split(parameter: Parameter, array: Array, prefix: str) -> Weights:
    """Splits a parameter into the tensors of a checkpoint."""
    tensors = {}
    for source, at, _ in parameter.places(parameter.pieces):
        part = to_stored(source, unsliced(source, array[at].reshape(source.shape)))
        tensors[stored_name(source.name, prefix)] = np.ascontiguousarray(part)
    return tensors


def tensor_prefix(config_dict: Mapping[str, Any]) -> str:
    """Returns the prefix of the tensor names of a model with this config.json."""
    return "model.language_model." if "text_config" in config_dict else "model."


def stored_name(name: str, prefix: str) -> str:
    """Returns the name in a checkpoint; the LM head and the MTP layer have no prefix."""
    return name if name.startswith(("lm_head.", "mtp.")) else prefix + name


def _save_files(folder: Path, tensors: Weights, num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, folder / SINGLE_FILE)
        return
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::num_shards])
        save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
