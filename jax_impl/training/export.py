"""Export of trained parameters as Hugging Face checkpoints, in bfloat16."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped
from safetensors import deserialize
from safetensors.numpy import save_file

from jax_impl.training.nnx_modules import DraftModel, ModelModule, Mtp, named
from shared.drafts.checkpoint import head_parameters
from shared.drafts.config import DraftConfig
from shared.models.checkpoint import DTYPES, INDEX_FILE, SINGLE_FILE
from shared.models.checkpoint import Weights as Tensors
from shared.models.config import ModelConfig
from shared.models.config_fields import read_json
from shared.models.families import config_from_dict
from shared.models.formats import fp8
from shared.models.parameter import Parameter
from shared.models.parameters import parameters
from shared.models.saving import save_checkpoint, split

Json = Mapping[str, Any]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
TEMPLATES = "additional_chat_templates"
KEPT_IN_FLOAT32 = ("a_log", "dt_bias")
MTP_FILE = "model-mtp.safetensors"
STORED = {
    **DTYPES,
    fp8.STORED: np.dtype(ml_dtypes.float8_e4m3fn),
    "F64": np.dtype(np.float64),
    "BOOL": np.dtype(np.bool_),
    **{f"{kind}{8 * n}": np.dtype(f"{kind.lower()}{n}") for kind in "IU" for n in (1, 2, 4, 8)},
}
"""NumPy types by the dtype names of safetensors."""


def save_model(
    folder: Path, config_json: Json, model: ModelModule, tokenizer: Path, num_shards: int
) -> None:
    """Writes a model and its tokenizer as a folder that the server and transformers can load.

    Args:
      config_json: Contents of config.json.
      tokenizer: Folder from which the tokenizer files are copied.
      num_shards: Number of safetensors files.
    """
    config = config_from_dict(config_json)
    arrays = arrays_of(model)
    wanted = parameters(config, "mtp.fc" in arrays)
    weights = {p.name: _stored(p, arrays[p.name]) for p in wanted}
    save_checkpoint(folder, config_json, weights, num_shards)
    _write_json(folder / "generation_config.json", {"eos_token_id": list(config.eos_ids)})
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file() and tokenizer.resolve() != folder.resolve():
            shutil.copyfile(tokenizer / name, folder / name)
    if (tokenizer / TEMPLATES).is_dir() and tokenizer.resolve() != folder.resolve():
        shutil.copytree(tokenizer / TEMPLATES, folder / TEMPLATES, dirs_exist_ok=True)


def save_head(folder: Path, config_json: Json, config: DraftConfig, head: DraftModel) -> None:
    """Writes a draft head with its own checkpoint."""
    arrays = arrays_of(head)
    tensors: Tensors = {}
    in_speculators = bool(config_json.get("speculators_model_type"))
    # Some tensors have two names; in the speculators format they begin as in a whole model.
    for parameter in head_parameters(config, ("layers.0.",) if in_speculators else None):
        stored = _stored(parameter, arrays[parameter.name])
        tensors |= split(parameter, stored, "")
    if config.has_draft_vocab:
        ids = np.asarray(head.draft_ids[...], np.int64)
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(config.layer.vocab), ids)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config_json)
    save_file(tensors, folder / SINGLE_FILE)


def save_mtp(folder: Path, target: Path, config: ModelConfig, layer: Mtp) -> None:
    """Writes a copy of the target's files that contains this MTP layer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: Tensors = {}
    arrays = {f"mtp.{name}": array for name, array in arrays_of(layer).items()}
    for parameter in parameters(config, with_mtp=True):
        if parameter.name.startswith("mtp."):
            stored = _stored(parameter, arrays[parameter.name])
            tensors |= split(parameter, stored, "")
    for file in sorted(target.iterdir()):
        if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX_FILE:
            shutil.copyfile(file, folder / file.name)
    if (target / TEMPLATES).is_dir():
        shutil.copytree(target / TEMPLATES, folder / TEMPLATES, dirs_exist_ok=True)
    _write_json(folder / "config.json", _with_mtp(read_json(target / "config.json")))
    if (target / SINGLE_FILE).is_file():
        save_file({**_without_mtp(target / SINGLE_FILE), **tensors}, folder / SINGLE_FILE)
    else:
        _extend_shards(folder, target, tensors)


def arrays_of(module: ModelModule | DraftModel | Mtp) -> Tensors:
    """Copies the parameters of `named` to host memory."""
    return {name: np.asarray(array) for name, array in named(module).items()}


def _stored(parameter: Parameter, array: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    """Returns the stored form of a parameter; subtracts the norm offset that loading adds."""
    if parameter.name.endswith(KEPT_IN_FLOAT32):
        return array.astype(np.float32)
    return (array - np.float32(parameter.centre)).astype(ml_dtypes.bfloat16)


def _with_mtp(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config", config)
    text["mtp_num_hidden_layers"] = 1
    return config


def _without_mtp(file: Path) -> Tensors:
    """Returns the tensors of a file without those of an MTP layer, in their stored types."""
    stored = deserialize(file.read_bytes())  # `load_file` does not support FP8
    return {
        name: np.frombuffer(each["data"], STORED[each["dtype"]]).reshape(each["shape"])
        for name, each in stored
        if not name.startswith("mtp.")
    }


def _extend_shards(folder: Path, target: Path, tensors: Tensors) -> None:
    """Copies the shards without their MTP tensors and adds a shard with the new ones.

    The shards get new names, because an index may name files outside its folder.
    """
    weight_map = read_json(target / INDEX_FILE)["weight_map"]
    kept_map: dict[str, str] = {}
    for number, shard in enumerate(sorted(set(weight_map.values())), start=1):
        if kept := _without_mtp(target / shard):
            file = f"model-{number:05}.safetensors"
            save_file(kept, folder / file)
            kept_map |= dict.fromkeys(kept, file)
    save_file(tensors, folder / MTP_FILE)
    index = {"metadata": {}, "weight_map": kept_map | dict.fromkeys(tensors, MTP_FILE)}
    _write_json(folder / INDEX_FILE, index)


def _write_json(path: Path, contents: Json) -> None:
    path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
