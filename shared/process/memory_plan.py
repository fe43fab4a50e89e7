"""Memory plan: division of a device's memory before anything is allocated, and the resulting
capacity.

`plan` resolves what the command line left open and lists every part with its bytes, which sum up to
the total printed at startup. Nothing outside the list is allocated later.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from shared.boundary.adapter_pool import AdapterPoolSpec
from shared.boundary.backend import BackendLimits, BackendSpec
from shared.boundary.buffers import plan_layout, result_layout
from shared.boundary.images import EncoderCacheSpec, max_begun
from shared.boundary.ngram_table import ENTRY_BYTES, NgramTableSpec
from shared.boundary.program import StepKind
from shared.boundary.shm_allgather import shm_buffer_bytes
from shared.boundary.tp_group import TPGroup
from shared.boundary.transfer_spec import TRANSFERS
from shared.drafts.checkpoint import draft_parameters
from shared.drafts.drafter_spec import DrafterSpec
from shared.models.cache_spec import ITEM_BYTES, CacheUnit
from shared.models.config import ModelConfig
from shared.models.formats.plain import Plain
from shared.models.formats.weight_format import QuantizedFormat, WeightFormat, plane_bytes
from shared.models.groups import CachePool, pool_bytes
from shared.models.parameter import Parameter
from shared.models.parameters import draft_head, parameters
from shared.models.tp_sharding import shard_config
from shared.models.vision_parameters import vision_encoder_parameters
from shared.options.flags import ConfigError
from shared.options.options import Options
from shared.process.buckets import ProgramCosts, capacity_for, captured_step_kinds, pages_for
from shared.process.device import Device
from shared.process.image_startup import VisionEncoder, image_pool
from shared.process.kv_transfer_plan import num_exported_states, with_transfer
from shared.process.memory_plan_entry import MemoryPlanEntry
from shared.process.page_pools import page_lines, window_pools
from shared.process.resolved_config import ResolvedConfig, resolve
from shared.spec.ngram import LENGTHS, WAYS, WINDOW

STATES_OF_A_REQUEST = 4
"""State snapshots per running request: three of its own, and one of a finished request."""

MOST_STATES_SHARE = 0.2
"""Maximum fraction of a device's free memory for state snapshots."""

NGRAM_BYTES, CORPUS_BYTES = 48, 100
"""Bytes per n-gram (40 for its node, at most 8 for its hash bucket), and per token of an external
corpus."""

WAYS_OUT = {
    "weights": "give a smaller --model-path, or ",
    "n-grams": "lower --speculative-ngram-capacity, or ",
    "corpora": "lower --speculative-ngram-external-corpus-max-tokens, or ",
}
"""Advice by the largest line of the plan."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory to be allocated.

    Attributes:
      settled: Resolved config.
      blueprint: Specification of the backend.
      device: The device.
      lines: Parts of the plan; a workspace is an estimate for the widest step, the others are
        exact.
    """

    settled: ResolvedConfig
    blueprint: BackendSpec
    device: Device
    lines: tuple[MemoryPlanEntry, ...]

    @property
    def capacity(self) -> BackendLimits:
        """Limits and programs of the backend."""
        return self.blueprint.capacity

    @property
    def total_bytes(self) -> int:
        """Sum of all lines."""
        return sum(line.num_bytes for line in self.lines)

    @property
    def max_request_tokens(self) -> int:
        """Maximum tokens of a request, prompt and output: the context length, or the capacity of
        all pages.
        """
        capacity = self.capacity
        positions = (capacity.num_pages - 1) * capacity.page_size
        in_flight = capacity.overlap * (capacity.max_depth + 1)
        return min(capacity.context_length, positions + 1 - in_flight - capacity.scratch)


CPU_TOTAL_TOKENS = 32768

PROMPTS, DECODING = (
    (StepKind.PREFILL, StepKind.COUNT, StepKind.ENCODE, *TRANSFERS, StepKind.LOAD_ADAPTER),
    (StepKind.DECODE, StepKind.DRAFT),
)


def plan(
    options: Options,
    model: ModelConfig,
    drafts: DrafterSpec,
    device: Device,
    costs: ProgramCosts,
    formats: Callable[[str], Mapping[str, QuantizedFormat]] = lambda dtype: {},
    vision: VisionEncoder | None = None,
    adapters: Callable[[str], AdapterPoolSpec] | None = None,
) -> MemoryPlan:
    """Divides the device's memory.

    Args:
      options: Options of the server.
      model: Config of the target.
      drafts: Drafter on the device.
      device: The device.
      costs: Memory costs of the backend's programs.
      formats: Returns the formats of the parameters that stay quantised, by name, for the dtype of
        the model.
      vision: Vision encoder; None for text-only serving.
      adapters: Returns the adapter pool for the dtype of the model; None without LoRA.

    Raises:
      ConfigError: The limits contradict each other, or exceed the memory.
    """
    settled = resolve(options, model, drafts, device, costs.are_compiled)
    found = formats(settled.dtype)
    images = None if vision is None else image_pool(vision, settled)
    pool = adapters and adapters(settled.dtype)
    sizing = PageCountSearch(settled, model, drafts, device, costs, found, images, pool)
    return sizing.checked(sizing.with_pages(sizing.max_pages()))


@dataclass(frozen=True)
class PageCountSearch:
    """Plan with an open number of pages; for the other fields see the arguments of `plan`.

    Attributes:
      formats: Formats of the parameters that stay quantised, by name.
      images: Encoder cache of a vision-language model.
      adapters: Adapter pool; None without LoRA.
    """

    settled: ResolvedConfig
    model: ModelConfig
    drafts: DrafterSpec
    device: Device
    costs: ProgramCosts
    formats: Mapping[str, QuantizedFormat]
    images: EncoderCacheSpec | None
    adapters: AdapterPoolSpec | None

    def with_pages(self, pages: int) -> MemoryPlan:
        """Returns the whole plan with a number of pages."""
        settled, blueprint = self.settled, self._blueprint(pages)
        lines = (*self._weight_lines, *_lines(settled.options, blueprint, self.costs))
        return MemoryPlan(settled=settled, blueprint=blueprint, device=self.device, lines=lines)

    @cached_property
    def _weight_lines(self) -> tuple[MemoryPlanEntry, ...]:
        """Lines that do not depend on the number of pages, cached because MoE models have many
        tensors.
        """
        return tuple(_weight_lines(self._blueprint(1)))

    def _blueprint(self, pages: int) -> BackendSpec:
        settled = self.settled
        has_cache = not settled.options.engine.disable_radix_cache
        capacity = capacity_for(
            settled, pages, self.model, self.device, self.costs, self.images, self.adapters
        )
        capacity = replace(
            capacity,
            num_snapshots=1 + self._num_snapshots(),
            window_pools=window_pools(capacity, self.model, has_cache=has_cache),
        )
        return BackendSpec(
            config=self.model,
            drafts=self.drafts,
            capacity=with_transfer(capacity, settled, self.model, self.drafts),
            dtype=settled.dtype,
            on_gpu=self.device.kind == "gpu",
            captured=captured_step_kinds(settled.options),
            formats=self.formats,
            ranks=TPGroup(0, settled.options.ranks.tp_size, None),
        )

    def _num_snapshots(self) -> int:
        state_bytes = self._state_bytes()
        if self.settled.options.engine.disable_radix_cache or not state_bytes:
            return 0
        states = STATES_OF_A_REQUEST + num_exported_states(self.settled.options)
        wanted = states * self.settled.max_running_requests
        return min(wanted, int(MOST_STATES_SHARE * self.device.free_bytes) // state_bytes)

    def _state_bytes(self) -> int:
        """Returns the bytes of a request's recurrent states of target and drafter on one rank."""
        count = self.settled.options.ranks.tp_size
        sizes = self.drafts.local(count).sizes
        pools = (*shard_config(self.model, count).cache_pools, *(sizes.pools if sizes else ()))
        return pool_bytes(pools, CacheUnit.SLOT, ITEM_BYTES[self.settled.dtype])

    def max_pages(self) -> int:
        """Returns the given number of pages; without one, enough for the whole context of every
        request, or the largest number that fits.
        """
        page_size, total = self.settled.page_size, self.settled.options.engine.max_total_tokens
        needed = pages_for(self.settled, 2)
        if total is not None:
            pages = total // page_size
            if pages < needed:
                raise ConfigError(
                    f"--max-total-tokens {total} is too small for one request; give at "
                    f"least {needed * page_size}"
                )
            return pages
        return max(needed, self._max_that_fit(self._wanted_pages()))

    def checked(self, plan: MemoryPlan) -> MemoryPlan:
        """Returns the plan if it fits.

        Raises:
          ConfigError: It does not; the message names the largest part.
        """
        if plan.total_bytes <= self._may_take:
            return plan
        engine = self.settled.options.engine
        pool = "" if engine.max_total_tokens is None else "--max-total-tokens, "
        largest = max(plan.lines, key=lambda line: line.num_bytes)
        raise ConfigError(
            f"the memory plan needs {plan.total_bytes:,} bytes, most of them for "
            f"{largest.name} ({largest.num_bytes:,}), and may use {self._may_take:,} "
            f"(--mem-fraction-static {engine.mem_fraction_static:g} of the free memory of the "
            f"{self.device.name}); {WAYS_OUT.get(largest.name, '')}lower {pool}"
            "--max-running-requests or --chunked-prefill-size"
        )

    @property
    def _may_take(self) -> int:
        return int(self.settled.options.engine.mem_fraction_static * self.device.free_bytes)

    def _wanted_pages(self) -> int:
        settled = self.settled
        wanted = settled.max_running_requests * pages_for(settled, settled.context_length)
        if self.device.kind == "cpu":
            wanted = min(wanted, CPU_TOTAL_TOKENS // settled.page_size)
        return wanted

    def _max_that_fit(self, wanted: int) -> int:
        fitting, too_many = 0, wanted + 1
        while fitting + 1 < too_many:  # binary search: bytes grow with pages
            middle = (fitting + too_many) // 2
            if self.with_pages(middle).total_bytes <= self._may_take:
                fitting = middle
            else:
                too_many = middle
        return fitting


def _lines(
    options: Options, blueprint: BackendSpec, costs: ProgramCosts
) -> Iterator[MemoryPlanEntry]:
    """Yields all lines but weights for one rank: shards are equal, and gathered arrays are whole on
    each rank.
    """
    share = blueprint.share
    yield from page_lines(share)
    yield from _slot_lines(share)
    if blueprint.capacity.images is not None:
        yield _image_line(blueprint, blueprint.capacity.images)
    yield _buffer_line(blueprint.capacity)
    if costs.has_shm_all_gather and not (blueprint.ranks.is_single or blueprint.on_gpu):
        num_bytes = shm_buffer_bytes(blueprint.ranks.count)
        yield MemoryPlanEntry("all-gather buffers", "shared by all ranks", num_bytes)
    if blueprint.on_gpu and not blueprint.ranks.is_single:
        num_bytes = costs.symmetric_buffer_bytes(blueprint.ranks.count)
        yield MemoryPlanEntry("all-gather buffers", "written by the other ranks", num_bytes)
    if (table := blueprint.capacity.texts) is not None:
        yield _table_line(table, blueprint.capacity.num_slots)
    elif options.speculative.copies_text and not blueprint.on_gpu:
        yield from _text_lines(options)
    if (pool := blueprint.capacity.adapters) is not None and not blueprint.on_gpu:
        yield _host_adapter_line(pool, len(options.lora.folders))
    yield from _workspace_lines(blueprint, costs)


def _weight_lines(blueprint: BackendSpec) -> Iterator[MemoryPlanEntry]:
    drafts = blueprint.drafts
    wanted = _of_rank(parameters(blueprint.config, drafts.with_mtp), blueprint)
    yield _weights_line("weights", blueprint.dtype, wanted, blueprint.formats)
    if (token_map := drafts.token_map) is not None:
        rows = _of_rank([draft_head(blueprint.config, token_map)], blueprint)
        line = _weights_line("draft LM head", blueprint.dtype, rows, {})
        detail = f"{len(token_map):,} of the LM head's {blueprint.config.vocab:,} rows, with ids"
        num_bytes = line.num_bytes + 4 * len(token_map)
        yield MemoryPlanEntry(line.name, detail, num_bytes)
    if of_drafts := _of_rank(draft_parameters(drafts, None), blueprint):
        line = _weights_line("draft weights", blueprint.dtype, of_drafts, {})
        yield replace(line, num_bytes=line.num_bytes + 4 * drafts.num_map_entries)
    if blueprint.capacity.images is not None:
        yield _vision_line(blueprint, blueprint.capacity.images)
    if (pool := blueprint.capacity.adapters) is not None:
        yield _adapter_line(pool, blueprint.ranks.count)


def _adapter_line(pool: AdapterPoolSpec, count: int) -> MemoryPlanEntry:
    rank = max((shapes.rank for shapes in pool.shapes), default=0)
    return MemoryPlanEntry("adapters", f"{pool.num_slots} x rank {rank}", pool.num_bytes(count))


def _vision_line(blueprint: BackendSpec, images: EncoderCacheSpec) -> MemoryPlanEntry:
    """Returns the line of the vision encoder, which is replicated on all ranks."""
    wanted = vision_encoder_parameters(images.vision)
    return _weights_line("vision encoder", blueprint.dtype, wanted, {})


def _of_rank(wanted: Sequence[Parameter], blueprint: BackendSpec) -> list[Parameter]:
    """Returns the shards of rank 0, which are the largest."""
    return [parameter.shard(0, blueprint.ranks.count) for parameter in wanted]


def _weights_line(
    name: str, dtype: str, wanted: Sequence[Parameter], formats: Mapping[str, QuantizedFormat]
) -> MemoryPlanEntry:
    """Args:
    formats: Formats of the parameters that stay quantised, by name.
    """
    num_bytes = count = 0
    quantised: dict[str | None, int] = {}
    for parameter in wanted:
        plain = Plain("float32" if parameter.float32 else dtype)
        format: WeightFormat = formats.get(parameter.name, plain)
        size = prod(parameter.shape)
        count += size
        num_bytes += plane_bytes(format, parameter.shape)
        if format.label is not None:
            quantised[format.label] = quantised.get(format.label, 0) + size
    detail = f"{count:,} parameters in {dtype}"
    detail += "".join(f", {size:,} of them in {label}" for label, size in quantised.items())
    return MemoryPlanEntry(name, detail, num_bytes)


def _slot_lines(blueprint: BackendSpec) -> Iterator[MemoryPlanEntry]:
    capacity, drafter, item = blueprint.capacity, blueprint.drafts.sizes, blueprint.item_bytes
    slots = capacity.num_slots
    yield from _state_lines("", blueprint.config.cache_pools, blueprint)
    if drafter is not None:
        yield from _state_lines("draft ", drafter.pools, blueprint)
    yield MemoryPlanEntry(
        "token counts", f"{slots} slots x {capacity.vocab} tokens", slots * capacity.vocab * 4
    )
    relay = slots * 12
    if drafter is not None and drafter.has_draft_input:
        relay += slots * (capacity.max_width * 8 + drafter.model.hidden * item)
    yield MemoryPlanEntry("draft inputs", f"{slots} slots", relay)


def _image_line(blueprint: BackendSpec, images: EncoderCacheSpec) -> MemoryPlanEntry:
    """Returns the line of the encoder cache and of the M-RoPE position delta of each slot."""
    vision, item = images.vision, blueprint.item_bytes
    num_bytes = images.num_rows * vision.out * item + 4 * blueprint.capacity.num_slots
    detail = f"{images.num_rows - 1} image tokens, and a scratch row"
    if most := max_begun(blueprint.capacity.programs, vision):
        num_bytes += most * (vision.hidden * item + 4 * vision.head_size) + 4
        detail += f"; {most} patches of a partly encoded image"
    return MemoryPlanEntry("encoder cache", detail, num_bytes)


def _state_lines(
    prefix: str, pools: Sequence[CachePool], blueprint: BackendSpec
) -> Iterator[MemoryPlanEntry]:
    request_bytes = pool_bytes(pools, CacheUnit.SLOT, blueprint.item_bytes)
    if not request_bytes:
        return
    capacity = blueprint.capacity
    for name, count in (("state", capacity.num_slots), ("snapshots", capacity.num_snapshots)):
        detail = f"{count - 1} x {request_bytes:,} bytes, and a scratch slot"
        yield MemoryPlanEntry(f"{prefix}{name}", detail, count * request_bytes)


def _buffer_line(capacity: BackendLimits) -> MemoryPlanEntry:
    """Returns the line of plan and result buffers; each ring has one entry more than steps in
    flight.

    A captured program's plan has a fixed buffer. Encode plans are the largest; their sizes double,
    so all of them together take less than two of the largest, which is no more than the ring.
    """
    count = capacity.overlap + 2
    plans = max(plan_layout(program, capacity).size for program in capacity.programs)
    results = max(result_layout(program, capacity).size for program in capacity.programs)
    detail = f"{count} plans, {count} results"
    return MemoryPlanEntry("plans and results", detail, 4 * count * (plans + results))


def _table_line(table: NgramTableSpec, slots: int) -> MemoryPlanEntry:
    """Returns the line of the device's n-gram table and of the last tokens of each slot."""
    count = table.groups * len(LENGTHS) * WAYS
    num_bytes = ENTRY_BYTES * count + 4 * (len(LENGTHS) + slots * WINDOW)
    return MemoryPlanEntry("n-grams", f"at most {count:,}, on the device", num_bytes)


def _text_lines(options: Options) -> Iterator[MemoryPlanEntry]:
    """Yields the lines of the host's n-gram index, in main memory."""
    ngram = options.ngram
    count = ngram.speculative_ngram_capacity
    yield MemoryPlanEntry("n-grams", f"at most {count:,}", count * NGRAM_BYTES)
    if ngram.sam_budget:
        tokens = ngram.speculative_ngram_external_corpus_max_tokens
        yield MemoryPlanEntry("corpora", f"at most {tokens:,} tokens", tokens * CORPUS_BYTES)


def _host_adapter_line(pool: AdapterPoolSpec, count: int) -> MemoryPlanEntry:
    """Returns the line of the host copies of the named adapters, in main memory."""
    return MemoryPlanEntry("host adapters", f"{count} named", count * pool.adapter_bytes)


def _workspace_lines(blueprint: BackendSpec, costs: ProgramCosts) -> Iterator[MemoryPlanEntry]:
    """Yields one workspace line for each group of steps that cannot share memory.

    Memory that prefills have freed is not always available to decode steps. Captured steps share a
    pool, which steps without capture cannot use.
    """
    groups = {"prompt workspace": PROMPTS, "decode workspace": DECODING}
    if costs.captures and blueprint.on_gpu:
        others = [work for work in StepKind if work not in blueprint.captured]
        groups = {"graph workspace": blueprint.captured, "eager workspace": others}
    for name, works in groups.items():
        programs = [p for p in blueprint.capacity.programs if p.work in works]
        widest = max((costs.workspace(p, blueprint) for p in programs), default=0)
        yield MemoryPlanEntry(name, "widest step, estimated", widest)
