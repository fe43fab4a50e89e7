"""A device in miniature: its next token is a hash of every token that a row can see.

It keeps tokens in pages as if they were keys and values, so one wrong page, length, order or
parameter gives another text. It is as late as a device may be: a step runs when its result is asked
for, and reads its plan only then.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable

import numpy as np

from shared.boundary.backend import (
    Launch,
    Limits,
    Logprobs,
    Prefill,
    Program,
    StepPlan,
    StepResult,
    Work,
)
from shared.spec.draft_tree import TreeShape

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


def toy_limits(
    *,
    num_pages: int,
    num_slots: int,
    overlap: int,
    page_size: int = 4,
    context_length: int = 256,
    depths: tuple[int, ...] = (0, 3),
    batch_sizes: tuple[int, ...] = (2, 4),
) -> Limits:
    """Limits with two page-table sizes, two prefill sizes and chains of the given depths."""

    def program(work: Work, batch: int, pages: int, tokens: int, depth: int) -> Program:
        return Program(
            work=work,
            batch=batch,
            pages=pages,
            tokens=tokens,
            shape=TreeShape.chain(depth, batch),
            host_draft=False,
            mask=False,
            logprobs=True,
        )

    sizes = [(batch, pages) for batch in batch_sizes for pages in (16, 128)]
    prefills = [program(Work.PREFILL, b, p, t, 0) for b, p in sizes for t in (64, 128)]
    decodes = [program(Work.DECODE, b, p, 0, depth) for b, p in sizes for depth in depths]
    return Limits(
        page_size=page_size,
        num_pages=num_pages,
        num_slots=num_slots,
        num_snapshots=1,
        programs=(*prefills, *decodes),
        overlap=overlap,
        context_length=context_length,
        vocab=VOCAB,
        max_stop_ids=2,
        max_bias=1,
        max_logprobs=2,
    )


class ToyFuture:
    """Runs its step, and those before it, when asked."""

    def __init__(self, backend: ToyBackend) -> None:
        self._backend = backend
        self.value: StepResult | None = None

    def result(self) -> StepResult:
        while self.value is None:
            self._backend.run_next()
        return self.value


class ToyBackend:
    """A backend that drafts right two times in three."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.is_closed = False
        self._pages = np.full((limits.num_pages, limits.page_size), -1, np.int32)
        self._lengths = np.zeros(limits.num_slots, np.int32)
        self._newest = np.zeros(limits.num_slots, np.int32)
        self._queue: deque[tuple[StepPlan, ToyFuture]] = deque()

    def launch(self, program: Program) -> Launch:
        return Launch.EAGER

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
        counts = np.zeros(B, np.int32)
        for row in np.flatnonzero(plan.slots):
            prefills = isinstance(plan.work, Prefill)
            found = self._prefill(plan, row) if prefills else self._decode(plan, row, W - 1)
            failed[row] = POISON in self._context(plan, row)
            counts[row] = 0 if failed[row] else len(found)
            tokens[row, : counts[row]] = found[: counts[row]]
        nodes = np.zeros((B, plan.program.shape.nodes), np.int32)
        told = tokens * plan.reports[:, None]
        top = np.repeat(told[:, :, None], self.limits.max_logprobs, axis=2)
        future.value = StepResult(
            tokens=tokens,
            counts=counts,
            failed=failed,
            saved=np.zeros(B, np.int32),
            drafts=nodes,
            parents=nodes,
            num_nodes=np.full(B, W, np.int32),
            logprobs=Logprobs(-told.astype(np.float32), top, -top.astype(np.float32)),
            device_seconds=None,
        )

    def _at(self, plan: StepPlan, row: int, positions: np.ndarray) -> tuple:
        size = self.limits.page_size
        return plan.page_table[row, positions // size], positions % size

    def _write(self, plan: StepPlan, row: int, first: int, tokens: Iterable[int]) -> None:
        values = np.array([*tokens], np.int32)
        self._pages[self._at(plan, row, first + np.arange(len(values)))] = values

    def _context(self, plan: StepPlan, row: int) -> list[int]:
        """Tokens with KV, and the newest."""
        slot = plan.slots[row]
        held = self._pages[self._at(plan, row, np.arange(self._lengths[slot]))]
        return [*held.tolist(), int(self._newest[slot])]

    def _next(self, plan: StepPlan, row: int, context: list[int]) -> int:
        # The prompt's length stands for all parameters that belong to one request.
        assert plan.sampling.prompt_length[row] <= len(context)
        return next_token(context, int(plan.sampling.seed[row]))

    def _prefill(self, plan: StepPlan, row: int) -> list[int]:
        work, slot = plan.work, plan.slots[row]
        chunk = work.tokens[work.row_starts[row] : work.row_starts[row + 1]]
        if plan.starts[row]:
            self._lengths[slot] = 0
        assert self._lengths[slot] == work.first_positions[row]
        self._write(plan, row, self._lengths[slot], chunk)
        self._lengths[slot] += len(chunk)
        if not work.ends_prompt[row]:
            self._newest[slot] = work.next_tokens[row]
            return []
        self._newest[slot] = self._next(plan, row, self._context(plan, row)[:-1])
        return [int(self._newest[slot])]

    def _decode(self, plan: StepPlan, row: int, depth: int) -> list[int]:
        slot = plan.slots[row]
        context, tokens = self._context(plan, row), []
        while not tokens or (len(tokens) <= depth and tokens[-1] % 3):
            tokens.append(self._next(plan, row, [*context, *tokens]))
        accepted = [int(self._newest[slot]), *tokens[:-1]]
        rejected = [-1] * (plan.program.shape.scratch - len(accepted))
        self._write(plan, row, int(self._lengths[slot]), [*accepted, *rejected])
        self._lengths[slot] += len(accepted)
        self._newest[slot] = tokens[-1]
        return tokens
