"""Shapes, models and backends that serve requests, shared by the tests of draft trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from shared.boundary.backend import Backend, BackendLimits
from shared.boundary.program import ProgramFeature, StepKind
from shared.drafts.config import DraftHead
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.models.checkpoint import Weights
from shared.models.config import ModelConfig
from shared.spec.draft_tree import TreeShape
from tests.support.backends import make_backend
from tests.support.equality import Oracle
from tests.support.limits import make_limits, make_program
from tests.support.run_engine import Outcome, drive
from tests.support.tiny_models import tiny_model

BATCH = 4
PAGES = 64
PLAIN = TreeShape.plain(BATCH)
NAIVE = TreeShape.chain(1, BATCH)
CHAIN = TreeShape.chain(3, BATCH)
TREE = TreeShape(nodes=6, depth=3, width=2, rows=6 * BATCH)
NARROW = TreeShape(nodes=8, depth=5, width=8, rows=8 * BATCH)
"""Keeps 8 nodes of 264 candidates, and writes 33 rows of draft KV to find them."""

SHAPES = (PLAIN, NAIVE, CHAIN, TREE, NARROW)

TAKING_TURNS: dict = {
    "temperature": 1.0,
    "frequency_penalty": 1.5,
    "logit_bias": {20: 12.0, 30: 12.0},
}
"""Two tokens alternate by their counts, so a choice depends on all counts of its path."""


def name_of(shape: TreeShape) -> str:
    return f"S{shape.depth}k{shape.width}N{shape.nodes}"


def tree_capacity(vocab: int) -> BackendLimits:
    """One prefill and one decode program for each shape; all give logprobs."""

    program = partial(make_program, batch=BATCH, pages=PAGES, extras=ProgramFeature.LOGPROBS)
    return make_limits(
        (
            program(StepKind.PREFILL, PLAIN, 128),
            *(program(StepKind.DECODE, shape, 0) for shape in SHAPES),
        ),
        page_size=4,
        num_pages=1 + (BATCH + 1) * PAGES,
        num_slots=2 + BATCH,
        context_length=200,
        vocab=vocab,
        max_stop_ids=2,
        max_bias=2,
        max_logprobs=3,
    )


@dataclass(frozen=True)
class Drafted:
    """A model and its drafter.

    Attributes:
      model: Makes the target.
      drafter: What a backend's constructor gets, from the target.
    """

    model: Callable[[], tuple[ModelConfig, Weights]]
    drafter: Callable[[ModelConfig, Weights], str | DraftHead]


@lru_cache
def _hybrid() -> tuple[ModelConfig, Weights]:
    return tiny_model("qwen3_5", seed=3)


DRAFTED = {"NEXTN": Drafted(_hybrid, lambda config, weights: "NEXTN")}


class Served:
    """The backends of some tests, each created at first use, and plain outputs."""

    def __init__(self) -> None:
        self._backends: dict[tuple[str, str], Backend] = {}
        self._oracles: dict[str, Oracle] = {}
        self._plain: dict[tuple[str, str], Outcome] = {}

    def backend(self, framework: str, drafted: str) -> Backend:
        key = (framework, drafted)
        if key not in self._backends:
            config, weights = DRAFTED[drafted].model()
            drafter = DRAFTED[drafted].drafter(config, weights)
            capacity = tree_capacity(config.vocab)
            self._backends[key] = make_backend(framework, config, weights, capacity, drafter)
        return self._backends[key]

    def oracle(self, drafted: str) -> Oracle:
        if drafted not in self._oracles:
            self._oracles[drafted] = Oracle(*DRAFTED[drafted].model())
        return self._oracles[drafted]

    def plain(self, drafted: str, request: Request) -> Outcome:
        """The request decoded plainly and alone, checked against the specification."""
        key = (drafted, repr((request.prompt, request.sampling)))
        if key not in self._plain:
            again = Request(request_id=0, prompt=request.prompt, sampling=request.sampling)
            server = Server(self, "torch", drafted, PLAIN)
            outcome = server.serve([again], overlap=0)[0]
            ties = self.oracle(drafted).check(again.prompt, outcome.tokens, again.sampling)
            assert not ties, "take another seed: this text has a near tie"
            self._plain[key] = outcome
        return self._plain[key]

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()


@dataclass(frozen=True)
class Server:
    """One framework's backend of one model, with one shape for every decode step."""

    served: Served
    framework: str
    drafted: str
    shape: TreeShape

    def engine(self, overlap: int) -> Engine:
        backend, shape = self.served.backend(self.framework, self.drafted), self.shape
        controller = StaticController(
            backend.capacity, nodes=shape.nodes, depth=shape.depth, width=shape.width
        )
        return Engine(
            backend, controller, overlap=overlap, chunked_prefill_size=128, cache=NO_CACHE
        )

    def serve(self, requests: Sequence[Request], overlap: int) -> dict[int, Outcome]:
        """All at once, up to a batch of them side by side."""
        return drive(self.engine(overlap), requests)

    def alone(self, request: Request) -> Outcome:
        return self.serve([request], overlap=0)[request.request_id]

    def plain(self, request: Request) -> Outcome:
        return self.served.plain(self.drafted, request)

    def oracle(self) -> Oracle:
        return self.served.oracle(self.drafted)


def request(number: int, prompt: Sequence[int], **sampling) -> Request:
    """A request that ends by its length unless a parameter changes that."""
    params = {"temperature": 0.0, "max_tokens": 24, "seed32": 1000 + number} | sampling
    return Request(request_id=number, prompt=tuple(prompt), sampling=SamplingParams(**params))
