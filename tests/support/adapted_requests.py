"""Requests with adapter slots on a backend without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from shared.boundary.backend import BackendLimits, StepPlan
from shared.engine.allocator import Allocator
from shared.engine.planner import Planner
from shared.engine.request import Request, SamplingParams
from shared.engine.rows import Chunk, ScheduledRows


def prefilled(
    capacity: BackendLimits,
    slots: Sequence[int],
    prompt: Sequence[int],
    sampling: SamplingParams,
    num_tokens: int,
) -> tuple[Planner, list[Request], StepPlan]:
    """Returns a request for each adapter slot, with pages for `num_tokens`, and their prefill."""
    allocator = Allocator(capacity)
    planner, requests = Planner(capacity, allocator), []
    for number, slot in enumerate(slots):
        request = Request(request_id=number, prompt=tuple(prompt), sampling=sampling)
        request.adapter_slot = slot
        request.assign_slot(allocator.take_slot())
        assert allocator.reserve(request.slot, num_tokens)
        planner.write_request_row(request)
        requests.append(request)
    chunks = tuple(Chunk(each, 0, each.prefill_length) for each in requests)
    plan = planner.plan(ScheduledRows.prefill(chunks))
    for each in requests:
        each.prefill(each.prefill_length)
    return planner, requests, plan
