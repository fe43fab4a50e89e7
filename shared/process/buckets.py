"""Enumerates the programs to compile or capture: one per bucket of batch size, context pages and
prefill tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from shared.boundary.adapter_pool import AdapterPoolSpec
from shared.boundary.backend import BackendLimits, BackendSpec
from shared.boundary.images import EncoderCacheSpec
from shared.boundary.ngram_table import ENTRY_BYTES, NgramTableSpec
from shared.boundary.program import CAPTURED, Program, ProgramFeature, StepKind
from shared.models.config import ModelConfig
from shared.options.adaptive import MOST_NODES, Candidate
from shared.options.engine import CHUNK_ALIGNMENT, MAX_LOGPROBS
from shared.options.ngram import MIN_CAPACITY, REQUEST
from shared.options.options import Options
from shared.process.device import Device
from shared.process.image_startup import encode_programs
from shared.process.resolved_config import ResolvedConfig
from shared.spec.draft_tree import TreeShape
from shared.spec.ngram import LENGTHS, WAYS

SMALLEST_PAGE_TABLE = 16
MOST_PREFILL_ROWS = 8
MAX_STOP_IDS = 16
MAX_BIAS = 64
FEW_ROWS = 64
"""Verify rows up to which a step takes little longer than with half of them."""

MAX_NGRAM_SHARE = 0.02
"""Maximum fraction of a device's free memory for an n-gram table of the default capacity."""


@dataclass(frozen=True)
class ProgramCosts:
    """Costs of a backend's programs, known before it is created.

    Attributes:
      workspace: Returns the bytes that a step of a program needs beyond the pools.
      are_compiled: True if each program is compiled at startup, which takes seconds on a CPU.
      has_shm_all_gather: True if its ranks use the shared-memory all-gather on a CPU.
      captures: True if it may capture steps on a GPU as graphs.
      symmetric_buffer_bytes: Returns the bytes of the all-gather buffers on each of several GPUs;
        raises ValueError for an unsupported number.
    """

    workspace: Callable[[Program, BackendSpec], int]
    are_compiled: bool
    has_shm_all_gather: bool = False
    captures: bool = False
    symmetric_buffer_bytes: Callable[[int], int] = lambda count: 0


def capacity_for(
    settled: ResolvedConfig,
    pages: int,
    model: ModelConfig,
    device: Device,
    costs: ProgramCosts,
    images: EncoderCacheSpec | None = None,
    adapters: AdapterPoolSpec | None = None,
) -> BackendLimits:
    """Returns the limits of a backend: a number of pages, other pools, and one program per bucket.

    A step uses the smallest program that holds it, so buckets save work; see `BUCKETS`. Programs
    with grammar masks, and programs with prompt logprobs, are few on a GPU.
    """
    engine = settled.options.engine
    table = max(1, min(pages, pages_for(settled, settled.context_length)))
    buckets = BUCKETS[device.kind, costs.are_compiled](settled, table)
    programs = _programs(settled, buckets)
    if settled.reduced_buckets:
        programs = _few(programs)
    if engine.max_prompt_logprobs:
        rows = max(rows for rows, _ in buckets.chunks)
        programs += _scoring(rows, _chunks(settled.prefill_chunk_size), buckets.tables)
    plain = TreeShape.plain(1)
    if engine.has_grammars:
        masked = _masked(settled, programs)
        if settled.reduced_buckets or device.kind == "gpu":
            masked = _some(settled, masked)
        if settled.reduced_buckets:  # one program serves batches with and without grammars
            unmasked = {program.with_features({ProgramFeature.MASK: False}) for program in masked}
            programs = [program for program in programs if program not in unmasked]
        programs += masked
    if not engine.disable_radix_cache:
        programs.append(
            _program(
                StepKind.COUNT, 1, table, settled.prefill_chunk_size, plain, ProgramFeature.NONE
            )
        )
    if images is not None:
        programs += encode_programs(images, settled.reduced_buckets)
    if engine.shadow_verify_rate and not any(_decodes_plainly(program) for program in programs):
        programs.append(_program(StepKind.DECODE, 1, table, 0, plain, ProgramFeature.LOGPROBS))
    if adapters is not None:
        adapted = [program for program in programs if program.work in adapters.step_kinds]
        programs += [program.with_features({ProgramFeature.LORA: True}) for program in adapted]
        programs += adapters.programs
    return BackendLimits(
        page_size=settled.page_size,
        num_pages=1 + pages,
        num_slots=1 + settled.max_running_requests,
        num_snapshots=1,
        programs=tuple(programs),
        overlap=settled.overlap,
        context_length=settled.context_length,
        vocab=model.vocab,
        max_stop_ids=MAX_STOP_IDS,
        max_bias=MAX_BIAS,
        max_logprobs=MAX_LOGPROBS,
        max_scores=engine.max_prompt_logprobs,
        accept_rule=settled.draft.verification,
        accept_rates=settled.draft.accept_rates,
        images=images,
        texts=ngram_table(settled, device),
        adapters=adapters,
    )


def ngram_table(settled: ResolvedConfig, device: Device) -> NgramTableSpec | None:
    """Returns the n-gram table on the device; None if no drafter uses one.

    The default capacity is limited to a fraction of the free memory, an explicit one is not.
    """
    draft, ngram = settled.draft, settled.options.ngram
    if not draft.drafts_from_table:
        return None
    capacity = ngram.speculative_ngram_capacity
    if "speculative_ngram_capacity" not in settled.options.explicit_flags:
        fitting = int(MAX_NGRAM_SHARE * device.free_bytes) // ENTRY_BYTES
        capacity = max(MIN_CAPACITY, min(capacity, fitting))
    entries = 1 << (capacity.bit_length() - 1)
    by_request = ngram.speculative_ngram_scope == REQUEST
    return NgramTableSpec(groups=entries // (len(LENGTHS) * WAYS), by_request=by_request)


@dataclass(frozen=True)
class Buckets:
    """Sizes of the programs of a server.

    Attributes:
      batches: Requests of a decode step.
      chunks: Rows and tokens of a prefill.
      tables: Pages of a request.
    """

    batches: Sequence[int]
    chunks: Sequence[tuple[int, int]]
    tables: Sequence[int]


def _on_gpu(settled: ResolvedConfig, table: int) -> Buckets:
    """Returns the buckets on a GPU, with one page table: work depends on the longest row, not on
    the table.

    Prefills of several prompts have many tokens; for few tokens a wider program costs little.
    """
    requests, most = settled.max_running_requests, settled.prefill_chunk_size
    chunks = [
        (rows, tokens)
        for rows in _prefill_rows(requests)
        for tokens in _powers(CHUNK_ALIGNMENT, 2, most)
        if tokens >= min(rows * CHUNK_ALIGNMENT, most)
    ]
    return Buckets(_powers(1, 2, requests), chunks, (table,))


def _on_cpu(settled: ResolvedConfig, table: int) -> Buckets:
    """Returns the buckets on a CPU, with several page tables: fallback attention gathers all
    pages.
    """
    requests = settled.max_running_requests
    chunks = list(product(_prefill_rows(requests), _chunks(settled.prefill_chunk_size)))
    return Buckets(_powers(1, 4, requests), chunks, _page_tables(table))


def _compiled_on_cpu(settled: ResolvedConfig, table: int) -> Buckets:
    """Returns few buckets, because each program takes seconds to compile.

    A prefill has one prompt. Only the largest programs have logprobs, which a CPU computes only for
    rows that request them; a GPU always computes what its program has.
    """
    chunks = list(product([1], _chunks(settled.prefill_chunk_size)))
    return Buckets(sorted({1, settled.max_running_requests}), chunks, (table,))


BUCKETS = {
    ("gpu", False): _on_gpu,
    ("gpu", True): _on_gpu,
    ("cpu", False): _on_cpu,
    ("cpu", True): _compiled_on_cpu,
}
"""Buckets by the kind of device, and whether programs are compiled at startup."""


def captured_step_kinds(options: Options) -> tuple[StepKind, ...]:
    """Returns the kinds of steps that torch captures as CUDA graphs."""
    engine = options.engine
    if engine.disable_cuda_graph:
        return ()
    of_prompts = (StepKind.PREFILL, StepKind.ENCODE) if engine.disable_piecewise_cuda_graph else ()
    return tuple(work for work in CAPTURED if work not in of_prompts)


def _programs(settled: ResolvedConfig, buckets: Buckets) -> list[Program]:
    """Returns all programs of these sizes; host-built trees may be absent, so they have a plain
    twin.
    """
    on_host = settled.draft.drafts_on_host
    prefills = [
        _program(StepKind.PREFILL, batch, pages, tokens, TreeShape.plain(batch), extras)
        for batch, tokens in buckets.chunks
        for pages in buckets.tables
        for extras in (ProgramFeature.NONE, ProgramFeature.LOGPROBS)
    ]
    decodes = [
        _program(StepKind.DECODE, batch, pages, 0, shape, extras)
        for batch in buckets.batches
        for pages in buckets.tables
        for shape in decode_shapes(settled, batch)
        for extras in (ProgramFeature.NONE, ProgramFeature.LOGPROBS)
    ]
    if on_host:
        decodes = [
            p.with_features({ProgramFeature.HOST_DRAFT: not p.shape.is_plain}) for p in decodes
        ]
    elif settled.draft.drafts_from_table:
        decodes = [
            p.with_features({ProgramFeature.DEVICE_NGRAM: not p.shape.is_plain}) for p in decodes
        ]
    decodes = [p.with_features({ProgramFeature.NGRAM_DRAFTS: p.shape.copied > 0}) for p in decodes]
    return decodes + prefills


def _decodes_plainly(program: Program) -> bool:
    """Returns True for plain decode programs with logprobs."""
    is_plain = program.work is StepKind.DECODE and program.shape.is_plain
    return is_plain and program.has(ProgramFeature.LOGPROBS)


def _masked(settled: ResolvedConfig, programs: Sequence[Program]) -> list[Program]:
    """Returns the variants of decode programs that take grammar masks.

    The host needs the trees before verification, so with a drafter on the device there is also a
    draft program for each. With adaptive speculation there is only one shape.
    """
    # N-gram drafts are not merged into trees that the host receives before verification.
    decodes = [
        p for p in programs if p.work is StepKind.DECODE and not p.has(ProgramFeature.NGRAM_DRAFTS)
    ]
    if settled.draft.joins_copies:  # plain steps are for batches without a grammar
        decodes = [p for p in decodes if not p.shape.is_plain]
    if settled.candidates:
        plain = [p for p in decodes if p.shape.is_plain]
        trees = [replace(p, shape=grammar_shape(settled, p.batch)) for p in plain]
        decodes = [*plain, *trees] if settled.draft.drafts_on_host else trees
    brought = [p.with_features({ProgramFeature.HOST_DRAFT: not p.shape.is_plain}) for p in decodes]
    masked = [
        p.with_features({ProgramFeature.MASK: True, ProgramFeature.DEVICE_NGRAM: False})
        for p in brought
    ]
    if not settled.draft.drafts or settled.draft.drafts_on_host:
        return masked
    drafts = [
        replace(p, work=StepKind.DRAFT, extras=p.extras & ~ProgramFeature.LOGPROBS) for p in decodes
    ]
    return [*masked, *dict.fromkeys(drafts)]


def _some(settled: ResolvedConfig, masked: Sequence[Program]) -> list[Program]:
    """Returns a subset of the programs with masks, each of which costs memory or startup time.

    Batches without a grammar do not run them, so they exist for every second batch bucket; with
    slow compilation, only for the largest.
    """
    batches = sorted({program.batch for program in masked}, reverse=True)
    wanted = batches[:1] if settled.reduced_buckets else batches[::2]
    return [program for program in _few(masked) if program.batch in wanted]


def _scoring(rows: int, chunks: Sequence[int], tables: Sequence[int]) -> list[Program]:
    """Returns the prefill programs with prompt logprobs."""
    both = ProgramFeature.LOGPROBS | ProgramFeature.PROMPT_LOGPROBS
    return [
        _program(StepKind.PREFILL, rows, pages, tokens, TreeShape.plain(rows), both)
        for tokens in chunks
        for pages in tables
    ]


def _few(programs: Sequence[Program]) -> list[Program]:
    """Returns one program per size: with logprobs if it is the largest of its kind and tree."""
    widest: dict[tuple[StepKind, tuple[int, int, int]], Program] = {}
    for program in programs:  # ascending
        widest[program.work, program.shape.tree] = _with_logprobs(program)
    return [
        program
        for program in programs
        if program.has(ProgramFeature.LOGPROBS) is (_with_logprobs(program) in widest.values())
        or program.work is StepKind.DRAFT
    ]


def _with_logprobs(program: Program) -> Program:
    return program.with_features({ProgramFeature.LOGPROBS: True})


def _chunks(most: int) -> list[int]:
    """Returns few prefill sizes: the maximum, and an eighth of it."""
    return sorted({-(-most // 8 // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT, most})


def _prefill_rows(requests: int) -> list[int]:
    return sorted({1, min(MOST_PREFILL_ROWS, requests)})


def draft_shape(settled: ResolvedConfig, batch: int) -> TreeShape:
    """Returns the widest draft shape of a server; plain without drafting."""
    return decode_shapes(settled, batch)[-1]


def grammar_shape(settled: ResolvedConfig, batch: int) -> TreeShape:
    """Returns the draft shape of batches with a grammar in adaptive speculation, with all verify
    rows.

    With host-built trees it is the largest candidate. With a drafter on the device it is the middle
    one, because all batch sizes use it.
    """
    largest = len(settled.candidates) - 1
    chosen = largest if settled.draft.drafts_on_host else largest // 2
    return _shape(replace(settled.candidates[chosen], rows=1.0), batch)


def decode_shapes(settled: ResolvedConfig, batch: int) -> list[TreeShape]:
    """Returns all decode shapes for a batch size, the smallest first.

    Plain decoding is included with adaptive speculation, or if the host may have no draft tokens.
    """
    draft, plain = settled.draft, TreeShape.plain(batch)
    if not draft.drafts:
        return [plain]
    if settled.candidates:
        return [plain, *(_shape(each, batch) for each in settled.candidates)]
    block = settled.block if draft.topk > 1 else 0  # the nodes of its chain cover the block
    own = Candidate(draft.num_steps, draft.topk, draft.num_draft_tokens, block=block)
    drafting = _shape(own, batch)
    if draft.joins_copies:
        joined = [merged_shape(settled, own, batch) for own in (plain, drafting)]
        is_measured = settled.options.adaptive.speculative_adaptive
        return [*([plain] if is_measured else []), drafting, *joined]
    return [plain, drafting] if draft.drafts_on_host else [drafting]


def merged_shape(settled: ResolvedConfig, own: TreeShape, batch: int) -> TreeShape:
    """Returns the shape of the drafter's trees (which may be plain) merged with n-gram drafts.

    One n-gram path extends as far ahead as the steps in flight may get, and the same number of
    nodes are branches. Half of the n-gram nodes that fit into a tree have verify rows; for small
    batches all have, because rows cost little there.
    """
    copies = settled.options.ngram.num_copies
    nodes, deepest = own.nodes + copies, max(settled.draft.num_steps, copies)
    rows = max(FEW_ROWS, batch * own.nodes + batch * copies // 2)
    ahead = settled.overlap * (deepest + 1)
    return TreeShape(
        nodes=nodes,
        depth=max(own.depth, copies),
        width=max(own.width, 1),
        rows=min(batch * nodes, rows),
        grown=own,
        copied=min(MOST_NODES, 1 + ahead + 2 * copies),
    )


def _shape(candidate: Candidate, batch: int) -> TreeShape:
    rows = max(batch, round(batch * candidate.nodes * candidate.rows))
    return TreeShape(candidate.nodes, candidate.steps, candidate.topk, rows, candidate.block)


def _program(
    work: StepKind, batch: int, pages: int, tokens: int, shape: TreeShape, extras: ProgramFeature
) -> Program:
    return Program(work=work, batch=batch, pages=pages, tokens=tokens, shape=shape, extras=extras)


def _reach(settled: ResolvedConfig, context: int) -> int:
    """Returns the positions that one request may write: its tokens, all steps in flight, and the
    scratch.
    """
    shapes = decode_shapes(settled, 1)
    max_tokens, scratch = (max(getattr(s, n) for s in shapes) for n in ("max_tokens", "scratch"))
    return context + (settled.overlap + 1) * max_tokens + scratch


def pages_for(settled: ResolvedConfig, context: int) -> int:
    """Returns the maximum pages of a request of `context` positions, including scratch."""
    return -(-_reach(settled, context) // settled.page_size)


def _page_tables(last: int) -> tuple[int, ...]:
    """Returns powers of 4 up to `last`, without those above half of it."""
    powers = _powers(SMALLEST_PAGE_TABLE, 4, last)
    return (*(pages for pages in powers[:-1] if 2 * pages <= last), last)


def _powers(first: int, factor: int, last: int) -> tuple[int, ...]:
    """Returns the powers first * factor^i below `last`, and `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)
