"""Invariants of every trace of a request, for all drafters."""

from __future__ import annotations

from itertools import pairwise

from shared.engine.request import CORPUS, DRAFT, MERGED, NGRAM, PREFILL, Event, StepTrace
from tests.support.run_engine import Outcome


def check_trace(outcome: Outcome, *, max_rows: int) -> None:
    """Checks that the steps of a request add up to its output and its accepted counts."""
    steps = [event.step for event in outcome.traced if event.step is not None]
    assert [token for event in outcome.traced for token in event.tokens] == outcome.tokens
    decoded = [event for event in outcome.traced if event.accepted is not None]
    assert [len(event.step.path) for event in decoded if event.step] == outcome.accepted
    for event in outcome.traced:
        check_step(event)
    for before, after in pairwise(steps):
        assert before.number < after.number
        assert before.at_ms <= after.at_ms
    for step in steps:
        assert 1 <= step.num_rows <= max_rows
        assert 0 <= step.host_ms <= step.at_ms
        assert step.device_ms is None or step.device_ms > 0


def check_step(event: Event) -> None:
    """The path of the tree, from its root on, that the text follows."""
    step = event.step
    assert step is not None
    tokens, drafts, parents = event.tokens, step.drafts, step.parents
    assert bool(drafts) == (step.source in (DRAFT, NGRAM, MERGED))
    assert (step.source == PREFILL) == (event.accepted is None)
    assert [parents[node - 1] for node in step.path] == [0, *step.path][:-1] * bool(step.path)
    taken = [drafts[node - 1] for node in step.path]
    assert tokens[: len(taken)] == taken[: len(tokens)]
    assert len(tokens) <= len(taken) + 1
    assert all(0 <= parent < node for node, parent in enumerate(parents, start=1))
    siblings = list(zip(parents, drafts, strict=True))
    assert len(set(siblings)) == len(siblings), "siblings carry different tokens"
    assert len(step.origins) == len(drafts)
    allowed = {DRAFT: {DRAFT}, NGRAM: {NGRAM, CORPUS}, MERGED: {DRAFT, NGRAM, CORPUS}}
    assert set(step.origins) <= allowed.get(step.source, set())


def refused_child(step: StepTrace, token: int) -> bool:
    """Returns whether a token was drafted at the node where the output left the tree."""
    last = step.path[-1] if step.path else 0
    return (last, token) in zip(step.parents, step.drafts, strict=True)
