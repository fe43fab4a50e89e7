"""Validated startup: the plan of a server on its device, before memory is allocated.

Errors that the user can correct are one sentence each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shared.boundary.backend import Backend, BackendSpec
from shared.boundary.kernel_coverage import FallbackOp, KernelLimits, fallback_ops
from shared.boundary.tp_group import TPGroup
from shared.drafts.checkpoint import DraftFiles
from shared.drafts.drafter_spec import DrafterSpec
from shared.engine.adapter_slots import HostAdapter
from shared.models.formats.registry import choose_formats
from shared.models.formats.weight_format import (
    FormatContext,
    QuantizedFormat,
    UnsupportedFormatError,
)
from shared.models.parameters import draft_head, parameters
from shared.models.sampling import SamplingDefaults
from shared.models.vision_parameters import vision_encoder_parameters
from shared.options.flags import ConfigError, raise_fault, spelling
from shared.options.options import Options
from shared.process.adapters import AdapterFiles, AdapterReader
from shared.process.buckets import ProgramCosts
from shared.process.caching import cache_policy
from shared.process.device import Device
from shared.process.grammars import GrammarQueue
from shared.process.memory_plan import MemoryPlan, plan
from shared.process.model_check import CheckedModel, check_model
from shared.process.opened_models import OpenedModels, WeightSource

LoadCall = Callable[[BackendSpec, Any, DraftFiles, Callable[[int], None]], Backend]


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A backend before it is created.

    Attributes:
      find_device: Returns the device; called after the flags are checked.
      open_checkpoint: Opens the model folder; its files are checked before any weight is read.
      costs: Costs of the backend's programs.
      kernels: Limits of its GPU kernels; None if it has none.
      load: Creates the backend from its specification, the result of `open_checkpoint` and the
        drafter's files; calls its last argument with the stored bytes of each tensor.
      take_devices: If one process has all devices: called with their number before the first is
        used.
      free_on_each: If one process has all devices: returns the free bytes of each of the first
        ones.
    """

    find_device: Callable[[], Device]
    open_checkpoint: Callable[[str], WeightSource]
    costs: ProgramCosts
    kernels: KernelLimits | None
    load: LoadCall
    take_devices: Callable[[int], None] = lambda count: None
    free_on_each: Callable[[int], Sequence[int]] = lambda count: ()


@dataclass(frozen=True)
class ValidatedStartup:
    """Validated startup, before memory is allocated.

    Attributes:
      opened: The opened models.
      draft_files: The drafter and its files.
      memory: Memory plan with the resolved config.
      fallback_ops: Operations that fall back to the reference implementation on a GPU.
      defaults: Defaults of omitted sampling fields.
      grammars: Grammar compiler; None without structured output.
      adapter_files: Adapters of the command line; None without LoRA.
    """

    opened: OpenedModels
    draft_files: DraftFiles
    memory: MemoryPlan
    fallback_ops: tuple[FallbackOp, ...]
    defaults: SamplingDefaults
    grammars: GrammarQueue | None
    adapter_files: AdapterFiles | None

    @property
    def adapter_reader(self) -> AdapterReader | None:
        """Reader of LoRA adapters; None without LoRA."""
        files, pool = self.adapter_files, self.memory.capacity.adapters
        if files is None or pool is None:
            return None
        return AdapterReader(files, pool)

    def read_adapters(self) -> list[HostAdapter]:
        """Reads the adapters of the command line into host memory; see `AdapterReader.read_all`."""
        reader = self.adapter_reader
        return [] if reader is None else reader.read_all()

    @property
    def num_bytes(self) -> int:
        """Stored bytes that loading reads."""
        blueprint = self.memory.blueprint
        wanted = parameters(blueprint.config, blueprint.drafts.with_mtp)
        if blueprint.capacity.images is not None:
            wanted += vision_encoder_parameters(blueprint.capacity.images.vision)
        if (token_map := blueprint.drafts.token_map) is not None:
            wanted.append(draft_head(blueprint.config, token_map))
        return self.opened.checkpoint.num_bytes(wanted) + self.draft_files.num_bytes

    def of_rank(self, ranks: TPGroup) -> "ValidatedStartup":
        """Returns the startup of one of several ranks."""
        blueprint = replace(self.memory.blueprint, ranks=ranks)
        return replace(self, memory=replace(self.memory, blueprint=blueprint))

    def load(self, platform: Platform, progress: Callable[[int], None]) -> Backend:
        """Loads the weights and creates the backend; calls `progress` with the bytes read."""
        checkpoint = self.opened.checkpoint
        return platform.load(self.memory.blueprint, checkpoint, self.draft_files, progress)


def prepare(options: Options, platform: Platform) -> ValidatedStartup:
    """Checks flags and files, and plans the startup on the device, before memory is allocated.

    Args:
      options: Options of the command line.
      platform: The backend.

    Raises:
      ValueError: A flag or a file is invalid (`ConfigError`, `CheckpointError`, ...).
    """
    return plan_start(check_model(options, platform.open_checkpoint), platform)


def plan_start(checked: CheckedModel, platform: Platform) -> ValidatedStartup:
    """Plans a startup with checked flags and files, before memory is allocated.

    Raises:
      ConfigError: The device or its framework does not support the options.
    """
    raise_fault(_graph_flags_fault(checked.options, platform.costs))
    platform.take_devices(checked.options.ranks.tp_size)
    device, drafts = platform.find_device(), checked.draft_files.drafts
    memory = _memory_plan(checked, drafts, device, platform.costs)
    raise_fault(_token_map_fault(drafts, memory.blueprint.capacity.max_width))
    cache_policy(memory)  # raises its errors before memory is allocated
    kernels = platform.kernels
    return ValidatedStartup(
        opened=checked.opened,
        draft_files=checked.draft_files,
        memory=memory,
        fallback_ops=() if kernels is None else fallback_ops(memory.blueprint, kernels),
        defaults=checked.defaults,
        grammars=checked.grammars,
        adapter_files=checked.adapters,
    )


def _memory_plan(
    checked: CheckedModel, drafts: DrafterSpec, device: Device, costs: ProgramCosts
) -> MemoryPlan:
    opened = checked.opened
    formats = partial(_formats, checked, device)
    return plan(
        checked.options,
        opened.model,
        drafts,
        device,
        costs,
        formats,
        vision=checked.tower,
        adapters=checked.adapters and checked.adapters.pool,
    )


def _formats(checked: CheckedModel, device: Device, dtype: str) -> dict[str, QuantizedFormat]:
    """Returns the formats of the parameters that stay quantised on a device."""
    context = FormatContext(
        on_gpu=device.kind == "gpu",
        device_name=device.name,
        dtype=dtype,
        fp8_activations=checked.options.model.fp8_activations,
    )
    try:
        return choose_formats(checked.wanted, checked.opened.checkpoint.stored, context)
    except UnsupportedFormatError as error:
        raise ConfigError(str(error)) from error


def _graph_flags_fault(options: Options, costs: ProgramCosts) -> str | None:
    """Returns the first CUDA graph flag that a backend without graphs does not support."""
    names = ("disable_cuda_graph", "disable_piecewise_cuda_graph")
    given = [] if costs.captures else [name for name in names if getattr(options.engine, name)]
    return f"{spelling(given[0])} requires the torch backend; remove the flag" if given else None


def _token_map_fault(drafts: DrafterSpec, width: int) -> str | None:
    """Returns the fault of a token map with fewer tokens than a node may have children."""
    if drafts.token_map is None or len(drafts.token_map) >= width:
        return None
    return (
        f"--speculative-token-map has {len(drafts.token_map)} tokens, and a node of "
        f"the draft tree may have {width} children; add tokens to the map"
    )
