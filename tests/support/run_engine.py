"""Runs an engine to its end, and checks after every step that no page and no slot is lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.engine.engine import Engine
from shared.engine.request import Event, FinishReason, Request
from shared.spec.logprobs import PromptLogprobs


@dataclass
class Outcome:
    """Sum of the events of one request."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    traced: list[Event] = field(default_factory=list)
    scores: PromptLogprobs | None = None

    def take(self, event: Event) -> None:
        assert self.finish_reason is None, "an event after the request's end"
        self.tokens += event.tokens
        self.accepted += [] if event.accepted is None else [event.accepted]
        self.logprobs += event.logprobs or []
        self.finish_reason, self.error = event.finish_reason, event.error
        assert self.scores is None or event.scores is None, "scores come once"
        self.scores = self.scores or event.scores
        self.traced += [] if event.step is None else [event]


def checked_step(engine: Engine) -> list[Event]:
    """One step of the engine, and the conservation of its pages and slots."""
    events = engine.step()
    engine.cache.check(engine.scheduler.running)
    running = {request.slot for request in engine.scheduler.running}
    owners = set(engine.allocator.pages.num_pages.nonzero()[0].tolist())
    assert owners <= running, "pages are held for nobody"
    capacity = engine.allocator.capacity
    assert engine.allocator.num_free_slots == capacity.num_slots - 1 - len(running), (
        "a slot is lost"
    )
    return events


def drive(engine: Engine, requests: Iterable[Request]) -> dict[int, Outcome]:
    """Adds the requests at once and steps until all have ended."""
    outcomes = {}
    for request in requests:
        engine.add(request)
        outcomes[request.request_id] = Outcome()
    while engine.busy:
        for event in checked_step(engine):
            outcomes[event.request_id].take(event)
    return outcomes
