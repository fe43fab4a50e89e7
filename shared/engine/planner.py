"""Planner: writes scheduled rows into the arrays of a step plan."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from functools import reduce

import numpy as np
from jaxtyping import Int32

from shared.boundary.backend import BackendLimits, StepPlan
from shared.boundary.buffers import empty_plan, neutral, plan_in
from shared.boundary.program import OF_A_PLAN, Program, ProgramFeature, StepKind
from shared.engine.allocator import Allocator
from shared.engine.ngram_scope import scope_of
from shared.engine.request import Request
from shared.engine.rows import ScheduledRows
from shared.spec.sampling import Sampling


@dataclass
class PreparedPlan:
    """A plan with its rows filled in, from which the next plan of the same rows is copied.

    Attributes:
      slots: Slots of its rows, as bytes.
      binding: Number of requests bound until then.
      buffer: The plan's buffer.
      spare: A copy prepared in advance, if any.
    """

    slots: bytes
    binding: int
    buffer: Int32[np.ndarray, " words"]
    spare: StepPlan | None = None


class Planner:
    """Fills plans. Parameters of a request that repeat in each step are stored per slot, written
    once.
    """

    def __init__(self, capacity: BackendLimits, allocator: Allocator) -> None:
        self._capacity, self._allocator = capacity, allocator
        self._sampling = neutral(capacity, capacity.num_slots)
        self._reports = np.zeros(capacity.num_slots, np.int32)
        self._scopes = np.zeros((capacity.num_slots, 2), np.int32)
        self._adapters = np.zeros(capacity.num_slots, np.int32)
        self._adapted = capacity.adapters.step_kinds if capacity.adapters is not None else ()
        self._binding = 0
        self._held: dict[Program, PreparedPlan] = {}
        self._by_kind: dict[
            tuple[StepKind, ProgramFeature, range], list[tuple[Program, tuple[int, ...]]]
        ] = {}
        unmasked = set(capacity.unmasked_programs)
        for program in sorted(capacity.programs, key=_order):
            brought = program.extras & OF_A_PLAN
            kinds = {brought, brought & ~ProgramFeature.MASK} if program in unmasked else {brought}
            for each in kinds:
                kind = program.work, each, program.blocks
                self._by_kind.setdefault(kind, []).append((program, _sizes(program)))

    def write_request_row(self, request: Request) -> None:
        """Stores the parameters of a request that has just received its slot."""
        at, slot, sampling = self._sampling, request.slot, request.sampling
        self._binding += 1
        self._reports[slot] = sampling.logprobs is not None
        self._adapters[slot] = request.adapter_slot
        if self._capacity.texts is not None:
            self._scopes[slot] = scope_of(request, self._capacity.texts)
        at.temperature[slot] = sampling.temperature
        at.top_p[slot] = sampling.top_p
        at.top_k[slot] = self._capacity.vocab if sampling.top_k is None else sampling.top_k
        at.min_p[slot] = sampling.min_p
        at.seed[slot] = sampling.seed32
        at.presence[slot] = sampling.presence_penalty
        at.frequency[slot] = sampling.frequency_penalty
        at.repetition[slot] = sampling.repetition_penalty
        at.prompt_length[slot] = len(request.prompt)
        at.max_drafts[slot] = _max_drafts(request, self._capacity)
        self._bind_ids(request)

    def _bind_ids(self, request: Request) -> None:
        at, slot, sampling = self._sampling, request.slot, request.sampling
        stop_ids, num_biased = sampling.stop_token_ids, len(sampling.logit_bias)
        # Without stop tokens the ids are undefined, so `min_length` must be 0. With a grammar, its
        # masks enforce the minimum length, because they may allow only a stop token.
        is_open = stop_ids and request.constraint is None
        at.min_length[slot] = len(request.prompt) + sampling.min_tokens if is_open else 0
        at.stop_ids[slot] = stop_ids[0] if stop_ids else 0
        at.stop_ids[slot, : len(stop_ids)] = stop_ids
        at.bias_ids[slot], at.bias_values[slot] = 0, 0.0
        at.bias_ids[slot, :num_biased] = list(sampling.logit_bias.keys())
        at.bias_values[slot, :num_biased] = list(sampling.logit_bias.values())

    def plan(self, rows: ScheduledRows) -> StepPlan:
        """Returns a plan in a new buffer, for the smallest program that holds the rows.

        Raises:
          LookupError: No program is large enough.
          ValueError: A row is not in a state in which the step may include it.
        """
        slots = [request.slot for request in rows.requests]
        plan = self._plan_of_rows(
            self.select_program(rows), slots, has_masks=rows.masks is not None
        )
        rows.fill(plan)
        return plan

    def prepare_next(self, program: Program) -> None:
        """Prepares a program's next plan while the device runs."""
        held = self._held.get(program)
        if held is not None and held.spare is None:
            held.spare = plan_in(held.buffer.copy(), program, self._capacity)

    def _plan_of_rows(self, program: Program, slots: list[int], has_masks: bool) -> StepPlan:
        """Returns a plan with its rows filled in; decode steps mostly have the rows of the previous
        one.
        """
        rows = np.array(slots, np.int32)
        held, named = self._held.get(program), rows.tobytes()
        if held is not None and (held.slots, held.binding) == (named, self._binding):
            plan, held.spare = held.spare, None
            plan = plan or plan_in(held.buffer.copy(), program, self._capacity)
            self._fill_pages(plan, rows)
            return plan
        plan = empty_plan(program, self._capacity)
        self.fill_rows(plan, rows)
        if (
            program.work is StepKind.DECODE and not has_masks
        ):  # masks are large and change in each step
            self._held[program] = PreparedPlan(named, self._binding, plan.buffer.copy())
        return plan

    def select_program(self, rows: ScheduledRows) -> Program:
        """Returns the smallest program for the rows, without prompt logprobs unless requested.

        Its batch may be larger than the shape requires: only the largest may have logprobs.

        Raises:
          LookupError: No program is large enough.
        """
        held, requests = self._allocator.pages.num_pages, rows.requests
        num_pages = max((held.item(request.slot) for request in requests), default=0)
        verified = 0 if rows.shape is None else rows.shape.rows
        asked = any(request.sampling.logprobs is not None for request in requests)
        logprobs = asked and rows.work in (StepKind.PREFILL, StepKind.DECODE)
        scores = rows.work is StepKind.PREFILL and any(r.wants_scores for r in requests)
        wanted = (len(requests), num_pages, rows.num_tokens, verified, logprobs, scores)
        tree = None if rows.shape is None else rows.shape.tree
        for program, sizes in self._by_kind.get((rows.work, self._brought(rows), rows.blocks), ()):
            if tree in (None, program.shape.tree) and all(map(operator.ge, sizes, wanted)):
                return program
        raise LookupError(f"no {rows.work.value} program holds {wanted} with {rows.shape}")

    def _brought(self, rows: ScheduledRows) -> ProgramFeature:
        """Returns the input features of the plan of these rows."""
        brought = {
            ProgramFeature.HOST_DRAFT: rows.drafts,
            ProgramFeature.NGRAM_DRAFTS: rows.copies,
            ProgramFeature.MASK: rows.masks,
        }
        if rows.work in self._adapted:
            slots = (request.adapter_slot for request in rows.requests)
            brought[ProgramFeature.LORA] = next(filter(None, slots), None)
        return reduce(
            operator.or_, (e for e, of in brought.items() if of is not None), ProgramFeature.NONE
        )

    def fill_rows(self, plan: StepPlan, slots: Int32[np.ndarray, " rows"]) -> None:
        """Writes the per-slot parameters of the rows: slots, pages, reports and sampling."""
        count = len(slots)
        plan.slots[:count] = slots
        self._fill_pages(plan, slots)
        plan.reports[:count] = self._reports[slots]
        if plan.adapters is not None:
            plan.adapters[:count] = self._adapters[slots]
        if plan.texts is not None:
            plan.texts.scopes[:count] = self._scopes[slots]
        for name in _SAMPLING_FIELDS:
            getattr(plan.sampling, name)[:count] = getattr(self._sampling, name)[slots]

    def _fill_pages(self, plan: StepPlan, slots: Int32[np.ndarray, " rows"]) -> None:
        for pool, pages in zip(self._allocator.pools, plan.page_tables, strict=True):
            table = pool.page_table[slots, : pages.shape[1]]
            pages[: len(slots), : table.shape[1]] = table


def _order(program: Program) -> tuple[int, ...]:
    """Returns the sort key of a program: smallest first, those with prompt logprobs last."""
    batch, pages, tokens, verified, logprobs, scores = _sizes(program)
    return scores, tokens, batch, pages, verified, logprobs


def _sizes(program: Program) -> tuple[int, ...]:
    """Returns the sizes that rows must not exceed, and the optional outputs of a program."""
    of_the_result = (
        program.has(ProgramFeature.LOGPROBS),
        program.has(ProgramFeature.PROMPT_LOGPROBS),
    )
    return (program.batch, program.pages, program.tokens, program.shape.rows, *of_the_result)


_SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))


def _max_drafts(request: Request, capacity: BackendLimits) -> int:
    most = max(shape.nodes for shape in capacity.shapes) - 1
    wanted = request.sampling.max_draft_tokens
    return most if wanted is None else min(wanted, most)
