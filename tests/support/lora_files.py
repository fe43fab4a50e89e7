"""Random LoRA adapters in peft's files, and base checkpoints with an adapter merged."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from shared.models.adapter_pool import AdapterPool, AdapterStack
from shared.models.checkpoint import open_checkpoint
from shared.models.families import config_from_folder
from shared.models.lora import Adapter
from shared.models.lora_shapes import adaptable, base_weights, padded_rank
from shared.models.parameter import Parameter
from shared.models.parameters import parameters
from shared.models.stored_tensor import without_prefix
from shared.spec.lora import AdapterWeights, BatchAdapters

ROOT = "base_model.model."


def write_adapter(
    folder: Path,
    base: Path,
    modules: Iterable[str],
    *,
    rank: int = 4,
    alpha: float = 6,
    seed: int = 0,
    edit: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
    **further: Any,
) -> Path:
    """Writes an adapter of some modules of a checkpoint, by their tensor names without `.weight`.

    Args:
      folder: Folder to write.
      base: Folder of the base checkpoint.
      modules: Names of the modules.
      rank, alpha: Settings of all modules.
      seed: Seed of the values.
      edit: Changes the tensors before they are written.
      further: Further fields of `adapter_config.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random, weights = np.random.default_rng(seed), load_file(base / "model.safetensors")
    tensors: dict[str, np.ndarray] = {}
    for name in modules:
        outputs, inputs = weights[f"{name}.weight"].shape
        for kind, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = (random.normal(size=shape) / np.sqrt(shape[1])).astype(np.float32)
            tensors[f"{ROOT}{name}.lora_{kind}.weight"] = values
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, **further}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_merged(folder: Path, base: Path, adapter: Path) -> Path:
    """Writes the base checkpoint with an adapter of plain modules merged into its weights."""
    shutil.copytree(base, folder)
    config: Mapping[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(base / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    scale = np.float32(config["lora_alpha"] / config["r"])
    for key, a in tensors.items():
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix(ROOT).removesuffix(".lora_A.weight")
            b = tensors[key.replace("lora_A", "lora_B")]
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + scale * (b @ a)
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors")
    return folder


def module_names(base: Path, wanted: Iterable[Parameter]) -> list[str]:
    """Returns the modules of a checkpoint that have adaptable weights of their own."""
    sources = {x.name for p in adaptable([*wanted]) for s in p.sources for x in (s, *s.parts)}
    stored = load_file(base / "model.safetensors")
    return [
        name.removesuffix(".weight")
        for name, values in stored.items()
        if name.endswith(".weight") and without_prefix(name) in sources and values.ndim == 2
    ]


def adapter_stacks(
    folders: Iterable[Path], base: Path, rank: int = 0, count: int = 1
) -> dict[str, AdapterStack]:
    """Returns adapters in the slots 1, 2, ..., or the shards of one of some TP ranks."""
    loaded = {str(i): Adapter(folder) for i, folder in enumerate(folders)}
    pool = AdapterPool(loaded, padded_rank(max(each.max_rank for each in loaded.values())))
    wanted = parameters(config_from_folder(base), False)
    shards = [each.shard(rank, count) for each in wanted]
    return pool.stacks(shards, base_weights(open_checkpoint(base)))


def batch_adapters(folders: Iterable[Path], base: Path, slots: Iterable[int]) -> BatchAdapters:
    """Returns adapters in the slots 1, 2, ... and the slot of each request."""
    stacks = adapter_stacks(folders, base).items()
    weights = {name: AdapterWeights(**vars(stack)) for name, stack in stacks}
    return BatchAdapters(weights, np.array([*slots]))
