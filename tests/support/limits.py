"""Programs of a backend for tests, and limits that are derived from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shared.boundary.backend import BackendLimits
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.spec.draft_tree import TreeShape


def make_program(
    work: StepKind,
    shape: TreeShape,
    tokens: int = 0,
    *,
    batch: int,
    pages: int,
    extras: ProgramFeature = ProgramFeature.NONE,
) -> Program:
    """Returns a program, by default of a step without prompt tokens and without extras."""
    return Program(work=work, batch=batch, pages=pages, tokens=tokens, shape=shape, extras=extras)


def make_limits(
    programs: Iterable[Program], *, page_size: int, context_length: int, vocab: int, **others: Any
) -> BackendLimits:
    """Returns limits with the given fields and small values of all others.

    The largest batch of the programs has slots, and pages for the longest page table; both pools
    have their reserved entry 0.
    """
    programs = tuple(programs)
    batch, pages = max(p.batch for p in programs), max(p.pages for p in programs)
    small: dict[str, Any] = {
        "num_pages": 1 + batch * pages,
        "num_slots": 1 + batch,
        "num_snapshots": 1,
        "overlap": 2,
        "max_stop_ids": 1,
        "max_bias": 1,
        "max_logprobs": 1,
        "max_scores": 0,
        "accept_rule": "exact",
    }
    named = {"page_size": page_size, "context_length": context_length, "vocab": vocab}
    return BackendLimits(programs=programs, **named, **small | others)
