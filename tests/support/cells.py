"""Cells of the matrix of backends: what each serves, on which backends, and how texts are compared.

Every cell of a kind serves the same requests, whatever its drafter, load, overlap and page size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from shared.boundary.backend import Backend, BackendLimits
from shared.boundary.program import StepKind
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.models.checkpoint import Weights
from shared.models.config import ModelConfig
from shared.spec.draft_tree import TreeShape
from shared.spec.gumbel_noise import derive_seed
from tests.support.backends import Drafter, make_backend
from tests.support.equality import Oracle, assert_few_excused
from tests.support.limits import make_limits, make_program
from tests.support.run_engine import Outcome, checked_step
from tests.support.tiny_models import DENSE, DIVIDED, EOS_ID, EXPERTS, tiny_model

BATCH = 4
CONTEXT = 160
PAGES = {1: 192, 16: 12, 64: 3}  # columns of the page table, by page size
OVERLAPS = (0, 1, 2)
DEPTHS = (0, 1, 3, 5)
LOADS = ("alone", "mixed")
SAMPLED = "sampled"
GREEDY = "greedy"
MODEL_SEEDS = {"llama": 5, "qwen3": 6, "qwen3_5": 3} | dict.fromkeys(
    (*DENSE, *EXPERTS, *DIVIDED.values()), 7
)


@dataclass(frozen=True)
class Cell:
    """One entry of the matrix; depth 0 is plain decoding."""

    family: str
    depth: int
    sampling: str
    load: str
    overlap: int
    page_size: int

    @property
    def drafter(self) -> str:
        """Drafter that the backend is made with; plain cells of a hybrid model have one as well."""
        return "NEXTN" if self.family == "qwen3_5" else "none"

    @property
    def shape(self) -> TreeShape:
        return TreeShape.chain(self.depth, BATCH)

    def __str__(self) -> str:
        drafter = f"nextn{self.depth}" if self.depth else "none"
        return (
            f"{self.family}-{drafter}-{self.sampling}-{self.load}"
            f"-overlap{self.overlap}-page{self.page_size}"
        )


@lru_cache
def model_of(family: str):
    return tiny_model(family, MODEL_SEEDS[family])


@lru_cache
def oracle_of(family: str) -> Oracle:
    return Oracle(*model_of(family))


def capacity_of(family: str, page_size: int, shapes: Iterable[TreeShape]) -> BackendLimits:
    """One prefill program, and one decode program per shape."""

    program = partial(make_program, batch=BATCH, pages=PAGES[page_size])
    decodes = [program(StepKind.DECODE, shape, 0) for shape in shapes]
    return make_limits(
        (program(StepKind.PREFILL, TreeShape.plain(BATCH), 64), *decodes),
        page_size=page_size,
        overlap=max(OVERLAPS),
        context_length=CONTEXT,
        vocab=model_of(family)[0].vocab,
        max_stop_ids=2,
        max_bias=2,
    )


class Backends:
    """Backends by framework, model, drafter and page size; each serves any shape and load."""

    def __init__(
        self,
        shapes: dict[tuple[str, str], tuple[TreeShape, ...]],
        head_of: Callable[[str, str], Drafter],
        model_of: Callable[[str], tuple[ModelConfig, Weights]] = model_of,
    ) -> None:
        """Takes the shapes by model and drafter, and the function that makes each backend."""
        self._shapes, self._head_of, self._model_of = shapes, head_of, model_of
        self._made: dict[tuple[str, str, str, int], Backend] = {}
        self._served: dict[tuple[str, Cell], dict[int, Outcome]] = {}

    def get(self, framework: str, cell: Cell) -> Backend:
        key = (framework, cell.family, cell.drafter, cell.page_size)
        if key not in self._made:
            capacity = capacity_of(
                cell.family, cell.page_size, self._shapes[cell.family, cell.drafter]
            )
            made = (*self._model_of(cell.family), capacity)
            drafter = self._head_of(cell.family, cell.drafter)
            self._made[key] = make_backend(framework, *made, drafter)
        return self._made[key]

    def served(self, framework: str, cell: Cell) -> dict[int, Outcome]:
        """Returns the outcomes of a framework, cached for several tests."""
        if (framework, cell) not in self._served:
            self._served[framework, cell] = serve(self.get(framework, cell), cell)
        return self._served[framework, cell]

    def close(self) -> None:
        for backend in self._made.values():
            backend.close()


PLAIN = TreeShape.plain(BATCH)
SHAPES = {
    ("llama", "none"): (PLAIN,),
    ("qwen3", "none"): (PLAIN,),
    ("qwen3_5", "NEXTN"): tuple(TreeShape.chain(depth, BATCH) for depth in DEPTHS),
}


def requests_of(cell: Cell) -> list[Request]:
    """Six requests (the first two when served alone); the same in every cell of their kind."""
    rng = np.random.default_rng(11)
    requests = []
    for index in range(6):
        prompt = tuple(rng.integers(2, 250, rng.integers(3, 70)).tolist())
        params = {"temperature": 0.0, "max_tokens": int(rng.integers(16, 40))}
        if cell.sampling == SAMPLED:
            params |= {
                "temperature": (0.7, 1.0)[index % 2],
                "top_p": (1.0, 0.95)[index % 2],
                "top_k": (None, 40, None)[index % 3],
                "min_p": (0.0, 0.0, 0.02)[index % 3],
                "presence_penalty": 0.4,
                "frequency_penalty": 0.3,
                "repetition_penalty": 1.1,
                "seed32": derive_seed(1234, index),
                "min_tokens": 4,
            }
        stops = () if index == 1 else (EOS_ID,)
        sampling = SamplingParams(**params, stop_token_ids=stops)
        requests.append(Request(request_id=index, prompt=prompt, sampling=sampling))
    return requests[:2] if cell.load == "alone" else requests


def serve(backend: Backend, cell: Cell) -> dict[int, Outcome]:
    """Runs the cell's requests: one after the other, or arriving while others run."""
    nodes, depth, width = cell.shape.nodes, cell.shape.depth, cell.shape.width
    controller = StaticController(backend.capacity, nodes=nodes, depth=depth, width=width)
    engine = Engine(
        backend, controller, overlap=cell.overlap, chunked_prefill_size=64, cache=NO_CACHE
    )
    waiting = requests_of(cell)[::-1]
    outcomes = {request.request_id: Outcome() for request in waiting}
    step = 0
    while waiting or engine.busy:
        arrives = not engine.busy if cell.load == "alone" else step % 3 == 0
        if waiting and arrives:
            engine.add(waiting.pop())
        for event in checked_step(engine):
            outcomes[event.request_id].take(event)
        step += 1
    return outcomes


def assert_cell(cell: Cell, backends: Backends, frameworks: tuple[str, ...]) -> None:
    served = {framework: backends.served(framework, cell) for framework in frameworks}
    compare(cell, served, oracle_of(cell.family))
    assert_few_excused()


def compare(cell: Cell, served: dict[str, dict[int, Outcome]], oracle: Oracle) -> None:
    """Every text is the specification's, and all are equal up to the first near tie."""
    for request in requests_of(cell):
        outcomes = [outcome[request.request_id] for outcome in served.values()]
        ties = [
            place
            for outcome in outcomes
            for place in oracle.check(request.prompt, outcome.tokens, request.sampling)
        ]
        until = min(ties) if ties else None
        texts = [outcome.tokens[:until] for outcome in outcomes]
        assert all(text == texts[0] for text in texts), (cell, request.request_id, texts)
        if not ties:
            accepted = [outcome.accepted for outcome in outcomes]
            assert all(counts == accepted[0] for counts in accepted), (cell, accepted)
            ends = {outcome.finish_reason for outcome in outcomes}
            assert len(ends) == 1, (cell, ends)
