"""Base of all machines of random traffic: steps, event handling and shutdown."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis.stateful import RuleBasedStateMachine

from shared.engine.engine import Engine
from shared.engine.request import Event, FinishReason, Request
from tests.support.run_engine import Outcome, checked_step
from tests.support.toy_backend import POISON, plain

MOST_STEPS = 20_000


def plain_text(of: Request) -> list[int]:
    """A request's text on the toy device."""
    return plain(of.prompt, of.sampling.seed32, of.sampling.max_tokens, of.sampling.stop_token_ids)


class TrafficMachine(RuleBasedStateMachine):
    """Requests on the toy device that end by themselves, or are ended by us."""

    def serve_on(self, engine: Engine) -> None:
        """Begins with an engine that has nothing to do."""
        self.engine = engine
        self.requests: dict[int, Request] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.ended_by_us: set[int] = set()

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.take(checked_step(self.engine))

    def end(self, number: int) -> None:
        if self.outcomes[number].finish_reason is None:
            self.ended_by_us.add(number)

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            # `Outcome.take` fails on a second end; an end of ours must be the last word as well.
            assert event.request_id not in self.ended_by_us
            self.outcomes[event.request_id].take(event)

    def drain(self) -> None:
        """Steps until all requests have ended, and compares every output with the plain one."""
        for _ in range(MOST_STEPS):
            if not self.engine.busy:
                break
            self.go_on(1)
        assert not self.engine.busy, "the engine does not come to an end"
        for number, each in self.requests.items():
            text, outcome = plain_text(each), self.outcomes[number]
            if number in self.ended_by_us:
                text = text if POISON not in each.prompt else []
                assert outcome.tokens == text[: len(outcome.tokens)]
            elif POISON in each.prompt:
                assert outcome.finish_reason is FinishReason.ERROR
            else:
                assert outcome.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                assert outcome.tokens == text
