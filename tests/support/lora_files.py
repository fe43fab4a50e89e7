"""Random LoRA adapters in peft's files, and base checkpoints with an adapter merged."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from shared.boundary.adapter_pool import AdapterPoolSpec
from shared.boundary.backend import BackendLimits, StepPlan
from shared.boundary.buffers import empty_plan
from shared.boundary.transfer_spec import STEP_BYTES
from shared.engine.adapter_slots import HostAdapter
from shared.engine.request import AdapterVersion
from shared.models.checkpoint import open_checkpoint
from shared.models.families import config_from_folder
from shared.models.lora import Adapter
from shared.models.lora_shapes import AdapterShapes, adaptable, base_weights, padded_rank
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
    weights = load_file(base / "model.safetensors")
    shapes = {name: weights[f"{name}.weight"].shape for name in modules}
    how = {"rank": rank, "alpha": alpha, "seed": seed, "edit": edit}
    return write_random_adapter(folder, shapes, **how, **further)


def write_random_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    rank: int,
    alpha: float,
    seed: int,
    dtype: type[np.floating] = np.float32,
    edit: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
    **further: Any,
) -> Path:
    """Writes an adapter of modules with these outputs and inputs; see `write_adapter`."""
    folder.mkdir(parents=True, exist_ok=True)
    random, tensors = np.random.default_rng(seed), dict[str, np.ndarray]()
    for name, (outputs, inputs) in shapes.items():
        for kind, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = (random.normal(size=shape) / np.sqrt(shape[1])).astype(dtype)
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


def adapter_weights(
    folders: Iterable[Path], base: Path, rank: int = 0, count: int = 1
) -> dict[str, AdapterWeights]:
    """Returns adapters in the slots 1, 2, ..., or the shards of one of some TP ranks."""
    opened, read = [Adapter(folder) for folder in folders], base_weights(open_checkpoint(base))
    pool, found = _pool(opened, base, len(opened)), {}
    for name, shapes in pool.local(rank, count).items():
        each = [adapter.arrays(shapes, read) for adapter in opened]
        stacked = {x: np.stack([getattr(y, x) for y in each]) for x in shapes.arrays}
        found[name] = AdapterWeights(**stacked, parts=shapes.parts)
    return found


def adapter_pool(
    folders: Iterable[Path], base: Path, num_slots: int = 0, step_bytes: int = STEP_BYTES
) -> AdapterPoolSpec:
    """Returns a pool for some adapters, by default with a slot for each."""
    opened = [Adapter(folder) for folder in folders]
    return replace(_pool(opened, base, num_slots or len(opened)), step_bytes=step_bytes)


def host_adapters(
    pool: AdapterPoolSpec, folders: Mapping[str, Path], base: Path
) -> list[HostAdapter]:
    """Returns adapters in host memory."""
    read, found = base_weights(open_checkpoint(base)), []
    for name, folder in folders.items():
        adapter = Adapter(folder)
        arrays = {x.parameter.name: adapter.arrays(x, read) for x in pool.shapes}
        version = AdapterVersion(name, adapter.version)
        found.append(HostAdapter(version, str(folder), pool.pack(arrays)))
    return found


def load_plans(capacity: BackendLimits, adapter: HostAdapter, slot: int) -> Iterator[StepPlan]:
    """Yields the load steps of an adapter."""
    assert capacity.adapters is not None
    for program, words in zip(capacity.adapters.programs, adapter.words, strict=True):
        plan = empty_plan(program, capacity)
        plan.work.words[:], plan.adapters[0] = words, slot
        yield plan


def _pool(opened: Iterable[Adapter], base: Path, num_slots: int) -> AdapterPoolSpec:
    config = config_from_folder(base)
    wanted = adaptable(parameters(config, config.has_mtp))
    rank = padded_rank(max(each.max_rank for each in opened))
    changed = [x for x in wanted if any(each.adapts(x) for each in opened)]
    return AdapterPoolSpec(num_slots, tuple(AdapterShapes(x, rank) for x in changed), "float32")


def batch_adapters(folders: Iterable[Path], base: Path, slots: Iterable[int]) -> BatchAdapters:
    """Returns adapters in the slots 1, 2, ... and the slot of each request."""
    return BatchAdapters(adapter_weights(folders, base), np.array([*slots]))
