"""Which programs a start asks of its backend: one for each bucket of sizes that a step may need."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from shared.boundary.backend import Blueprint, Capacity
from shared.boundary.images import PicturePool
from shared.boundary.ngram_table import TextTable
from shared.boundary.program import CAPTURED, Extra, Program, Work
from shared.models.config import ModelConfig
from shared.options.adaptive import MOST_NODES, Candidate
from shared.options.engine import CHUNK_ALIGNMENT, MAX_LOGPROBS
from shared.options.ngram import REQUEST
from shared.options.options import Options
from shared.process.device import Device
from shared.process.image_startup import encodings
from shared.process.resolved_config import Settled
from shared.spec.draft_tree import TreeShape
from shared.spec.ngram import LENGTHS, WAYS

SMALLEST_PAGE_TABLE = 16
MOST_PREFILL_ROWS = 8
MAX_STOP_IDS = 16
MAX_BIAS = 64
FEW_ROWS = 64
"""Verify rows that a step takes in little more time than half of them."""


@dataclass(frozen=True)
class ProgramCosts:
    """What a backend says of its programs before it is made.

    Attributes:
      workspace: Bytes that a step of a program works on beside the pools.
      are_compiled: On a CPU each program takes seconds of the start, so there are few.
      has_mailboxes: Whether its ranks exchange through mailboxes on a CPU.
      captures: Whether it has steps on a GPU that it may capture or not.
      device_mailbox_bytes: Of those on each of so many GPUs; raises a ValueError where ranks cannot
        be so many.
    """

    workspace: Callable[[Program, Blueprint], int]
    are_compiled: bool
    has_mailboxes: bool = False
    captures: bool = False
    device_mailbox_bytes: Callable[[int], int] = lambda count: 0


def capacity_for(
    settled: Settled,
    pages: int,
    model: ModelConfig,
    device: Device,
    costs: ProgramCosts,
    pictures: PicturePool | None = None,
) -> Capacity:
    """What a backend provides: so many pages, other pools, and one program per bucket.

    A step takes the smallest program that holds it, so buckets spare work; see `BUCKETS`. Those
    with masks, which a start has where it was told of grammars, are few on a GPU, and so are those
    that score whole prompts.
    """
    engine = settled.told.engine
    table = max(1, min(pages, pages_for(settled, settled.context_length)))
    buckets = BUCKETS[device.kind, costs.are_compiled](settled, table)
    programs = _programs(settled, buckets)
    if settled.are_few:
        programs = _few(programs)
    if engine.max_prompt_logprobs:
        rows = max(rows for rows, _ in buckets.chunks)
        programs += _scoring(rows, _chunks(settled.chunk), buckets.tables)
    plain = TreeShape.plain(1)
    if engine.has_grammars:
        masked = _masked(settled, programs)
        if settled.are_few or device.kind == "gpu":
            masked = _some(settled, masked)
        if settled.are_few:  # one program serves batches with grammars and without
            unmasked = {program.having({Extra.MASK: False}) for program in masked}
            programs = [program for program in programs if program not in unmasked]
        programs += masked
    if not engine.disable_radix_cache:
        programs.append(_program(Work.COUNT, 1, table, settled.chunk, plain, Extra.NONE))
    if pictures is not None:
        programs += encodings(pictures, settled.are_few)
    if engine.shadow_verify_rate and not any(_decodes_plainly(program) for program in programs):
        programs.append(_program(Work.DECODE, 1, table, 0, plain, Extra.LOGPROBS))
    return Capacity(
        page_size=settled.page_size,
        num_pages=1 + pages,
        num_slots=1 + settled.most_requests,
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
        pictures=pictures,
        texts=text_table(settled),
    )


def text_table(settled: Settled) -> TextTable | None:
    """The table of n-grams on the device; None where nothing drafts from one."""
    draft, told = settled.draft, settled.told.ngram
    if not draft.drafts_from_table:
        return None
    entries = 1 << (told.speculative_ngram_capacity.bit_length() - 1)
    by_request = told.speculative_ngram_scope == REQUEST
    return TextTable(groups=entries // (len(LENGTHS) * WAYS), by_request=by_request)


@dataclass(frozen=True)
class Buckets:
    """Sizes of which a start has programs.

    Attributes:
      batches: Requests of a decode step.
      chunks: Rows and tokens of a prefill.
      tables: Pages of a request.
    """

    batches: Sequence[int]
    chunks: Sequence[tuple[int, int]]
    tables: Sequence[int]


def _on_gpu(settled: Settled, table: int) -> Buckets:
    """Kernels and compiled programs follow the longest row, so one page table does.

    Several prompts are many tokens; where they are few, a wider program costs little.
    """
    requests, most = settled.most_requests, settled.chunk
    chunks = [
        (rows, tokens)
        for rows in _prefill_rows(requests)
        for tokens in _powers(CHUNK_ALIGNMENT, 2, most)
        if tokens >= min(rows * CHUNK_ALIGNMENT, most)
    ]
    return Buckets(_powers(1, 2, requests), chunks, (table,))


def _on_cpu(settled: Settled, table: int) -> Buckets:
    """Plain attention gathers all pages of a table, so there are several tables."""
    requests = settled.most_requests
    chunks = list(product(_prefill_rows(requests), _chunks(settled.chunk)))
    return Buckets(_powers(1, 4, requests), chunks, _page_tables(table))


def _compiled_on_cpu(settled: Settled, table: int) -> Buckets:
    """Each program takes seconds of the start, so there are few.

    A prompt is prefilled by itself, and the widest programs alone have logprobs, which a CPU
    computes only where a row reports them; a GPU always computes what its program has.
    """
    chunks = list(product([1], _chunks(settled.chunk)))
    return Buckets(sorted({1, settled.most_requests}), chunks, (table,))


BUCKETS = {
    ("gpu", False): _on_gpu,
    ("gpu", True): _on_gpu,
    ("cpu", False): _on_cpu,
    ("cpu", True): _compiled_on_cpu,
}
"""By the kind of device, and whether programs are compiled at the start."""


def captured_works(options: Options) -> tuple[Work, ...]:
    """The works whose steps torch captures on a GPU."""
    engine = options.engine
    if engine.disable_cuda_graph:
        return ()
    of_prompts = (Work.PREFILL, Work.ENCODE) if engine.disable_piecewise_cuda_graph else ()
    return tuple(work for work in CAPTURED if work not in of_prompts)


def _programs(settled: Settled, buckets: Buckets) -> list[Program]:
    """Every program of these sizes; a tree of the host's may be missing, so it has a plain twin."""
    on_host = settled.draft.drafts_on_host
    prefills = [
        _program(Work.PREFILL, batch, pages, tokens, TreeShape.plain(batch), extras)
        for batch, tokens in buckets.chunks
        for pages in buckets.tables
        for extras in (Extra.NONE, Extra.LOGPROBS)
    ]
    decodes = [
        _program(Work.DECODE, batch, pages, 0, shape, extras)
        for batch in buckets.batches
        for pages in buckets.tables
        for shape in decode_shapes(settled, batch)
        for extras in (Extra.NONE, Extra.LOGPROBS)
    ]
    if on_host:
        decodes = [p.having({Extra.HOST_DRAFT: not p.shape.is_plain}) for p in decodes]
    elif settled.draft.drafts_from_table:
        decodes = [p.having({Extra.TEXTS: not p.shape.is_plain}) for p in decodes]
    decodes = [p.having({Extra.COPIES: p.shape.copied > 0}) for p in decodes]
    return decodes + prefills


def _decodes_plainly(program: Program) -> bool:
    """Whether it serves a plain step of any request, with logprobs."""
    is_plain = program.work is Work.DECODE and program.shape.is_plain
    return is_plain and program.has(Extra.LOGPROBS)


def _masked(settled: Settled, programs: Sequence[Program]) -> list[Program]:
    """The twins of decode programs that take masks of grammars.

    Trees come to the host before they are verified, so where the device drafts there is a program
    that only drafts for each. Where the shape is chosen step by step there is one of them alone.
    """
    # Copies join no tree that comes to the host before it is verified.
    decodes = [p for p in programs if p.work is Work.DECODE and not p.has(Extra.COPIES)]
    if settled.draft.joins_copies:  # a plain step is for batches without a grammar
        decodes = [p for p in decodes if not p.shape.is_plain]
    if settled.candidates:
        plain = [p for p in decodes if p.shape.is_plain]
        trees = [replace(p, shape=masked_shape(settled, p.batch)) for p in plain]
        decodes = [*plain, *trees] if settled.draft.drafts_on_host else trees
    brought = [p.having({Extra.HOST_DRAFT: not p.shape.is_plain}) for p in decodes]
    masked = [p.having({Extra.MASK: True, Extra.TEXTS: False}) for p in brought]
    if not settled.draft.drafts or settled.draft.drafts_on_host:
        return masked
    drafts = [replace(p, work=Work.DRAFT, extras=p.extras & ~Extra.LOGPROBS) for p in decodes]
    return [*masked, *dict.fromkeys(drafts)]


def _some(settled: Settled, masked: Sequence[Program]) -> list[Program]:
    """Programs with masks where each costs memory or seconds of the start.

    Batches without a grammar do not run them, so they have every second batch bucket; where each
    program takes seconds of a processor, the widest alone.
    """
    batches = sorted({program.batch for program in masked}, reverse=True)
    wanted = batches[:1] if settled.are_few else batches[::2]
    return [program for program in _few(masked) if program.batch in wanted]


def _scoring(rows: int, chunks: Sequence[int], tables: Sequence[int]) -> list[Program]:
    """The programs of prompts whose tokens are all scored."""
    both = Extra.LOGPROBS | Extra.SCORES
    return [
        _program(Work.PREFILL, rows, pages, tokens, TreeShape.plain(rows), both)
        for tokens in chunks
        for pages in tables
    ]


def _few(programs: Sequence[Program]) -> list[Program]:
    """Of each size one: with logprobs if it is the widest of its work and shape of tree."""
    widest: dict[tuple[Work, tuple[int, int, int]], Program] = {}
    for program in programs:  # in ascending order
        widest[program.work, program.shape.tree] = _with_logprobs(program)
    return [
        program
        for program in programs
        if program.has(Extra.LOGPROBS) is (_with_logprobs(program) in widest.values())
        or program.work is Work.DRAFT
    ]


def _with_logprobs(program: Program) -> Program:
    return program.having({Extra.LOGPROBS: True})


def _chunks(most: int) -> list[int]:
    """Sizes of chunks where each costs something at the start: all, and an eighth."""
    return sorted({-(-most // 8 // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT, most})


def _prefill_rows(requests: int) -> list[int]:
    return sorted({1, min(MOST_PREFILL_ROWS, requests)})


def draft_shape(settled: Settled, batch: int) -> TreeShape:
    """The widest shape that a start drafts with; plain where nothing drafts."""
    return decode_shapes(settled, batch)[-1]


def masked_shape(settled: Settled, batch: int) -> TreeShape:
    """The one candidate that batches with a grammar draft with, every request with all its rows.

    The host's trees are as large as the largest. The device drafts the one in the middle: a batch
    of each size has to do with it.
    """
    largest = len(settled.candidates) - 1
    chosen = largest if settled.draft.drafts_on_host else largest // 2
    return _shape(replace(settled.candidates[chosen], rows=1.0), batch)


def decode_shapes(settled: Settled, batch: int) -> list[TreeShape]:
    """Every shape of a decode step in a batch of this size, the smallest first.

    Where the shape is chosen step by step, or the host may have no draft, plain decoding is one.
    """
    draft, plain = settled.draft, TreeShape.plain(batch)
    if not draft.drafts:
        return [plain]
    if settled.candidates:
        return [plain, *(_shape(each, batch) for each in settled.candidates)]
    drafting = _shape(Candidate(draft.num_steps, draft.topk, draft.num_draft_tokens), batch)
    if draft.joins_copies:
        joined = [joined_shape(settled, own, batch) for own in (plain, drafting)]
        is_measured = settled.told.adaptive.speculative_adaptive
        return [*([plain] if is_measured else []), drafting, *joined]
    return [plain, drafting] if draft.drafts_on_host else [drafting]


def joined_shape(settled: Settled, own: TreeShape, batch: int) -> TreeShape:
    """What the drafter grows, joined by copies of seen text; it may grow nothing.

    One path of copies reaches as far ahead as the steps in flight may get, and as many nodes more
    are branches. Half of those that a tree has room for have verify rows; where rows are few all
    have, as they cost next to nothing.
    """
    copies = settled.told.ngram.num_copies
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
    work: Work, batch: int, pages: int, tokens: int, shape: TreeShape, extras: Extra
) -> Program:
    return Program(work=work, batch=batch, pages=pages, tokens=tokens, shape=shape, extras=extras)


def _reach(settled: Settled, context: int) -> int:
    """Positions that one request may write: its tokens, all steps in flight, and the scratch."""
    shapes = decode_shapes(settled, 1)
    most_tokens, scratch = (max(getattr(s, n) for s in shapes) for n in ("max_tokens", "scratch"))
    return context + (settled.overlap + 1) * most_tokens + scratch


def pages_for(settled: Settled, context: int) -> int:
    """Most pages that one request of `context` positions may hold, scratch included."""
    return -(-_reach(settled, context) // settled.page_size)


def _page_tables(last: int) -> tuple[int, ...]:
    """Powers of 4 up to `last`; one that would spare less than half of the last is left out."""
    powers = _powers(SMALLEST_PAGE_TABLE, 4, last)
    return (*(pages for pages in powers[:-1] if 2 * pages <= last), last)


def _powers(first: int, factor: int, last: int) -> tuple[int, ...]:
    """The powers first * factor^i below `last`, and `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)
