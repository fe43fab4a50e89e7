"""From scheduled rows to the arrays of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Int32

from shared.boundary.backend import (
    Decode,
    HostDraft,
    Limits,
    Prefill,
    Program,
    StepPlan,
    Work,
)
from shared.boundary.buffers import empty_plan
from shared.engine.allocator import Allocator
from shared.engine.request import Request
from shared.spec.draft_tree import TreeShape
from shared.spec.sampling import Sampling


@dataclass(frozen=True)
class Chunk:
    """Positions `first` up to `end` of a request's context, to be prefilled in one step."""

    request: Request
    first: int
    end: int

    @property
    def starts(self) -> bool:
        """Whether it is the request's first chunk since it was placed."""
        return self.first == self.request.first_position

    @property
    def ends_prompt(self) -> bool:
        """Whether the chunk ends where the next token is to be chosen."""
        return self.end == len(self.request.context)


@dataclass(frozen=True)
class PrefillRows:
    """The rows of a prefill step."""

    chunks: tuple[Chunk, ...]

    @property
    def requests(self) -> list[Request]:
        """The request of each row."""
        return [chunk.request for chunk in self.chunks]

    @property
    def most_tokens(self) -> list[int]:
        """Most tokens that the step adds to each row."""
        return [int(chunk.ends_prompt) for chunk in self.chunks]


@dataclass(frozen=True)
class DecodeRows:
    """The rows of a decode step and its draft shape.

    Attributes:
      drafts: The host's tree of each row; None where the device drafts, or nothing does.
    """

    requests: list[Request]
    shape: TreeShape
    drafts: HostDraft | None = None

    @property
    def most_tokens(self) -> list[int]:
        """Most tokens that the step adds to each row."""
        return [self.shape.max_tokens] * len(self.requests)


class Planner:
    """Fills plans. What a request brings to each of its steps is kept by slot, written once."""

    def __init__(self, limits: Limits, allocator: Allocator) -> None:
        self._limits, self._allocator = limits, allocator
        self._sampling = _neutral_sampling(limits)
        self._by_size = sorted(
            (program for program in limits.programs if not program.mask),
            key=lambda program: (program.tokens, program.batch, program.pages, program.logprobs),
        )

    def bind(self, request: Request) -> None:
        """Writes the sampling parameters of a request that has just got its slot."""
        at, slot, sampling = self._sampling, request.slot, request.sampling
        at.temperature[slot] = sampling.temperature
        at.top_p[slot] = sampling.top_p
        at.top_k[slot] = self._limits.vocab if sampling.top_k is None else sampling.top_k
        at.min_p[slot] = sampling.min_p
        at.seed[slot] = sampling.seed32
        at.presence[slot] = sampling.presence_penalty
        at.frequency[slot] = sampling.frequency_penalty
        at.repetition[slot] = sampling.repetition_penalty
        at.prompt_length[slot] = len(request.prompt)
        at.max_drafts[slot] = _max_drafts(request, self._limits)
        at.num_logprobs[slot] = sampling.logprobs or 0
        self._bind_ids(request)

    def _bind_ids(self, request: Request) -> None:
        at, slot, sampling = self._sampling, request.slot, request.sampling
        stop_ids, num_biased = sampling.stop_token_ids, len(sampling.logit_bias)
        # Without stop tokens the field's ids mean nothing, so no position may read them.
        at.min_length[slot] = len(request.prompt) + sampling.min_tokens if stop_ids else 0
        at.stop_ids[slot] = stop_ids[0] if stop_ids else 0
        at.stop_ids[slot, : len(stop_ids)] = stop_ids
        at.bias_ids[slot], at.bias_values[slot] = 0, 0.0
        at.bias_ids[slot, :num_biased] = list(sampling.logit_bias.keys())
        at.bias_values[slot, :num_biased] = list(sampling.logit_bias.values())

    def plan(self, rows: PrefillRows | DecodeRows) -> StepPlan:
        """A plan in a buffer of its own, of the smallest program that holds the rows."""
        if isinstance(rows, DecodeRows):
            from_host = rows.drafts is not None
            plan = self._empty(Work.DECODE, rows.shape, rows.requests, 0, from_host)
        else:
            num_tokens = sum(chunk.end - chunk.first for chunk in rows.chunks)
            plan = self._empty(Work.PREFILL, None, rows.requests, num_tokens, False)
        self.fill_rows(plan, np.array([request.slot for request in rows.requests], np.int32))
        if isinstance(plan.work, Prefill) and isinstance(rows, PrefillRows):
            _fill_chunks(plan.work, plan.starts, rows.chunks)
        if isinstance(plan.work, Decode) and isinstance(rows, DecodeRows):
            _fill_drafts(plan.work, rows.drafts)
        return plan

    def _empty(
        self,
        work: Work,
        shape: TreeShape | None,
        requests: list[Request],
        num_tokens: int,
        host_draft: bool,
    ) -> StepPlan:
        num_pages = max(int(self._allocator.num_pages[request.slot]) for request in requests)
        logprobs = any(request.sampling.logprobs is not None for request in requests)
        sizes = (len(requests), num_pages, num_tokens, logprobs)
        program = self.pick(work, shape, *sizes, host_draft)
        return empty_plan(program, self._limits, None)

    def pick(
        self,
        work: Work,
        shape: TreeShape | None,
        num_rows: int,
        num_pages: int,
        num_tokens: int,
        logprobs: bool,
        host_draft: bool,
    ) -> Program:
        """The smallest program that holds a step; `shape` is None where the work has none.

        Raises:
          LookupError: No program is large enough.
        """
        wanted = (num_rows, num_pages, num_tokens, logprobs)
        for program in self._by_size:
            sizes = (program.batch, program.pages, program.tokens, program.logprobs)
            if (
                program.work is work
                and program.host_draft is host_draft
                and shape in (None, program.shape)
                and all(size >= want for size, want in zip(sizes, wanted, strict=True))
            ):
                return program
        raise LookupError(f"no {work.value} program holds {wanted} with {shape}")

    def fill_rows(self, plan: StepPlan, slots: Int32[np.ndarray, " rows"]) -> None:
        """Writes what every step says about its rows: slots, pages and sampling parameters."""
        count, columns = len(slots), plan.page_table.shape[1]
        plan.slots[:count] = slots
        table = self._allocator.page_table[slots, :columns]
        plan.page_table[:count, : table.shape[1]] = table
        for name in _SAMPLING_FIELDS:
            getattr(plan.sampling, name)[:count] = getattr(self._sampling, name)[slots]


_SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))


def _neutral_sampling(limits: Limits) -> Sampling:
    """Parameters by slot, as wide as a plan's."""
    slots = limits.num_slots

    def floats(*width: int, fill: float = 0.0) -> np.ndarray:
        return np.full((slots, *width), fill, np.float32)

    def ints(*width: int) -> np.ndarray:
        return np.zeros((slots, *width), np.int32)

    return Sampling(
        temperature=floats(),
        top_p=floats(fill=1.0),
        top_k=ints(),
        min_p=floats(),
        seed=np.zeros(slots, np.uint32),
        presence=floats(),
        frequency=floats(),
        repetition=floats(fill=1.0),
        prompt_length=ints(),
        min_length=ints(),
        max_drafts=ints(),
        num_logprobs=ints(),
        stop_ids=ints(limits.max_stop_ids),
        bias_ids=ints(limits.max_bias),
        bias_values=floats(limits.max_bias),
        calibration=floats(max(1, limits.max_depth), fill=1.0),
    )


def _max_drafts(request: Request, limits: Limits) -> int:
    most = max(shape.nodes for shape in limits.shapes) - 1
    wanted = request.sampling.max_draft_tokens
    return most if wanted is None else min(wanted, most)


def _fill_drafts(work: Decode, trees: HostDraft | None) -> None:
    if work.drafts is None or trees is None:
        return
    for field in fields(HostDraft):
        values = getattr(trees, field.name)
        getattr(work.drafts, field.name)[: len(values)] = values


def _fill_chunks(work: Prefill, starts: Int32[np.ndarray, " B"], chunks: Sequence[Chunk]) -> None:
    end = 0
    for row, chunk in enumerate(chunks):
        start, end = end, end + chunk.end - chunk.first
        context = chunk.request.context
        work.tokens[start:end] = context[chunk.first : chunk.end]
        work.row_starts[row + 1] = end
        work.first_positions[row] = chunk.first
        work.ends_prompt[row] = chunk.ends_prompt
        # Drafters learn of a chunk's last token together with the one that follows it.
        work.next_tokens[row] = 0 if chunk.ends_prompt else context[chunk.end]
        starts[row] = chunk.starts
    work.row_starts[len(chunks) + 1 :] = end
