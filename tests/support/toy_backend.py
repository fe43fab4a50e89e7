"""Toy backend: its next token is a hash of every token that is visible to a row.

Its pages store tokens in place of keys and values, so one wrong page, length, order or parameter
changes the output. With snapshots it has a recurrent state too, a hash of all tokens of its slot.
Its draft memory and its token counts are compared with the text, and a difference raises at once.
So is the memory of each window pool, at the positions visible to its rows.
It is as late as a device may be: a step runs when its result is requested, and reads its plan only
then.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from shared.boundary.backend import BackendLimits, CountPromptTokens, Prefill, StepPlan, StepResult
from shared.boundary.program import LaunchMode, Program, ProgramFeature, StepKind
from shared.boundary.transfer_spec import ExportKV, ImportKV
from shared.boundary.window_pools import WindowPool
from shared.spec.draft_tree import TreeShape
from shared.spec.gated_delta import CHUNK
from shared.spec.logprobs import Logprobs, PromptLogprobs
from tests.support import toy_transfer
from tests.support.limits import make_limits, make_program

VOCAB = 97
POISON = VOCAB - 1  # a prompt with this token fails; the toy never chooses it


def next_token(context: Iterable[int], seed: int) -> int:
    """The toy's model and sampler in one."""
    return zlib.crc32(np.array([*context, seed % 1000], np.int32).tobytes()) % POISON


def plain(prompt: tuple[int, ...], seed: int, max_tokens: int, stop: tuple[int, ...]) -> list[int]:
    """The text of a request, one token at a time."""
    output: list[int] = []
    while len(output) < max_tokens and not (output and output[-1] in stop):
        output.append(next_token([*prompt, *output], seed))
    return output


def hashed(state: int, tokens: Iterable[int]) -> int:
    """The recurrent state after more tokens."""
    return zlib.crc32(np.array([*tokens], np.int32).tobytes(), state)


def toy_capacity(
    *,
    num_pages: int,
    num_slots: int,
    overlap: int,
    page_size: int = 4,
    context_length: int = 256,
    depths: tuple[int, ...] = (0, 3),
    batch_sizes: tuple[int, ...] = (2, 4),
    num_snapshots: int = 1,
    max_scores: int = 0,
    window_pools: tuple[WindowPool, ...] = (),
) -> BackendLimits:
    """A capacity with two page-table sizes, two prefill sizes and chains of the given depths.

    Where prompts are scored, the widest prefill has a twin that does it.
    """

    def program(work: StepKind, batch: int, pages: int, tokens: int, depth: int) -> Program:
        return make_program(
            work,
            TreeShape.chain(depth, batch),
            tokens,
            batch=batch,
            pages=pages,
            extras=ProgramFeature.NONE if work is StepKind.COUNT else ProgramFeature.LOGPROBS,
        )

    sizes = [(batch, pages) for batch in batch_sizes for pages in (16, 128)]
    prefills = [program(StepKind.PREFILL, b, p, t, 0) for b, p in sizes for t in (64, 128)]
    if max_scores:
        prefills.append(prefills[-1].with_features({ProgramFeature.PROMPT_LOGPROBS: True}))
    decodes = [program(StepKind.DECODE, b, p, 0, depth) for b, p in sizes for depth in depths]
    return make_limits(
        (*prefills, *decodes, program(StepKind.COUNT, 1, 128, 24, 0)),
        page_size=page_size,
        num_pages=num_pages,
        num_slots=num_slots,
        num_snapshots=num_snapshots,
        overlap=overlap,
        context_length=context_length,
        vocab=VOCAB,
        max_stop_ids=2,
        max_logprobs=2,
        max_scores=max_scores,
        window_pools=window_pools,
    )


def _chain(found: list[int], depth: int) -> list[int]:
    """Drafts of which the target took all but the last of these tokens; the others are wrong."""
    right = found[:-1]
    return [*right, *[(found[-1] + 1) % POISON] * (depth - len(right))]


class ToyFuture:
    """Runs its step, and those before it, on request."""

    def __init__(self, backend: ToyBackend) -> None:
        self._backend = backend
        self.value: StepResult | None = None

    def result(self) -> StepResult:
        while self.value is None:
            self._backend.run_next()
        return self.value


class ToyBackend:
    """A backend that drafts right two times in three.

    Args:
      draft_reach: A row of its draft memory knows the token so far behind it, 0 or 1; None: it has
        no draft memory.

    Attributes:
      num_fed: Tokens of prompts that its prefills have fed.
    """

    def __init__(self, capacity: BackendLimits, draft_reach: int | None = 1) -> None:
        self.capacity, self._draft_reach = capacity, draft_reach
        self.is_closed = False
        self._pages = np.full((capacity.num_pages, capacity.page_size), -1, np.int32)
        self._window_pages = [
            np.full((pool.num_pages, capacity.page_size), -1, np.int32)
            for pool in capacity.window_pools
        ]
        self._lengths = np.zeros(capacity.num_slots, np.int32)
        self._newest = np.zeros(capacity.num_slots, np.int32)
        self._draft_pages = np.full((capacity.num_pages, capacity.page_size), -1, np.int32)
        self._draft_from = np.zeros(capacity.num_slots, np.int32)
        self._states = np.zeros(capacity.num_slots, np.int64)
        self._snapshots = np.full(capacity.num_snapshots, -1, np.int64)
        self._seen = [Counter[int]() for _ in range(capacity.num_slots)]
        self._counted: set[int] = set()
        self.num_fed = 0
        self._queue: deque[tuple[StepPlan, ToyFuture]] = deque()

    def launch(self, program: Program) -> LaunchMode:
        return LaunchMode.EAGER

    def submit(self, plan: StepPlan) -> ToyFuture:
        future = ToyFuture(self)
        self._queue.append((plan, future))
        return future

    def close(self) -> None:
        self.is_closed = True

    def run_next(self) -> None:
        plan, future = self._queue.popleft()
        B, W = plan.program.batch, plan.program.shape.max_tokens
        tokens = np.zeros((B, W), np.int32)
        failed = np.zeros(B, np.int32)
        counts, saved = np.zeros(B, np.int32), np.zeros(B, np.int32)
        drafts = np.zeros((B, plan.program.shape.nodes), np.int32)
        parents = np.repeat(np.arange(drafts.shape[1], dtype=np.int32)[None] - 1, B, axis=0)
        num_nodes = np.full(B, W, np.int32)
        words = None
        if isinstance(plan.work, ExportKV | ImportKV):
            words = toy_transfer.run(plan, self._memory, self._snapshots)
        for row in np.flatnonzero(plan.slots):
            if isinstance(plan.work, CountPromptTokens):
                self._count(plan, row)
                continue
            prefills = isinstance(plan.work, Prefill)
            before = int(self._lengths[plan.slots[row]])
            if prefills:
                found = self._prefill(plan, row)
            else:
                depth = self._depth(plan, row, W - 1)
                found = self._decode(plan, row, depth)
                num_nodes[row] = 1 + depth
                drafts[row, 1:] = _chain(found, W - 1)
            saved[row] = self._save(plan, row, before)
            failed[row] = POISON in self._context(plan, row)
            counts[row] = 0 if failed[row] else len(found)
            tokens[row, : counts[row]] = found[: counts[row]]
        told = tokens * plan.reports[:, None]
        top = np.repeat(told[:, :, None], self.capacity.max_logprobs, axis=2)
        future.value = StepResult(
            tokens=tokens,
            counts=counts,
            failed=failed,
            snapshot_saved=saved,
            drafts=drafts,
            parents=np.maximum(parents, 0),
            num_nodes=num_nodes,
            logprobs=Logprobs(-told.astype(np.float32), top, -top.astype(np.float32)),
            scores=self._scores(plan) if plan.program.has(ProgramFeature.PROMPT_LOGPROBS) else None,
            device_seconds=None,
            words=words,
        )

    @property
    def _memory(self) -> list[list[np.ndarray]]:
        """Memory of the pages, and of the pages of each window pool."""
        return [[self._pages, self._draft_pages], *([pages] for pages in self._window_pages)]

    def _scores(self, plan: StepPlan) -> PromptLogprobs:
        """Returns scores of following tokens: minus the id and a thousandth of the position."""
        work = plan.work
        assert isinstance(work, Prefill)
        positions = np.zeros(len(work.tokens), np.int32)
        following = np.roll(work.tokens, -1)
        for row, (first, end) in enumerate(pairwise(work.row_starts.tolist())):
            positions[first:end] = np.arange(end - first) + work.first_positions[row] + 1
            following[first:end][-1:] = self._newest[plan.slots[row]]
        best = following[:, None] + np.arange(self.capacity.max_scores, dtype=np.int32)
        chosen = -(following + positions / 1000).astype(np.float32)
        return PromptLogprobs(chosen, following + 1, best, -best.astype(np.float32))

    def _at(self, plan: StepPlan, row: int, positions: np.ndarray) -> tuple:
        size = self.capacity.page_size
        return plan.page_table[row, positions // size], positions % size

    def _write(self, plan: StepPlan, row: int, first: int, tokens: Iterable[int]) -> None:
        values = np.array([*tokens], np.int32)
        self._pages[self._at(plan, row, first + np.arange(len(values)))] = values
        if self._window_pages:
            self._write_windows(plan, row, first, values)

    def _write_windows(self, plan: StepPlan, row: int, first: int, values: np.ndarray) -> None:
        """Writes to the window pools, and checks what is visible to rows from `first` on."""
        size, positions = self.capacity.page_size, first + np.arange(len(values))
        windows = zip(self.capacity.window_pools, self._window_pages, strict=True)
        for (pool, pages), table in zip(windows, plan.page_tables[1:], strict=True):
            assert table[row, positions // size].all(), "a row has no page in a window pool"
            pages[table[row, positions // size], positions % size] = values
            seen = np.arange(max(0, first - pool.window + 1), first + len(values))
            held = pages[table[row, seen // size], seen % size]
            text = self._pages[self._at(plan, row, seen)]
            assert held.tolist() == text.tolist(), "window memory of another text"

    def _context(self, plan: StepPlan, row: int) -> list[int]:
        """Tokens with KV, and the newest."""
        slot = plan.slots[row]
        held = self._pages[self._at(plan, row, np.arange(self._lengths[slot]))]
        return [*held.tolist(), int(self._newest[slot])]

    def _next(self, plan: StepPlan, row: int, context: list[int]) -> int:
        # The prompt's length represents all parameters of one request.
        assert plan.sampling.prompt_length[row] <= len(context)
        token = next_token(context, int(plan.sampling.seed[row]))
        length = int(self._lengths[plan.slots[row]])
        is_own = self._states[plan.slots[row]] == hashed(0, context[:length])
        return token if is_own or self.capacity.num_snapshots == 1 else (token + 1) % POISON

    def _start(self, plan: StepPlan, row: int) -> None:
        """Starts a row in its slot; the first position is the length of its cached prefix."""
        slot, source = plan.slots[row], plan.snapshots.restore[row]
        assert isinstance(plan.work, Prefill | CountPromptTokens)
        self._lengths[slot] = plan.work.first_positions[row]
        self._draft_from[slot] = plan.draft_from[row]
        self._states[slot] = self._snapshots[source] if source else 0
        self._seen[slot] = Counter()

    def _count(self, plan: StepPlan, row: int) -> None:
        self._counted.add(plan.slots[row])
        if plan.starts[row]:
            self._start(plan, row)
        self._see(plan, row, plan.work.tokens[: plan.work.row_starts[row + 1]].tolist())

    def _see(self, plan: StepPlan, row: int, tokens: Iterable[int]) -> None:
        self._seen[plan.slots[row]].update(tokens)

    def _save(self, plan: StepPlan, row: int, before: int) -> bool:
        """Takes a snapshot where the step passed its position and can have a state there."""
        slot, at = plan.slots[row], int(plan.snapshots.save_at[row])
        work, length = plan.work, int(self._lengths[slot])
        if isinstance(work, Prefill):
            before = int(work.first_positions[row])
            if (at - before) % CHUNK and at != length:
                return False
        if not (plan.snapshots.save[row] and before < at <= length):
            return False
        state = self._states[slot] if at == length else hashed(0, self._context(plan, row)[:at])
        is_own = self._states[slot] == hashed(0, self._context(plan, row)[:length])
        self._snapshots[plan.snapshots.save[row]] = state if is_own else -1
        return True

    def _prefill(self, plan: StepPlan, row: int) -> list[int]:
        work, slot = plan.work, plan.slots[row]
        chunk = work.tokens[work.row_starts[row] : work.row_starts[row + 1]].tolist()
        if plan.starts[row]:
            self._start(plan, row)
        first = int(work.first_positions[row])
        if slot in self._counted:
            self._counted.remove(slot)
            self._lengths[slot] = first
        assert self._lengths[slot] == first
        self.num_fed += len(chunk)
        self._see(plan, row, chunk if plan.starts[row] else chunk[1:])
        self._write(plan, row, first, chunk)
        self._lengths[slot] = first + len(chunk)
        self._states[slot] = hashed(int(self._states[slot]), chunk)
        ends, context = work.ends_prompt[row], self._context(plan, row)[:-1]
        newest = self._next(plan, row, context) if ends else int(work.next_tokens[row])
        self._newest[slot] = newest
        self._see(plan, row, [newest])
        self._feed_drafter(plan, row, first, [*chunk, newest])
        return [newest] if ends else []

    def _feed_drafter(self, plan: StepPlan, row: int, first: int, tokens: list[int]) -> None:
        """Writes a row for each token but the last, which none follows yet."""
        reach, count = self._draft_reach or 0, len(tokens) - 1
        self._draft_pages[self._at(plan, row, first + np.arange(count))] = tokens[reach:][:count]

    def _check_memory(self, plan: StepPlan, row: int, context: list[int]) -> None:
        """Checks that draft memory without gaps, and token counts, equal those of the text."""
        slot, reach = plan.slots[row], self._draft_reach
        first, end = int(self._draft_from[slot]), int(self._lengths[slot])
        held = self._draft_pages[self._at(plan, row, np.arange(first, end))].tolist()
        if reach is not None:
            assert held == context[first + reach : end + reach], "draft memory of another text"
        if plan.sampling.repetition[row] != 1:
            assert self._seen[slot] == Counter(context), "penalties count another text"

    def _depth(self, plan: StepPlan, row: int, depth: int) -> int:
        """Drafts of a row, which has none where its draft memory is empty."""
        slot = plan.slots[row]
        return 0 if self._draft_from[slot] == self._lengths[slot] else depth

    def _decode(self, plan: StepPlan, row: int, depth: int) -> list[int]:
        slot, length = plan.slots[row], int(self._lengths[plan.slots[row]])
        context, tokens = self._context(plan, row), []
        self._check_memory(plan, row, context)
        while not tokens or (len(tokens) <= depth and tokens[-1] % 3):
            tokens.append(self._next(plan, row, [*context, *tokens]))
        accepted = [int(self._newest[slot]), *tokens[:-1]]
        rejected = [-1] * (plan.program.shape.scratch - len(accepted))
        self._write(plan, row, int(self._lengths[slot]), [*accepted, *rejected])
        self._states[slot] = hashed(int(self._states[slot]), accepted)
        self._lengths[slot] += len(accepted)
        self._newest[slot] = tokens[-1]
        self._see(plan, row, tokens)
        if plan.program.shape.is_plain:
            self._draft_from[slot] = self._lengths[slot]
        else:
            self._feed_drafter(plan, row, length, [*accepted, tokens[-1]])
        return tokens
