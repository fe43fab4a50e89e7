"""Work that changes: phases of requests, served one after the other by one engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, UInt32

from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams


@dataclass(frozen=True)
class Phase:
    """Requests of which `batch` are served at once.

    Attributes:
      goes_on: Others wait behind it: what counts is the time until its last request has begun.
    """

    name: str
    batch: int
    requests: list[Request]
    goes_on: bool = False


@dataclass(frozen=True)
class Served:
    """Tokens and time of a phase.

    Attributes:
      rows, accepted: Rows of all decode steps, and the draft tokens that they accepted.
    """

    name: str
    tokens: int
    seconds: float
    steps: int
    rows: int = 0
    accepted: int = 0

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def serve(engine: Engine, phases: Sequence[Phase], clock: Callable[[], float]) -> list[Served]:
    """Serves all phases, each to its end, and leaves the requests as they were."""
    return [_serve(engine, phase, clock) for phase in phases]


def _serve(engine: Engine, phase: Phase, clock: Callable[[], float]) -> Served:
    waiting, running = [copy.deepcopy(request) for request in reversed(phase.requests)], 0
    began, counted, steps = clock(), None, 0
    tokens = rows = accepted = 0

    def served() -> Served:
        return Served(phase.name, tokens, clock() - began, steps, rows, accepted)

    while waiting or engine.busy:
        while waiting and running < phase.batch:
            engine.add(waiting.pop())
            running += 1
        if phase.goes_on and not waiting and counted is None:
            counted = served()
        steps += 1
        for event in engine.step():
            tokens += len(event.tokens)
            rows += event.accepted is not None
            accepted += event.accepted or 0
            running -= event.finish_reason is not None
    return counted or served()


@dataclass(frozen=True)
class Imposed:
    """Imposed acceptance: a rate for each part of each request's output.

    Attributes:
      rates: By seed, the rate of every depth in each part of the output; the last part goes on.
      part: Tokens of a part.
    """

    rates: Mapping[int, Sequence[float]]
    part: int

    def __call__(
        self, seeds: UInt32[np.ndarray, " B"], positions: Int[np.ndarray, " B"]
    ) -> Float[np.ndarray, "B D"]:
        """The rates of rows; see `tests.support.simulation.device.Law`."""
        found = [self.rates.get(seed, (0.0,)) for seed in seeds.tolist()]
        parts = (positions // self.part).tolist()
        now = [each[min(part, len(each) - 1)] for each, part in zip(found, parts, strict=True)]
        return np.repeat(np.array(now)[:, None], 16, axis=1)


RateOf = Callable[[np.random.Generator], Sequence[float]]


def imposed(
    plan: Sequence[tuple[str, int, int, int, RateOf]],
    *,
    part: int,
    seed: int = 5,
    prompt: int = 16,
    vocab: int = 2,
) -> tuple[list[Phase], Imposed]:
    """Phases of random prompts with imposed acceptance.

    Args:
      plan: Name, batch, number of requests, tokens of each, and what draws a request's rates.
      part: Tokens for which a request keeps a rate.
      seed: Of what is drawn.
      vocab: Tokens that prompts are made of.
    """
    rng = np.random.default_rng(seed)
    phases, rates = list[Phase](), dict[int, Sequence[float]]()
    for name, batch, count, tokens, rates_of in plan:
        requests = []
        for _ in range(count):
            key = len(rates) + 1
            rates[key] = rates_of(rng)
            words = tuple(rng.integers(1, vocab, prompt).tolist())
            sampling = SamplingParams(temperature=0.0, seed32=key, max_tokens=tokens)
            requests.append(Request(request_id=key, prompt=words, sampling=sampling))
        phases.append(Phase(name, batch, requests))
    return phases, Imposed(rates, part)
