"""LoRA adapters of a model on a device, and layers with the adapters of a pass."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, Shaped

from jax_impl.model_weights import Layer
from jax_impl.ops.attention.latent_attention import LatentWeights
from jax_impl.ops.gemm.linear import Matrix
from jax_impl.ops.gemm.lora import AdapterWeights, RowAdapters
from jax_impl.ops.moe.experts import ParallelMLP
from shared.models.adapter_pool import AdapterStack
from shared.models.groups import LayerPlace

Adapters = Mapping[str, AdapterWeights]
"""Adapters of each parameter that has some, by name; stacks of layers."""

NO_ADAPTERS: Adapters = MappingProxyType({})


def adapters_on(
    stacks: Mapping[str, AdapterStack], dtype: np.dtype | type, device: jax.Device
) -> Adapters:
    """Copies a rank's adapters to its device; scales and factors are float32."""

    def of(array: Shaped[np.ndarray, "..."], kind: np.dtype | type = np.float32) -> jax.Array:
        return jax.device_put(array.astype(kind), device)

    return {
        name: AdapterWeights(of(x.a, dtype), of(x.b, dtype), of(x.scales), of(x.factors), x.parts)
        for name, x in stacks.items()
    }


def with_adapters(
    layer: Layer, at: LayerPlace, adapters: Adapters, slots: Int[jax.Array, " R"] | None
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
        for field in record._fields:
            value, name = getattr(record, field), f"{stack}{field}"
            if isinstance(value, Matrix) and name in adapters:
                own = RowAdapters(adapters[name].at(index), slots)
                changes[field] = value._replace(lora=own)
            elif isinstance(value, LatentWeights):
                changes[field] = adapted(value, stack, index)
            elif isinstance(value, ParallelMLP):
                changes[field] = adapted(value, f"{stack}parallel_", index)
        return record._replace(**changes)

    parallel = None if at.parallel is None else f"{at.parallel}."
    return layer._replace(
        mixer=adapted(layer.mixer, f"{at.mixer}.", at.mixer_index),
        parallel=adapted(layer.parallel, parallel, at.parallel_index),
        feed=adapted(layer.feed, f"{at.mlp}.", at.mlp_index),
    )
