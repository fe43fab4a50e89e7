"""Controllers of draft shapes: calls from the engine and permitted choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shared.boundary.backend import BackendLimits, StepResult
from shared.boundary.program import ProgramFeature, StepKind
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import Reserve, StaticController
from shared.engine.engine import Engine
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram_controllers.controller import NgramController
from shared.engine.request import Request, SamplingParams
from shared.engine.rows import ScheduledRows
from shared.options.ngram import NgramConfig
from shared.spec.draft_tree import TreeShape
from tests.support.run_engine import drive
from tests.support.toy_backend import ToyBackend, toy_capacity


def request(number: int, num_prompt: int = 5, **sampling) -> Request:
    params = SamplingParams(**{"max_tokens": 20, "seed32": number} | sampling)
    return Request(request_id=number, prompt=(1,) * num_prompt, sampling=params)


class RecordingController(StaticController):
    """Alternates a chain and plain steps, and records the calls from the engine."""

    def __init__(self, capacity: BackendLimits) -> None:
        super().__init__(capacity, nodes=4, depth=3, width=1)
        self.learnt: list[tuple[ScheduledRows, StepResult]] = []
        self.num_submitted = 0
        self.texts: dict[int, list[int]] = {}
        self.ends: list[int] = []
        self.cuts: list[tuple[int, int]] = []

    def select_rows(self, ready: Sequence[Request], reserve: Reserve) -> ScheduledRows | None:
        off = TreeShape.plain(4)
        rows = super().select_rows(ready, reserve)
        return rows and replace(rows, shape=off if self.num_submitted % 2 else rows.shape)

    def on_submit(self, rows: ScheduledRows) -> None:
        self.num_submitted += 1

    def on_result(self, rows: ScheduledRows, result: StepResult) -> None:
        self.learnt.append((rows, result))

    def on_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        self.texts.setdefault(request.request_id, []).extend(tokens)

    def on_finish(self, request: Request) -> None:
        self.ends.append(request.request_id)

    def on_truncate(self, request_id: int, num_tokens: int) -> None:
        self.cuts.append((request_id, num_tokens))


def recorded_engine(overlap: int = 1, num_pages: int = 400) -> tuple[RecordingController, Engine]:
    backend = ToyBackend(toy_capacity(num_pages=num_pages, num_slots=5, overlap=2))
    recorder = RecordingController(backend.capacity)
    return recorder, Engine(
        backend, recorder, overlap=overlap, chunked_prefill_size=64, cache=NO_CACHE
    )


@pytest.mark.parametrize("overlap", [0, 2])
def test_controller_on_result_receives_every_step(overlap):
    """Results contain step times and acceptance by request and shape."""
    recorder, engine = recorded_engine(overlap)
    outcomes = drive(engine, [request(number) for number in range(6)])
    accepted: dict[int, list[int]] = {}
    for rows, result in recorder.learnt:
        assert result.device_seconds is None  # the toy backend has no clock
        for row, each in enumerate(rows.requests):
            drafted = rows.accepted(int(result.counts[row]))
            accepted.setdefault(each.request_id, []).extend([] if drafted is None else [drafted])
    for number, outcome in outcomes.items():
        # Drafts of stale rows were verified too, so there are more steps than in the output.
        assert accepted[number][: len(outcome.accepted)] == outcome.accepted
    steps = {(rows.work, rows.shape and rows.shape.nodes) for rows, _ in recorder.learnt}
    assert steps == {(StepKind.PREFILL, None), (StepKind.DECODE, 4), (StepKind.DECODE, 1)}
    assert len(recorder.learnt) == recorder.num_submitted


def test_controller_receives_every_token_and_end():
    recorder, engine = recorded_engine(num_pages=30)
    outcomes = drive(engine, [request(number, 40, max_tokens=40) for number in range(6)])
    assert engine.scheduler.num_preemptions
    assert recorder.texts == {number: outcome.tokens for number, outcome in outcomes.items()}
    assert sorted(recorder.ends) == list(range(6))


def test_controller_on_truncate_called_after_request_end():
    """A stop string is found after the event in which `max_tokens` ended the request."""
    recorder, engine = recorded_engine()
    drive(engine, [request(0, max_tokens=6)])
    engine.finish(0, 4)
    assert recorder.cuts == [(0, 4)]
    assert recorder.ends == [0]
    engine.add(request(1))
    while len(recorder.texts.get(1, ())) < 8:
        engine.step()
    engine.finish(1, 3)
    assert recorder.cuts == [(0, 4), (1, 3)]
    assert recorder.ends == [0, 1]


def host_capacity() -> BackendLimits:
    """Programs of the toy backend, and of host-built trees for batches of 2."""
    capacity = toy_capacity(num_pages=400, num_slots=5, overlap=1)
    trees = tuple(
        replace(
            program, extras=program.extras | ProgramFeature.HOST_DRAFT, shape=TreeShape(4, 2, 2, 8)
        )
        for program in capacity.programs
        if program.work is StepKind.DECODE and program.batch == 2
    )
    return replace(capacity, programs=(*capacity.programs, *trees))


def index_of(nodes: int, depth: int) -> NgramIndex:
    return NgramIndex(NgramConfig(), nodes=nodes, depth=depth, vocab=97, chain=False)


def test_ngram_controller_max_rows_limited_by_programs():
    assert NgramController(host_capacity(), index_of(4, 2)).max_rows == 2


def test_ngram_controller_rejects_trees_without_program():
    with pytest.raises(ValueError, match=r"host-built trees \(5 nodes, depth 4\)"):
        NgramController(host_capacity(), index_of(5, 4))


def test_ngram_controller_waits_only_for_own_rows():
    controller = NgramController(host_capacity(), index_of(4, 2))
    first, second = request(1), request(2)

    def reserve(requests: Sequence[Request], scratch: int) -> list[Request]:
        assert scratch == TreeShape(4, 2, 2, 8).scratch
        return list(requests)

    second.step_submitted(1)
    rows = controller.select_rows([first, second], reserve)
    assert rows is not None
    assert rows.requests == [first]
    assert (rows.shape.is_plain, rows.drafts) == (True, None)  # the index is empty
    assert not controller.needs_last_result
    first.step_submitted(1)
    assert controller.needs_last_result
    second.step_finished(1)
    assert controller.select_rows([first, second], reserve) is None
    first.step_finished(1)
    controller.on_tokens(first, [5, 6, 7, 5])
    rows = controller.select_rows([first, second], reserve)
    assert rows is not None
    controller.on_submit(rows)
    controller.on_tokens(first, [6])
    rows = controller.select_rows([first, second], reserve)
    assert rows is not None
    assert rows.drafts is not None
    assert rows.drafts.tokens[0, :3].tolist() == [0, 7, 5]
    assert rows.drafts.num_nodes.tolist()[1] == 1


def test_ngram_controller_without_pages_drafts_nothing():
    """Otherwise its tokens would be learnt, and its next tree would match them."""
    index = index_of(4, 2)
    controller, one = NgramController(host_capacity(), index), request(1)
    controller.on_tokens(one, [5, 6, 5])
    assert controller.select_rows([one], lambda requests, scratch: []) is None
    assert index.num_rows == 0
    assert not controller.needs_last_result
