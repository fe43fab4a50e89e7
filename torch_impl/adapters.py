"""LoRA adapters of a model on a device: load steps, and layers with the adapters of a pass."""

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Int, Int32
from torch import Tensor

from shared.boundary.adapter_pool import OUTPUT_AXES, AdapterPoolSpec
from shared.boundary.program import Program
from shared.boundary.tp_group import TPGroup
from shared.models.groups import LayerPlace
from torch_impl.model_weights import Layer
from torch_impl.ops.attention.latent_attention import LatentWeights
from torch_impl.ops.gemm.linear import Matrix
from torch_impl.ops.gemm.lora import AdapterWeights, RowAdapters
from torch_impl.ops.moe.experts import ParallelMLP

Adapters = Mapping[str, AdapterWeights]
"""Adapters of each parameter that has some, by name; stacks of layers."""

NO_ADAPTERS: Adapters = MappingProxyType({})


def new_adapters(
    pool: AdapterPoolSpec | None, num_ranks: int, dtype: torch.dtype, device: torch.device
) -> Adapters:
    """Returns the empty adapter slots of a rank; scales and factors are float32."""
    if pool is None:
        return NO_ADAPTERS

    def empty(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        return torch.zeros((pool.num_slots, *shape), dtype=kind, device=device)

    return {
        name: AdapterWeights(
            **{
                x: empty(shape, dtype if x in ("a", "b") else torch.float32)
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
    slot: Int[Tensor, " 1"],
    words: Int32[Tensor, " words"],
) -> None:
    """Writes the layers of a load step into an adapter slot, with the outputs of this rank."""
    for array, span in pool.arrays(program):
        memory = getattr(adapters[array.parameter], array.name)[:, array.layers]
        values = words[span].view(memory.dtype).view(array.shape)
        if not group.is_single and array.name in OUTPUT_AXES:
            axis = OUTPUT_AXES[array.name]
            runs = pool.runs(array.parameter, group.rank, group.count)
            values = torch.cat([values.narrow(axis, a, end - a) for a, end in runs], axis)
        # Slot 0 is that of an empty plan at startup, before any adapter is loaded.
        memory.index_copy_(0, (slot.long() - 1).clamp(min=0), values[None])


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
            if isinstance(value, Matrix):
                changes[field.name] = with_row_adapters(value, name, index, adapters, slots)
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


def with_row_adapters(
    matrix: Matrix,
    name: str,
    index: int,
    adapters: Adapters,
    slots: Int[Tensor, " R"] | None,
) -> Matrix:
    """Returns a matrix with its adapters of a pass, if it has some.

    Args:
      matrix: The matrix.
      name, index: Name of its parameter, and its layer in the stack.
      adapters, slots: See `with_adapters`.
    """
    if slots is None or name not in adapters:
        return matrix
    return replace(matrix, lora=RowAdapters(adapters[name].at(index), slots))
