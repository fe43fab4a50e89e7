"""LoRA adapters in training: trained matrices A and B, the adapted model, and peft's files.

A pass runs over the merged weights `W + s B A`, so the forward pass and the losses are those of a
model. The gradient of a merged weight has the size of the weight.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax import lax
from safetensors.numpy import save_file

from jax_impl.training import losses
from jax_impl.training.examples import TrainingBatch
from jax_impl.training.loop import Metrics
from jax_impl.training.nnx_modules import ModelModule, named
from jax_impl.training.tasks import Precision, Target, Trainable, batch_arrays, trainable
from shared.models.file_kind import ADAPTER_FILE
from shared.models.lora import ADAPTER_WEIGHTS, ROOT, A, B
from shared.models.lora_shapes import Module, adaptable, modules
from shared.models.parameter import Parameter
from shared.models.saving import stored_name

ALL_LINEAR = "all-linear"
"""Target modules that select every linear layer, as in peft."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Settings of a new adapter.

    Attributes:
      rank, alpha: Rank of every module, and the numerator of the multiplier `alpha / rank`.
      target_modules: Last words of the names of the adapted modules, or `ALL_LINEAR` alone.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]

    @property
    def scale(self) -> float:
        """Multiplier of `B A x`."""
        return self.alpha / self.rank

    def adapts(self, word: str) -> bool:
        """Returns True for the last word of an adapted module's name."""
        return word in self.target_modules or ALL_LINEAR in self.target_modules


@dataclass(frozen=True)
class LoraPart:
    """Modules of one kind in the layers of a parameter, such as all `q_proj`.

    Attributes:
      parameter: The parameter that contains them.
      modules: One module of each layer.
    """

    parameter: Parameter
    modules: tuple[Module, ...]

    @property
    def word(self) -> str:
        """Last word of the modules' names."""
        return self.modules[0].name.rpartition(".")[2]

    @property
    def key(self) -> str:
        """Name of the part among all parts of a model."""
        return f"{self.parameter.name}.{self.word}"

    @property
    def outputs(self) -> slice:
        """Outputs of the parameter that belong to the part."""
        first = self.modules[0].first
        return slice(first, first + self.modules[0].tensor.shape[0])


def parts_of(wanted: Sequence[Parameter], settings: LoraSettings) -> list[LoraPart]:
    """Returns the adapted parts of a model.

    Raises:
      ValueError: A target module does not exist, or is stored in another order than it is used.
    """
    every = [part for parameter in adaptable(wanted) for part in _parts(parameter)]
    words = {part.word for part in every}
    if unknown := sorted({*settings.target_modules} - words - {ALL_LINEAR}):
        raise ValueError(
            f"--lora-target-modules {unknown[0]} is not a linear layer of the model; use "
            f"{ALL_LINEAR}, or some of {', '.join(sorted(words))}"
        )
    found = [part for part in every if settings.adapts(part.word)]
    for part in found:
        if part.modules[0].tensor.ranges is not None:
            raise ValueError(
                f"training an adapter of {part.word} of this model is not supported; leave it out "
                "of --lora-target-modules"
            )
    return found


def _parts(parameter: Parameter) -> Iterator[LoraPart]:
    found: dict[int, list[Module]] = {}
    for module in modules(parameter):
        found.setdefault(module.first, []).append(module)
    for layers in found.values():
        yield LoraPart(parameter, tuple(layers))


class LoraAdapter(nnx.Module):
    """Trained matrices by the key of their part: `a [layers, rank, in]`, `b [layers, out, rank]`.

    A new adapter changes nothing: A is random and B zero.
    """

    def __init__(self, parts: Sequence[LoraPart], settings: LoraSettings, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.a, self.b = nnx.Dict(), nnx.Dict()
        for part in parts:
            layers, (outputs, inputs) = len(part.modules), part.modules[0].tensor.shape
            limit = 1 / math.sqrt(inputs)  # as in peft: Kaiming uniform with a = sqrt(5)
            values = rng.uniform(-limit, limit, (layers, settings.rank, inputs))
            self.a[part.key] = nnx.Param(jnp.asarray(values, jnp.float32))
            self.b[part.key] = nnx.Param(jnp.zeros((layers, outputs, settings.rank), jnp.float32))


def adapted(
    model: ModelModule, adapter: LoraAdapter, parts: Sequence[LoraPart], scale: float
) -> ModelModule:
    """Returns the model with the adapter merged, in float32."""
    arrays = named(model)
    for part in parts:
        a, b = adapter.a[part.key][...], adapter.b[part.key][...]
        change = scale * jnp.einsum("lor,lri->loi", b, a, precision=lax.Precision.HIGHEST)
        whole = arrays[part.parameter.name].astype(jnp.float32)
        change = change if part.parameter.stacked else change[0]
        arrays[part.parameter.name] = whole.at[..., part.outputs, :].add(change)
    return ModelModule(arrays)


def adapter_task(
    target: Target,
    parts: Sequence[LoraPart],
    settings: LoraSettings,
    seed: int,
    mtp_weight: float,
    depth: int,
    precision: Precision,
) -> Trainable[LoraAdapter]:
    """Returns the task of training an adapter of a target, and of its MTP layer if it is loaded.

    The parts are those of `parts_of`; the MTP layer learns `depth` draft steps.
    """

    def loss(
        adapter: LoraAdapter, model: ModelModule, batch: TrainingBatch, key: Any
    ) -> tuple[Any, Metrics]:
        merged = adapted(model, adapter, parts, settings.scale)
        tokens, loss_mask = batch_arrays(batch)
        return losses.adapter_loss(
            target.config,
            merged,
            tokens,
            loss_mask,
            precision.dtype,
            mtp_weight,
            depth,
            precision.remat,
        )

    return trainable(LoraAdapter(parts, settings, seed), target.model, loss)


def save_adapter(
    folder: Path,
    target: Path,
    prefix: str,
    adapter: LoraAdapter,
    parts: Sequence[LoraPart],
    settings: LoraSettings,
) -> None:
    """Writes an adapter in peft's format, in bfloat16.

    The config names the folder of the target. The prefix begins the base model's tensor names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for part in parts:
        for kind, stack in ((A, adapter.a), (B, adapter.b)):
            values = np.asarray(stack[part.key][...]).astype(ml_dtypes.bfloat16)
            for module in part.modules:
                name = f"{ROOT}{stored_name(module.name, prefix)}.{kind}"
                tensors[name] = np.ascontiguousarray(values[module.index[0]])
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(target),
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": sorted({part.word for part in parts}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    (folder / ADAPTER_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
