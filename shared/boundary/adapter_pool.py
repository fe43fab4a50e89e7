"""Adapter pool: LoRA adapters in the slots of device memory, and the load steps that write them.

A load step writes some layers of some parameters of one adapter. They travel as int32 words,
bit-cast, with the outputs of all TP ranks, and each rank stores its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from jaxtyping import Int32

from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.boundary.transfer_spec import STEP_BYTES, WORD_BYTES, ExportKV, ImportKV
from shared.models.cache_spec import ITEM_BYTES
from shared.models.lora_shapes import AdapterArrays, AdapterShapes
from shared.models.mtp import MTP
from shared.spec.draft_tree import TreeShape

WORDS = "adapter_words"
"""Field of a load step's plan."""

OUTPUT_AXES = {"b": -2, "factors": -1}
"""Axis of the outputs in each array that is sharded."""


@dataclass(frozen=True)
class AdapterArray:
    """Layers of one array of an adapter.

    Attributes:
      parameter: Name of the parameter.
      name: Name of the array in `AdapterArrays`.
      dtype: Stored dtype.
      layers: The layers in the parameter's stack.
      shape: Shape of these layers, with the outputs of all ranks.
    """

    parameter: str
    name: str
    dtype: str
    layers: slice
    shape: tuple[int, ...]

    @property
    def words(self) -> int:
        """Number of int32 words."""
        return prod(self.shape) * ITEM_BYTES[self.dtype] // WORD_BYTES


@dataclass(frozen=True)
class AdapterPoolSpec:
    """Adapter slots of a server, and the parameters that adapters may change.

    Attributes:
      num_slots: Adapter slots besides slot 0, which means none.
      shapes: Shapes of one adapter for each parameter, with the outputs of all ranks.
      dtype: Dtype of the model.
      step_bytes: Maximum bytes of a load step of more than one layer; see
        `transfer_spec.STEP_BYTES`.
    """

    num_slots: int
    shapes: tuple[AdapterShapes, ...]
    dtype: str
    step_bytes: int = STEP_BYTES

    @property
    def step_kinds(self) -> tuple[StepKind, ...]:
        """Kinds of steps with rows that have adapters: prefill and decode, which run the target.

        Steps that only draft are included if the MTP layer has adapters.
        """
        adapts_mtp = any(x.parameter.name.startswith(MTP) for x in self.shapes)
        return (StepKind.PREFILL, StepKind.DECODE, *([StepKind.DRAFT] if adapts_mtp else []))

    def local(self, tp_rank: int, count: int) -> dict[str, AdapterShapes]:
        """Returns the shapes of one of `count` TP ranks, by parameter."""
        return {
            x.parameter.name: AdapterShapes(x.parameter.shard(tp_rank, count), x.rank)
            for x in self.shapes
        }

    def runs(self, parameter: str, tp_rank: int, count: int) -> tuple[tuple[int, int], ...]:
        """Returns the ranges (first, end) of the outputs of a parameter that one of `count` TP
        ranks stores.
        """
        whole = next(x.parameter for x in self.shapes if x.parameter.name == parameter)
        shard = whole.shard(tp_rank, count)
        return shard.runs or ((0, shard.shape[-2]),)

    def num_bytes(self, count: int) -> int:
        """Returns the bytes of all slots on one of `count` TP ranks, which have equal shards."""
        item_bytes = ITEM_BYTES[self.dtype]
        return self.num_slots * sum(x.num_bytes(item_bytes) for x in self.local(0, count).values())

    @cached_property
    def adapter_bytes(self) -> int:
        """Bytes of the words of one adapter."""
        return WORD_BYTES * sum(self.num_words(program) for program in self.programs)

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """Load programs: consecutive layers, counted over all parameters, of at most `step_bytes`
        each.
        """
        sizes, first, programs = self._layer_bytes, 0, []
        while first < len(sizes):
            end, total = first + 1, sizes[first]
            while end < len(sizes) and total + sizes[end] <= self.step_bytes:
                end, total = end + 1, total + sizes[end]
            programs.append(_program(range(first, end)))
            first = end
        return tuple(programs)

    def arrays(self, program: Program) -> Iterator[tuple[AdapterArray, slice]]:
        """Yields each array of a load step, and the range of its words."""
        first = word = 0
        for shapes in self.shapes:
            last = first + shapes.stack[0]
            low, high = max(first, program.blocks.start), min(last, program.blocks.stop)
            if low < high:
                layers = slice(low - first, high - first)
                for array in self._arrays_of(shapes, layers):
                    yield array, slice(word, word + array.words)
                    word += array.words
            first = last

    def num_words(self, program: Program) -> int:
        """Returns the int32 words of a load step."""
        return sum(array.words for array, _ in self.arrays(program))

    def pack(self, adapter: Mapping[str, AdapterArrays]) -> tuple[Int32[np.ndarray, " words"], ...]:
        """Returns the words of an adapter for each load program."""
        packed = []
        for program in self.programs:
            words = np.empty(self.num_words(program), np.int32)
            for array, span in self.arrays(program):
                values = getattr(adapter[array.parameter], array.name)[array.layers]
                # Reading checkpoints has registered bfloat16. Conversions to it hold the GIL, for
                # which steps wait; one layer takes less than a millisecond.
                stored = words[span].view(array.dtype).reshape(array.shape)
                for layer, converted in zip(values, stored, strict=True):
                    converted[...] = layer
            packed.append(words)
        return tuple(packed)

    @property
    def _layer_bytes(self) -> list[int]:
        """Bytes of each layer of each parameter."""
        item_bytes, each = ITEM_BYTES[self.dtype], []
        for shapes in self.shapes:
            count = shapes.stack[0]
            each += [shapes.num_bytes(item_bytes) // count] * count
        return each

    def _arrays_of(self, shapes: AdapterShapes, layers: slice) -> Iterator[AdapterArray]:
        count = layers.stop - layers.start
        for name, (_, *shape) in shapes.arrays.items():
            dtype = self.dtype if name in ("a", "b") else "float32"
            yield AdapterArray(shapes.parameter.name, name, dtype, layers, (count, *shape))


@dataclass(frozen=True)
class LoadAdapter:
    """Writes layers of an adapter into the adapter slot `StepPlan.adapters[0]`.

    Attributes:
      words: The layers; see `AdapterPoolSpec.arrays`.
    """

    words: Int32[np.ndarray, " words"]


CopyWork = ExportKV | ImportKV | LoadAdapter
"""Inputs of steps without rows that copy to or from the host."""


def _program(layers: range) -> Program:
    return Program(
        work=StepKind.LOAD_ADAPTER,
        batch=1,
        pages=0,
        tokens=0,
        shape=TreeShape.plain(1),
        extras=ProgramFeature.NONE,
        blocks=layers,
    )
