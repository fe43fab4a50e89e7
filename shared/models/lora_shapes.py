"""Shapes of LoRA adapters for the parameters of a model.

A parameter concatenates modules, such as q, k and v: its parts. The arrays of an adapter follow the
parameter's stack: `a [layers, parts * rank, in]` and `b [layers, out, rank]`, with an axis of
experts after the layers for experts. Modules without an adapter have zeros.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32

from shared.models.parameter import CheckpointTensor, Parameter

RANK_ALIGNMENT = 16
"""Ranks in device memory are multiples of this."""

WEIGHT = ".weight"
MATRICES = (
    *("inputs", "out", "queries", "gate_up", "down", "router", "shared_gate_up", "shared_down"),
    *("kv_b", "latent_in", "latent_out", "parallel_gate_up", "parallel_down", "fc"),
)
"""Last names of parameters that may have adapters."""

BaseWeight = Callable[[CheckpointTensor], Float32[np.ndarray, "..."]]
"""Reads a tensor of the base model, dequantised; its slice, if it has one."""


class WeightReader(Protocol):
    """An opened checkpoint of the base model."""

    def load(self, parameter: Parameter, dtype: Any) -> np.ndarray:
        """Reads a parameter; see `Checkpoint.load`."""
        ...


@dataclass(frozen=True)
class Module:
    """A module of a parameter.

    Attributes:
      name: Name without prefix.
      tensor: Its weight.
      index: Layer, and expert if the parameter has them.
      first: First of its outputs in the parameter.
    """

    name: str
    tensor: CheckpointTensor
    index: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class AdapterShapes:
    """Shapes of the adapter arrays of a parameter, or of a rank's shard of it.

    Attributes:
      parameter: The parameter.
      rank: Columns of `b`, a multiple of `RANK_ALIGNMENT` on devices.
    """

    parameter: Parameter
    rank: int

    @property
    def stack(self) -> tuple[int, ...]:
        """Shape of the parameter as a stack of layers; an unstacked one is a stack of one."""
        return self.parameter.shape if self.parameter.stacked else (1, *self.parameter.shape)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Outputs of each part."""
        index = (0,) * (len(self.stack) - 2)
        first = [each for each in modules(self.parameter) if each.index == index]
        return tuple(each.tensor.taken_shape[0] for each in first)

    @property
    def arrays(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each array of `AdapterArrays`."""
        *lead, outputs, inputs = self.stack
        ranks = len(self.parts) * self.rank
        shapes = {"a": (ranks, inputs), "b": (outputs, self.rank), "scales": (ranks,)}
        return {name: (*lead, *x) for name, x in (shapes | {"factors": (outputs,)}).items()}

    def num_bytes(self, item_bytes: int) -> int:
        """Returns the bytes of one adapter; scales and factors are float32."""
        items = {"a": item_bytes, "b": item_bytes}
        return sum(items.get(name, 4) * math.prod(shape) for name, shape in self.arrays.items())


@dataclass(frozen=True)
class AdapterArrays:
    """Arrays of one adapter for one parameter; see `shared.spec.lora.AdapterWeights`."""

    a: Float32[np.ndarray, "*layers ranks inputs"]
    b: Float32[np.ndarray, "*layers outputs rank"]
    scales: Float32[np.ndarray, "*layers ranks"]
    factors: Float32[np.ndarray, "*layers outputs"]


def adaptable(wanted: Sequence[Parameter]) -> list[Parameter]:
    """Returns the parameters of decoder layers and of the MTP layer that may have adapters."""
    return [x for x in wanted if x.name.rpartition(".")[2] in MATRICES]


def padded_rank(rank: int) -> int:
    """Returns the rank in device memory."""
    return -(-rank // RANK_ALIGNMENT) * RANK_ALIGNMENT


def put_adapter(
    arrays: AdapterArrays,
    shapes: AdapterShapes,
    index: tuple[int, ...],
    first: int,
    a: Float32[np.ndarray, "rank inputs"],
    b: Float32[np.ndarray, "outputs rank"],
    scale: float,
) -> None:
    """Stores an adapter of the outputs from `first` on in each part that has some of them."""
    end = first + len(b)
    for part, (start, stop) in enumerate(_ranges(shapes.parts)):
        low, high = max(start, first), min(stop, end)
        if low < high:
            rows = slice(part * shapes.rank, part * shapes.rank + len(a))
            arrays.a[(*index, rows)] = a
            arrays.scales[(*index, rows)] = scale
            arrays.b[(*index, slice(low, high), slice(0, len(a)))] = b[low - first : high - first]


def _ranges(parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    ends = [*accumulate(parts)]
    return zip([0, *ends[:-1]], ends, strict=True)


def modules(parameter: Parameter) -> Iterator[Module]:
    """Yields the modules of a parameter that are stored as tensors of their own."""
    has_experts = len(parameter.shape) == 4
    for number, sources in enumerate(parameter.pieces):
        if not has_experts:
            yield from _in_order(sources, (number,))
            continue
        (whole, *shared), count = sources, sources[0].shape[0]
        each = len(whole.parts) // count
        for expert in range(count):
            own = whole.parts[expert * each : (expert + 1) * each]
            yield from _in_order(own, (number, expert))
        yield from _in_order(shared, (number, count))


def _in_order(tensors: Sequence[CheckpointTensor], index: tuple[int, ...]) -> Iterator[Module]:
    first = 0
    for each in tensors:
        yield Module(each.name.removesuffix(WEIGHT), each, index, first)
        first += each.taken_shape[0]


def base_weights(checkpoint: WeightReader | None) -> BaseWeight:
    """Returns the function that reads tensors of an opened base checkpoint.

    Args:
      checkpoint: The checkpoint; None if no adapter uses DoRA.
    """

    def read(tensor: CheckpointTensor) -> Float32[np.ndarray, "..."]:
        assert checkpoint is not None
        alone = Parameter(tensor.name, tensor.taken_shape, ((tensor,),), stacked=False)
        return checkpoint.load(alone, np.float32)

    return read
