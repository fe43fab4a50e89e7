"""LoRA adapters of a model on a device, and layers with the adapters of a pass."""

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from shared.models.adapter_pool import AdapterStack
from shared.models.groups import LayerPlace
from torch_impl.model_weights import Layer
from torch_impl.ops.attention.latent_attention import LatentWeights
from torch_impl.ops.gemm.linear import Matrix
from torch_impl.ops.gemm.lora import AdapterWeights, RowAdapters
from torch_impl.ops.moe.experts import ParallelMLP

Adapters = Mapping[str, AdapterWeights]
"""Adapters of each parameter that has some, by name; stacks of layers."""

NO_ADAPTERS: Adapters = MappingProxyType({})


def adapters_on(
    stacks: Mapping[str, AdapterStack], dtype: torch.dtype, device: torch.device
) -> Adapters:
    """Copies a rank's adapters to its device; scales and factors are float32."""

    def of(array: Shaped[np.ndarray, "..."], kind: torch.dtype = torch.float32) -> Tensor:
        return torch.from_numpy(array).to(device, kind)

    return {
        name: AdapterWeights(of(x.a, dtype), of(x.b, dtype), of(x.scales), of(x.factors), x.parts)
        for name, x in stacks.items()
    }


def with_adapters(
    layer: Layer, at: LayerPlace, adapters: Adapters, slots: Int[Tensor, " R"] | None
) -> Layer:
    """Returns a layer with the adapters of a pass.

    Args:
      layer, at: The layer, and its place in the stacks.
      adapters: Adapters of the model.
      slots: Adapter slot of each row, 0 for none; None for a pass without adapters.
    """
    if slots is None:
        return layer

    def adapted(record: Any, stack: str | None, index: int) -> Any:
        if record is None or stack is None:
            return record
        changes: dict[str, Any] = {}
        for field in fields(record):
            value, name = getattr(record, field.name), f"{stack}{field.name}"
            if isinstance(value, Matrix) and name in adapters:
                own = RowAdapters(adapters[name].at(index), slots)
                changes[field.name] = replace(value, lora=own)
            elif isinstance(value, LatentWeights):
                changes[field.name] = adapted(value, stack, index)
            elif isinstance(value, ParallelMLP):
                changes[field.name] = adapted(value, f"{stack}parallel_", index)
        return replace(record, **changes)

    parallel = None if at.parallel is None else f"{at.parallel}."
    return replace(
        layer,
        mixer=adapted(layer.mixer, f"{at.mixer}.", at.mixer_index),
        parallel=adapted(layer.parallel, parallel, at.parallel_index),
        feed=adapted(layer.feed, f"{at.mlp}.", at.mlp_index),
    )
