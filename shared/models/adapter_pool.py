"""Adapter pool: the adapters of a server in the slots of device memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Float32

from shared.models.lora_shapes import (
    AdapterArrays,
    AdapterShapes,
    BaseWeight,
    WeightReader,
    adaptable,
    base_weights,
)
from shared.models.parameter import Parameter


class AdapterFiles(Protocol):
    """An opened adapter (`shared.models.lora.Adapter`)."""

    version: str

    def adapts(self, parameter: Parameter) -> bool:
        """Returns True if a module of a parameter has an adapter."""
        ...

    def arrays(self, shapes: AdapterShapes, base: BaseWeight) -> AdapterArrays:
        """Reads the arrays for a parameter; see `Adapter.arrays`."""
        ...


@dataclass(frozen=True)
class AdapterStack:
    """Adapters of one parameter, by adapter slot; see `shared.spec.lora.AdapterWeights`."""

    a: Float32[np.ndarray, "slots *layers ranks inputs"]
    b: Float32[np.ndarray, "slots *layers outputs rank"]
    scales: Float32[np.ndarray, "slots *layers ranks"]
    factors: Float32[np.ndarray, "slots *layers outputs"]
    parts: tuple[int, ...]


@dataclass(frozen=True)
class AdapterPool:
    """Adapters of a server. The first has adapter slot 1; slot 0 means none.

    Attributes:
      adapters: The adapters by name.
      rank: Rank in device memory, to which ranks are zero-padded.
    """

    adapters: Mapping[str, AdapterFiles]
    rank: int

    @property
    def num_slots(self) -> int:
        """Adapter slots besides slot 0."""
        return len(self.adapters)

    def shapes(self, stacks: Sequence[Parameter]) -> list[AdapterShapes]:
        """Returns the shapes of one adapter for the parameters that some adapter changes.

        Args:
          stacks: Parameters of the model, or a rank's shards of them.
        """
        opened = self.adapters.values()
        changed = [x for x in adaptable(stacks) if any(each.adapts(x) for each in opened)]
        return [AdapterShapes(parameter, self.rank) for parameter in changed]

    def stacks(self, stacks: Sequence[Parameter], base: BaseWeight) -> dict[str, AdapterStack]:
        """Reads the adapters for the parameters that some adapter changes.

        Args:
          stacks: See `shapes`.
          base: Reads weights of the base model.

        Raises:
          CheckpointError: See `Adapter.arrays`.
        """
        return {each.parameter.name: self._stack(each, base) for each in self.shapes(stacks)}

    def of_rank(
        self, whole: Sequence[Parameter], rank: int, count: int, base: WeightReader
    ) -> dict[str, AdapterStack]:
        """Reads the adapters of one of `count` TP ranks.

        Args:
          whole: Parameters of the model, not shards.
          rank, count: The rank, and the number of ranks.
          base: Checkpoint of the base model.

        Raises:
          CheckpointError: See `Adapter.arrays`.
        """
        return self.stacks([x.shard(rank, count) for x in whole], base_weights(base))

    def num_bytes(self, stacks: Sequence[Parameter], item_bytes: int) -> int:
        """Returns the bytes of all adapters in device memory; see `shapes`."""
        each = sum(shapes.num_bytes(item_bytes) for shapes in self.shapes(stacks))
        return self.num_slots * each

    def _stack(self, shapes: AdapterShapes, base: BaseWeight) -> AdapterStack:
        made = [each.arrays(shapes, base) for each in self.adapters.values()]
        arrays = {name: np.stack([getattr(x, name) for x in made]) for name in shapes.arrays}
        return AdapterStack(**arrays, parts=shapes.parts)
