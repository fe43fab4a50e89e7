"""LoRA adapters of a model on a device: load steps, and layers with the adapters of a pass."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int, Int32

from jax_impl.model_weights import Layer
from jax_impl.ops.attention.latent_attention import LatentWeights
from jax_impl.ops.collectives.all_gather import number
from jax_impl.ops.gemm.linear import Matrix
from jax_impl.ops.gemm.lora import AdapterWeights, PassAdapters, RowAdapters
from jax_impl.ops.moe.experts import ParallelMLP
from shared.boundary.adapter_pool import OUTPUT_AXES, AdapterPoolSpec
from shared.boundary.program import Program
from shared.boundary.tp_group import TPGroup
from shared.models.groups import LayerPlace

Adapters = Mapping[str, AdapterWeights]
"""Adapters of each parameter that has some, by name; stacks of layers."""

NO_ADAPTERS: Adapters = {}


def new_adapters(pool: AdapterPoolSpec | None, num_ranks: int, dtype: np.dtype | type) -> Adapters:
    """Returns the empty adapter slots of a rank; scales and factors are float32."""
    if pool is None:
        return NO_ADAPTERS

    def empty(shape: tuple[int, ...], kind: np.dtype | type) -> jax.Array:
        return jnp.zeros((pool.num_slots, *shape), kind)

    return {
        name: AdapterWeights(
            **{
                x: empty(shape, dtype if x in ("a", "b") else np.float32)
                for x, shape in each.arrays.items()
            },
            parts=each.parts,
        )
        for name, each in pool.local(0, num_ranks).items()
    }


def load(
    adapters: Adapters,
    pool: AdapterPoolSpec,
    group: TPGroup,
    program: Program,
    slot: Int[jax.Array, " 1"],
    words: Int32[jax.Array, " words"],
) -> Adapters:
    """Writes the layers of a load step into an adapter slot, with the outputs of each rank."""
    found = dict(adapters)
    for array, span in pool.arrays(program):
        weights = found[array.parameter]
        memory = getattr(weights, array.name)
        values = lax.bitcast_convert_type(words[span], memory.dtype).reshape(array.shape)
        if not group.is_single and array.name in OUTPUT_AXES:
            runs = [pool.runs(array.parameter, i, group.count) for i in range(group.count)]
            outputs = np.stack([np.concatenate([np.arange(a, end) for a, end in x]) for x in runs])
            own = jnp.asarray(outputs)[number(group)]
            values = jnp.take(values, own, axis=OUTPUT_AXES[array.name])
        first = (slot[0] - 1, array.layers.start, *[0] * (values.ndim - 1))
        memory = lax.dynamic_update_slice(memory, values[None], first)
        found[array.parameter] = weights._replace(**{array.name: memory})
    return found


def with_adapters(
    layer: Layer, at: LayerPlace, adapters: Adapters, slots: PassAdapters | None
) -> Layer:
    """Returns a layer with the adapters of a pass.

    Args:
      layer, at: The layer, and its place in the stacks.
      adapters: Adapters of the model.
      slots: Adapters of the rows; None for a pass without adapters.
    """
    if slots is None:
        return layer

    def adapted(record: Any, stack: str | None, index: int) -> Any:
        if record is None or stack is None:
            return record
        changes: dict[str, Any] = {}
        for field in record._fields:
            value, name = getattr(record, field), f"{stack}{field}"
            if isinstance(value, Matrix):
                changes[field] = with_row_adapters(value, name, index, adapters, slots)
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


def with_row_adapters(
    matrix: Matrix,
    name: str,
    index: int,
    adapters: Adapters,
    slots: PassAdapters | None,
) -> Matrix:
    """Returns a matrix with its adapters of a pass, if it has some.

    Args:
      matrix: The matrix.
      name, index: Name of its parameter, and its layer in the stack.
      adapters, slots: See `with_adapters`.
    """
    if slots is None or name not in adapters:
        return matrix
    before = itertools.takewhile(lambda other: other != name, adapters)
    counter = sum(adapters[other].a.shape[1] for other in before) + index
    lora = RowAdapters(adapters[name], slots.slots, index, slots.arrivals, counter)
    return matrix._replace(lora=lora)
