"""How a device's memory is divided before anything is allocated, and the limits that follow.

`plan` fills in what the command line left open and lists every part with its bytes; the parts add
up to what the start prints. Nothing is allocated later that is not in the list.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Self

from shared.boundary.backend import (
    Limits,
    Program,
    Work,
)
from shared.boundary.buffers import plan_layout, result_layout
from shared.drafts.checkpoint import head_parameters
from shared.drafts.config import DraftConfig, DraftSizes
from shared.models.checkpoint import Parameter, parameters
from shared.models.config import ModelConfig
from shared.options.options import CHUNK_ALIGNMENT, ConfigError, Options
from shared.process.activations import Drafting, activation_bytes, state_layer_bytes
from shared.spec.draft_tree import TreeShape

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
MEMORY_SHARE = 0.9
"""Of a GPU's free memory; the rest is left to its libraries."""

SMALLEST_PAGE_TABLE = 16
MAX_STOP_IDS = 16
MAX_BIAS = 64
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class Device:
    """Where the model runs.

    Attributes:
      kind: "cpu" or "gpu".
      name: For the reader.
      free_bytes: Memory that can be allocated.
    """

    kind: str
    name: str
    free_bytes: int

    @classmethod
    def cpu(cls) -> Self:
        """This machine's processor and main memory."""
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls("cpu", "CPU", _available_bytes() or pages)


@dataclass(frozen=True)
class MemoryLine:
    """One part of the plan."""

    name: str
    detail: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What will be allocated.

    Attributes:
      options: The start's options with nothing left open.
      limits: What the backend is asked to provide.
      device: Where.
      lines: The parts; the activations are an estimate of the widest step, the rest is exact.
    """

    options: Options
    limits: Limits
    device: Device
    lines: tuple[MemoryLine, ...]

    @property
    def total_bytes(self) -> int:
        """The sum of all lines."""
        return sum(line.num_bytes for line in self.lines)

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of a request, prompt and output: the context, or what all pages hold."""
        limits = self.limits
        positions = (limits.num_pages - 1) * limits.page_size
        in_flight = limits.overlap * (limits.max_depth + 1)
        return min(limits.context_length, positions + 1 - in_flight - limits.scratch)


@dataclass(frozen=True)
class _Defaults:
    page_size: int
    max_running_requests: int
    chunked_prefill_size: int
    dtype: str


DEFAULTS = {
    "cpu": _Defaults(16, 8, 256, "float32"),
    "gpu": _Defaults(64, 48, 2048, "bfloat16"),
}
CPU_TOTAL_TOKENS = 32768


def plan(options: Options, model: ModelConfig, head: Drafting, device: Device) -> MemoryPlan:
    """Divides the device's memory.

    Args:
      head: The draft head or the small model, where the drafter is one.

    Raises:
      ConfigError: The limits contradict each other, or do not fit.
    """
    options = _with_defaults(options, model, head, device)
    options = _with_lengths(options, model, head, device)
    limits = limits_for(options, model, device)
    lines = tuple(_lines(options, model, head, limits))
    found = MemoryPlan(options=options, limits=limits, device=device, lines=lines)
    if found.total_bytes > device.free_bytes:
        raise ConfigError(
            f"the memory plan needs {found.total_bytes:,} bytes and {device.free_bytes:,} are free "
            f"on the {device.name}; lower --max-total-tokens or --max-running-requests"
        )
    return found


def limits_for(options: Options, model: ModelConfig, device: Device) -> Limits:
    """What a backend provides for options without open values: pools, and one program per bucket.

    A CPU gets page-table buckets in powers of 4, as a step's cost follows them; a GPU one.
    """
    engine, context = options.engine, _given(options.model.context_length)
    page_size = _given(engine.page_size)
    num_pages = _given(engine.max_total_tokens) // page_size
    table = max(1, min(num_pages, _pages_for(options, context)))
    tables = _page_tables(table) if device.kind == "cpu" else (table,)
    batches = _powers(1, 4 if device.kind == "cpu" else 2, _given(engine.max_running_requests))
    chunk = _given(engine.chunked_prefill_size)
    small_chunk = -(-chunk // 8 // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
    programs = [
        _program(Work.PREFILL, batch, pages, tokens, TreeShape.plain(batch), logprobs)
        for batch in sorted({1, min(8, batches[-1])})
        for pages in tables
        for tokens in sorted({small_chunk, chunk})
        for logprobs in (False, True)
    ]
    programs += [
        _program(Work.DECODE, batch, pages, 0, shape, logprobs)
        for batch in batches
        for pages in tables
        for shape in dict.fromkeys((TreeShape.plain(batch), draft_shape(options, batch)))
        for logprobs in (False, True)
    ]
    if options.speculative.drafts_on_host:
        programs = [replace(p, host_draft=not p.shape.is_plain) for p in programs]
    return Limits(
        page_size=page_size,
        num_pages=1 + num_pages,
        num_slots=1 + _given(engine.max_running_requests),
        num_snapshots=1,
        programs=tuple(programs),
        overlap=engine.overlap_depth,
        context_length=context,
        vocab=model.vocab,
        max_stop_ids=MAX_STOP_IDS,
        max_bias=MAX_BIAS,
        max_logprobs=MAX_LOGPROBS,
        accept_rule=options.speculative.verification,
    )


def _with_defaults(options: Options, model: ModelConfig, head: Drafting, device: Device) -> Options:
    defaults = DEFAULTS[device.kind]
    engine = options.engine
    return replace(
        options,
        model=replace(
            options.model,
            dtype=defaults.dtype if options.model.dtype == "auto" else options.model.dtype,
        ),
        engine=replace(
            engine,
            page_size=engine.page_size or defaults.page_size,
            max_running_requests=engine.max_running_requests or defaults.max_running_requests,
            chunked_prefill_size=engine.chunked_prefill_size or defaults.chunked_prefill_size,
            overlap=engine.overlap_depth,
        ),
        speculative=options.speculative.settled(model.family == "llama", _block_size(head)),
    )


def _with_lengths(options: Options, model: ModelConfig, head: Drafting, device: Device) -> Options:
    """Settles context length and KV positions; what was given stays as it is or is refused."""
    context = options.model.context_length or model.context_length
    options = replace(options, model=replace(options.model, context_length=context))
    if options.engine.max_total_tokens is None:
        return _with_pages(options, _most_pages(options, model, head, device))
    page_size = _given(options.engine.page_size)
    pages, needed = options.engine.max_total_tokens // page_size, _pages_for(options, 2)
    if pages < needed:
        raise ConfigError(
            f"--max-total-tokens {options.engine.max_total_tokens} has no room for a request; "
            f"give at least {needed * page_size}"
        )
    return _with_pages(options, pages)


def _most_pages(options: Options, model: ModelConfig, head: Drafting, device: Device) -> int:
    """Pages for every request's whole context, or as many as fit beside everything else."""
    page_size = _given(options.engine.page_size)
    wanted = _given(options.engine.max_running_requests) * _pages_for(
        options, _given(options.model.context_length)
    )
    if device.kind == "cpu":
        wanted = min(wanted, CPU_TOTAL_TOKENS // page_size)
    fitting, too_many = 0, wanted + 1
    while fitting + 1 < too_many:  # bytes grow with pages
        middle = (fitting + too_many) // 2
        if _fits(_with_pages(options, middle), model, head, device):
            fitting = middle
        else:
            too_many = middle
    if fitting < _pages_for(options, 2):
        raise ConfigError(
            f"the model does not fit into the {device.free_bytes:,} bytes that are free on the "
            f"{device.name}; give a smaller --model-path, or lower --max-running-requests and "
            "--chunked-prefill-size"
        )
    return fitting


def _fits(options: Options, model: ModelConfig, head: Drafting, device: Device) -> bool:
    lines = _lines(options, model, head, limits_for(options, model, device))
    return sum(line.num_bytes for line in lines) <= MEMORY_SHARE * device.free_bytes


def _with_pages(options: Options, pages: int) -> Options:
    total = pages * _given(options.engine.page_size)
    return replace(options, engine=replace(options.engine, max_total_tokens=total))


def _lines(
    options: Options, model: ModelConfig, head: Drafting, limits: Limits
) -> Iterator[MemoryLine]:
    item, slots = ITEM_BYTES[options.model.dtype], limits.num_slots
    pages = f"{limits.num_pages - 1} pages of {limits.page_size} tokens, and a sink"
    yield _weights_line("weights", options, parameters(model, options.speculative.with_mtp))
    if isinstance(head, ModelConfig):
        yield _weights_line("draft weights", options, parameters(head, False))
    elif head is not None:
        draft_weights = _weights_line("draft weights", options, head_parameters(head, None))
        ids_bytes = 4 * head.draft_vocab * head.has_draft_vocab
        yield replace(draft_weights, num_bytes=draft_weights.num_bytes + ids_bytes)
    kv_bytes = model.num_attention_layers * _kv_bytes(model, limits, item)
    yield MemoryLine("KV", pages, kv_bytes)
    drafter = _draft_sizes(options, model, head)
    if drafter is not None:
        layers = drafter.num_attention_layers
        detail = f"the same pages, {layers} layer{'s' * (layers > 1)}"
        yield MemoryLine("draft KV", detail, layers * _kv_bytes(drafter.model, limits, item))
    yield from _state_lines(model, limits, item, "")
    if isinstance(head, ModelConfig):
        yield from _state_lines(head, limits, item, "draft ")
    yield MemoryLine("seen", f"{slots} slots x {limits.vocab} tokens", slots * limits.vocab * 4)
    relay = slots * 12
    if drafter is not None and drafter.has_relay:
        relay += slots * (limits.max_width * 8 + drafter.model.hidden * item)
    yield MemoryLine("relay", f"{slots} slots", relay)
    depth = limits.overlap
    plans = max(plan_layout(program, limits).size for program in limits.programs)
    results = max(result_layout(program, limits).size for program in limits.programs)
    buffers = 4 * ((depth + 2) * plans + (depth + 1) * results)
    yield MemoryLine("plans and results", f"{depth + 2} plans, {depth + 1} results", buffers)
    widest = max(
        activation_bytes(program, model, head, limits, item) for program in limits.programs
    )
    yield MemoryLine("activations", "the widest step, estimated", widest)


def _draft_sizes(options: Options, model: ModelConfig, head: Drafting) -> DraftSizes | None:
    """What a drafter on the device keeps; None without one."""
    if not options.speculative.drafts or options.speculative.drafts_on_host:
        return None
    if isinstance(head, ModelConfig):
        return DraftSizes.of_model(head)
    return DraftSizes(model, 1, 0, True) if head is None else head.sizes


def _block_size(head: Drafting) -> int | None:
    """Of a head that drafts blocks."""
    return head.block.size if isinstance(head, DraftConfig) and head.block else None


def _kv_bytes(config: ModelConfig, limits: Limits, item: int) -> int:
    """Keys and values of one layer."""
    positions = limits.num_pages * limits.page_size
    return positions * 2 * config.num_kv_heads * config.head_size * item


def _weights_line(name: str, options: Options, wanted: list[Parameter]) -> MemoryLine:
    item = ITEM_BYTES[options.model.dtype]
    num_bytes = sum(prod(p.shape) * (4 if p.float32 else item) for p in wanted)
    count = sum(prod(p.shape) for p in wanted)
    return MemoryLine(name, f"{count:,} parameters in {options.model.dtype}", num_bytes)


def _state_lines(model: ModelConfig, limits: Limits, item: int, whose: str) -> Iterator[MemoryLine]:
    delta = model.gated_delta
    if delta is None:
        return
    layer_bytes = model.num_gated_delta_layers * state_layer_bytes(model, item)
    for name, count in (("state", limits.num_slots), ("snapshots", limits.num_snapshots)):
        detail = f"{count - 1} x {layer_bytes:,} bytes, and a sink"
        yield MemoryLine(f"{whose}{name}", detail, count * layer_bytes)


def _program(
    work: Work, batch: int, pages: int, tokens: int, shape: TreeShape, logprobs: bool
) -> Program:
    return Program(
        work=work,
        batch=batch,
        pages=pages,
        tokens=tokens,
        shape=shape,
        host_draft=False,
        mask=False,
        logprobs=logprobs,
    )


def draft_shape(options: Options, batch: int) -> TreeShape:
    """The shape that a start without open values drafts with; plain where nothing drafts."""
    draft = options.speculative
    if not draft.drafts:
        return TreeShape.plain(batch)
    N = draft.num_draft_tokens
    return TreeShape(N, draft.num_steps, draft.topk, batch * N)


def _reach(options: Options, context: int) -> int:
    """Positions that one request may write: its tokens, all steps in flight, and the scratch."""
    shape = draft_shape(options, 1)
    return context + (options.engine.overlap_depth + 1) * shape.max_tokens + shape.scratch


def _pages_for(options: Options, context: int) -> int:
    """Pages of one request."""
    return -(-_reach(options, context) // _given(options.engine.page_size))


def _page_tables(last: int) -> tuple[int, ...]:
    """Powers of 4 up to `last`; one that would spare less than half of the last is left out."""
    powers = _powers(SMALLEST_PAGE_TABLE, 4, last)
    return (*(pages for pages in powers[:-1] if 2 * pages <= last), last)


def _powers(first: int, factor: int, last: int) -> tuple[int, ...]:
    """The powers first * factor^i below `last`, and `last`."""
    found = []
    while first < last:
        found.append(first)
        first *= factor
    return (*found, last)


def _given(value: int | None) -> int:
    """A setting that the defaults have filled in."""
    if value is None:
        raise ValueError("a setting was left open")
    return value


def _available_bytes() -> int:
    """Linux's estimate of memory that can be had without swapping; 0 elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else 0
