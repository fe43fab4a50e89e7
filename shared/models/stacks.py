"""Constructors of parameters: single tensors, and stacks of the tensors of several layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from shared.models.parameter import CheckpointTensor, Parameter
from shared.models.sharded_range import ShardedRange, vocab_section

BIAS = "_bias"
"""Suffix of the parameter name of a weight's bias."""

IN_ORDER: Mapping[str, tuple[tuple[int, int], ...]] = MappingProxyType({})
"""Order of the outputs of stored tensors: none differs."""


@dataclass(frozen=True)
class StackSettings:
    """Settings of a model that determine the parameters of its mixers and MLPs.

    Attributes:
      hidden: Width of the residual stream.
      inputs: Input width of a mixer's input projection, usually `hidden`.
      norm_centre: Constant added to the stored weight of a norm.
      fused_qkv, fused_gate_up: See `ModelConfig`.
    """

    hidden: int
    inputs: int
    norm_centre: float
    fused_qkv: bool
    fused_gate_up: bool


def bias(
    name: str,
    layers: Sequence[str],
    weights: Mapping[str, tuple[int, ...]],
    sections: tuple[ShardedRange, ...],
) -> Parameter:
    """Returns the bias of a stack of weights."""
    tensors = {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in weights.items()}
    return stack(f"{name}{BIAS}", layers, tensors, sections=sections, axis=-1)


def single(name: str, source: str, shape: tuple[int, ...]) -> Parameter:
    """Returns a parameter that is one tensor of the checkpoint."""
    return Parameter(name, shape, ((CheckpointTensor(source, shape),),), stacked=False)


def by_columns(name: str, source: str, shape: tuple[int, ...]) -> Parameter:
    """Returns an unstacked column-parallel matrix."""
    return replace(single(name, source, shape), sections=(ShardedRange(shape[0]),))


def head_of(name: str, source: str, shape: tuple[int, ...]) -> Parameter:
    """Returns the weight of an LM head, sharded over the vocabulary."""
    return replace(single(name, source, shape), sections=(vocab_section(shape[0]),))


def single_norm(name: str, source: str, width: int, centre: float) -> Parameter:
    """Returns the scale of an unstacked norm."""
    return replace(single(name, source, (width,)), float32=True, centre=centre)


def norms_of(name: str, layers: Sequence[str], source: str, width: int, centre: float) -> Parameter:
    """Returns the scales of a norm in each layer."""
    return replace(stack(name, layers, {source: (width,)}), float32=True, centre=centre)


def stack(
    name: str,
    layers: Sequence[str],
    tensors: Mapping[str, tuple[int, ...]],
    shape: tuple[int, ...] | None = None,
    float32: bool = False,
    sections: tuple[ShardedRange, ...] = (),
    axis: int = -2,
    order: Mapping[str, tuple[tuple[int, int], ...]] = IN_ORDER,
) -> Parameter:
    """Returns a parameter that concatenates `tensors` on axis 0 for each layer, reshaped to
    `shape`.

    `order` has the ranges of a tensor's outputs, if the parameter has them in another order.
    """
    if shape is None:
        rows = sum(s[0] for s in tensors.values())
        shape = (rows, *next(iter(tensors.values()))[1:])
    pieces = tuple(
        tuple(
            CheckpointTensor(f"{layer}.{tensor}", shape_of, ranges=order.get(tensor))
            for tensor, shape_of in tensors.items()
        )
        for layer in layers
    )
    return Parameter(
        name,
        (len(layers), *shape),
        pieces,
        stacked=True,
        float32=float32,
        axis=axis,
        sections=sections,
    )
