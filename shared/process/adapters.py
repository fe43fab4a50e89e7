"""LoRA adapters of a startup: the checked files, the size of the pool, and host copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.boundary.adapter_pool import AdapterPoolSpec
from shared.engine.adapter_slots import HostAdapter
from shared.engine.request import AdapterVersion
from shared.models.config import ModelConfig
from shared.models.lora import Adapter
from shared.models.lora_shapes import (
    AdapterShapes,
    WeightReader,
    adaptable,
    base_weights,
    padded_rank,
)
from shared.models.parameter import Parameter
from shared.models.parameters import parameters
from shared.models.weight_files import CheckpointError
from shared.options.lora import ALL, LoraOptions


@dataclass(frozen=True)
class AdapterFiles:
    """Checked adapters of the command line.

    Attributes:
      model: Name of the model family, for messages.
      whole: Parameters of the model that the server loads, not shards.
      unused: Parameters that it does not load: those of the MTP layer, unless NEXTN drafts.
      opened: The adapters; keys are their names.
      options: Options of LoRA adapters.
      base: Checkpoint of the base model, which DoRA requires; None if it has no tensors.
    """

    model: str
    whole: Sequence[Parameter]
    unused: Sequence[Parameter]
    opened: Mapping[str, Adapter]
    options: LoraOptions
    base: WeightReader | None

    @classmethod
    def of(
        cls,
        options: LoraOptions,
        model: ModelConfig,
        with_mtp: bool,
        base: WeightReader | None,
    ) -> AdapterFiles:
        """Opens the adapters, and checks that they fit the model.

        Args:
          options: Options of LoRA adapters.
          model: Config of the model.
          with_mtp: True if NEXTN drafts with the MTP layer.
          base: See `AdapterFiles`.

        Raises:
          CheckpointError: An adapter is invalid or does not fit.
        """
        opened = {name: Adapter(Path(folder)) for name, folder in options.folders.items()}
        whole, every = parameters(model, with_mtp), parameters(model, model.has_mtp)
        unused = [] if with_mtp else every[len(whole) :]
        files = cls(model.name, whole, unused, opened, options, base)
        for adapter in opened.values():
            files.check(adapter)
        return files

    def check(self, adapter: Adapter) -> None:
        """Checks that an adapter fits the model and the pool.

        Raises:
          CheckpointError: It does not.
        """
        adapter.check([*self.whole, *self.unused], self.model)
        if adapter.config.use_dora and self.base is None:
            raise CheckpointError(
                f"adapter {adapter.folder} uses DoRA, which requires the tensors of the base "
                "model; serve it with the model's safetensors files"
            )
        if adapter.max_rank > self.max_rank:
            raise CheckpointError(
                f"adapter {adapter.folder} has rank {adapter.max_rank}, and --max-lora-rank is "
                f"{self.max_rank}; start the server with a higher one"
            )
        names = {x.parameter.name for x in self.shapes}
        for parameter in adaptable(self.whole):
            if parameter.name not in names and adapter.adapts(parameter):
                raise CheckpointError(
                    f"adapter {adapter.folder} changes {parameter.name}, for which the server has "
                    "no room; start it with --lora-target-modules all"
                )

    @property
    def notes(self) -> Iterator[str]:
        """Startup notes on tensors that do not affect the text."""
        for name, adapter in self.opened.items():
            yield from self.notes_of(name, adapter)

    def notes_of(self, name: str, adapter: Adapter) -> Iterator[str]:
        """Yields the notes on one adapter."""
        if any(adapter.adapts(parameter) for parameter in adaptable(self.unused)):
            yield (
                f"adapter {name} changes the MTP layer, which is not used without "
                "--speculative-algorithm NEXTN; the text does not depend on it"
            )

    @property
    def max_rank(self) -> int:
        """Maximum rank of an adapter."""
        ranks = (each.max_rank for each in self.opened.values())
        return self.options.max_lora_rank or max(ranks)

    @property
    def num_slots(self) -> int:
        """Adapter slots in device memory."""
        return self.options.num_slots

    @property
    def shapes(self) -> tuple[AdapterShapes, ...]:
        """Shapes of one adapter for the parameters that adapters may change."""
        is_whole = self.options.lora_target_modules == ALL
        opened, rank = self.opened.values(), padded_rank(self.max_rank)
        return tuple(
            AdapterShapes(parameter, rank)
            for parameter in adaptable(self.whole)
            if is_whole or any(each.adapts(parameter) for each in opened)
        )

    def pool(self, dtype: str) -> AdapterPoolSpec:
        """Returns the pool of a model of a dtype."""
        return AdapterPoolSpec(self.num_slots, self.shapes, dtype)


@dataclass(frozen=True)
class AdapterReader:
    """Reads adapters into host memory.

    Attributes:
      files: The adapters of the command line.
      pool: The pool.
    """

    files: AdapterFiles
    pool: AdapterPoolSpec

    def read(self, name: str, folder: str) -> HostAdapter:
        """Reads an adapter that was not checked before.

        Raises:
          CheckpointError: It is invalid, or does not fit the model or the pool.
        """
        adapter = Adapter(Path(folder))
        self.files.check(adapter)
        return self._host_copy(name, adapter)

    def read_all(self) -> list[HostAdapter]:
        """Reads the adapters of the command line.

        Raises:
          CheckpointError: A value is not finite, or a tensor does not fit.
        """
        return [self._host_copy(name, each) for name, each in self.files.opened.items()]

    def _host_copy(self, name: str, adapter: Adapter) -> HostAdapter:
        base = base_weights(self.files.base)
        arrays = {x.parameter.name: adapter.arrays(x, base) for x in self.pool.shapes}
        version = AdapterVersion(name, adapter.version)
        notes = tuple(self.files.notes_of(name, adapter))
        return HostAdapter(version, str(adapter.folder), self.pool.pack(arrays), notes)
