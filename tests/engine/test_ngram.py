"""N-gram drafts: outputs equal plain decoding, and repetition makes decoding fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest

from shared.boundary.backend import Backend, BackendLimits, StepFuture, StepPlan
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.ngram.corpus import SEPARATOR, Corpus
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram_controllers.controller import NgramController
from shared.engine.request import FinishReason, Request, SamplingParams
from shared.models.checkpoint import Weights
from shared.models.config import ModelConfig
from shared.options.ngram import NgramConfig
from shared.spec.draft_tree import TreeShape
from tests.support.backends import make_backend
from tests.support.closing_fixture import closing_fixture
from tests.support.limits import make_limits, make_program
from tests.support.run_engine import Outcome, checked_step, drive
from tests.support.tiny_models import tiny_model

BATCH, NODES = 4, 8
PLAIN = TreeShape.plain(BATCH)
TREE = TreeShape.chain(NODES - 1, BATCH)
GREEDY: dict = {"temperature": 0.0}
SAMPLED: dict = {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 0.3}

either_sampling = pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def ngram_capacity(vocab: int, num_pages: int) -> BackendLimits:
    """Programs of one prefill, plain decoding and host-built trees."""

    def program(work: StepKind, shape: TreeShape, tokens: int, host_draft: bool) -> Program:
        return make_program(work, shape, tokens, batch=BATCH, pages=64).with_features(
            {ProgramFeature.HOST_DRAFT: host_draft}
        )

    return make_limits(
        (
            program(StepKind.PREFILL, PLAIN, 64, False),
            program(StepKind.DECODE, PLAIN, 0, False),
            program(StepKind.DECODE, TREE, 0, True),
        ),
        page_size=4,
        num_pages=num_pages,
        context_length=220,
        vocab=vocab,
        max_stop_ids=2,
        max_bias=2,
    )


@lru_cache
def model_of(name: str) -> tuple[ModelConfig, Weights]:
    """A tiny model; "cycle" attends to its newest token only and cycles through all tokens."""
    config, weights = tiny_model("llama" if name == "cycle" else name, seed=5)
    if name == "cycle":
        weights |= {n: 0 * w for n, w in weights.items() if n.endswith(("out", "down"))}
    return config, weights


class Served:
    """The reference backends of several tests, each created at its first use."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Backend] = {}

    def backend(self, name: str = "llama", num_pages: int = 1 + 64 * BATCH) -> Backend:
        if (name, num_pages) not in self._made:
            config, weights = model_of(name)
            capacity = ngram_capacity(config.vocab, num_pages)
            self._made[name, num_pages] = make_backend(
                "reference", config, weights, capacity, "none"
            )
        return self._made[name, num_pages]

    def plain(self, requests: Sequence[Request], name: str = "llama") -> dict[int, Outcome]:
        """Outcomes of the requests without drafts."""
        backend = self.backend(name)
        controller = StaticController(backend.capacity, nodes=1, depth=0, width=0)
        engine = Engine(backend, controller, overlap=1, chunked_prefill_size=64, cache=NO_CACHE)
        return drive(engine, [again(request) for request in requests])

    def close(self) -> None:
        for backend in self._made.values():
            backend.close()


served = closing_fixture(Served)


def again(request: Request) -> Request:
    """A fresh copy of a request."""
    return Request(
        request_id=request.request_id,
        prompt=request.prompt,
        sampling=request.sampling,
        tenant=request.tenant,
    )


def ngram_engine(backend: Backend, *, overlap: int = 1, **fields) -> Engine:
    config = NgramConfig(**{f"speculative_ngram_{name}": value for name, value in fields.items()})
    capacity = backend.capacity
    index = NgramIndex(config, nodes=NODES, depth=NODES - 1, vocab=capacity.vocab, chain=False)
    controller = NgramController(capacity, index)
    return Engine(backend, controller, overlap=overlap, chunked_prefill_size=64, cache=NO_CACHE)


def request(number: int, prompt: Sequence[int], **sampling) -> Request:
    params = {"max_tokens": 24, "seed32": 77 + number} | sampling
    return Request(request_id=number, prompt=tuple(prompt), sampling=SamplingParams(**params))


def requests_of(how: dict, count: int = 5) -> list[Request]:
    """Requests with repetitive prompts of different lengths."""
    rng = np.random.default_rng(4)
    parts = [rng.integers(2, 250, int(rng.integers(3, 20))).tolist() for _ in range(count)]
    return [request(n, (parts[n] * 3)[: 12 + 3 * n], **how) for n in range(count)]


def corpus_of(*documents: Sequence[int]) -> Corpus:
    words = [token for document in documents for token in [*document, SEPARATOR]]
    return Corpus.build(np.array(words, np.int32))


def tokens_per_step(outcome: Outcome) -> float:
    return 1 + sum(outcome.accepted) / len(outcome.accepted)


def drive_staggered(engine: Engine, requests: Sequence[Request]) -> dict[int, Outcome]:
    """Adds a request every third step and runs all to their end."""
    outcomes, waiting, step = {r.request_id: Outcome() for r in requests}, list(requests), 0
    while waiting or engine.busy:
        if waiting and step % 3 == 0:
            engine.add(waiting.pop(0))
        for event in checked_step(engine):
            outcomes[event.request_id].take(event)
        step += 1
    return outcomes


@either_sampling
@pytest.mark.parametrize(
    ("name", "overlap", "match_type"),
    [("llama", 0, "BFS"), ("llama", 1, "PROB"), ("llama", 2, "BFS"), ("qwen3_5", 1, "BFS")],
)
def test_ngram_output_equals_plain_decoding(name, overlap, match_type, how, served):
    requests = requests_of(how)
    want = served.plain(requests, name)
    own = corpus_of(*(w.tokens[:9] + w.tokens[10:20] for w in want.values()))
    fields = {"external_sam_budget": 3, "min_bfs_breadth": 2, "match_type": match_type}
    engine = ngram_engine(served.backend(name), overlap=overlap, **fields)
    engine.controller.index.corpora.add("own", own)
    found = drive_staggered(engine, [again(r) for r in requests])
    assert {n: o.tokens for n, o in found.items()} == {n: o.tokens for n, o in want.items()}
    accepted = {count for outcome in found.values() for count in outcome.accepted}
    assert {0, 1} <= accepted, accepted
    assert max(accepted) > 2, accepted


def test_ngram_submits_next_step_before_returning_events(served):
    """Trees need the tokens of the previous step, but do not wait for their reader."""
    engine = ngram_engine(served.backend())
    for one in requests_of(GREEDY, 2):
        engine.add(one)
    while not any(one.output for one in engine.scheduler.running):
        engine.step()
    steps = [(bool(engine.step()), len(engine.flights)) for _ in range(6)]
    assert steps == [(True, 1)] * 6
    while engine.busy:
        engine.step()


@either_sampling
def test_ngram_copied_prompt_exceeds_three_tokens_per_step(how, served):
    """The model cycles through all tokens; the prompt is a part of the cycle."""
    how = how | {"temperature": how["temperature"] * 0.05, "presence_penalty": 0.0}
    (start,) = served.plain([request(0, [9], max_tokens=60, **how)], "cycle").values()
    prompt = [*start.tokens, start.tokens[0]]
    copying = request(1, prompt, max_tokens=40, **how)
    (found,) = drive(ngram_engine(served.backend("cycle")), [copying]).values()
    assert found.tokens == start.tokens[1:41]
    assert tokens_per_step(found) > 3


@either_sampling
@pytest.mark.parametrize("num_others", [0, 2])
def test_own_output_corpus_reaches_five_tokens_per_step(how, num_others, served):
    requests, rng = requests_of(how, 3), np.random.default_rng(8)
    want = served.plain(requests)
    own = corpus_of(*([*r.prompt, *want[r.request_id].tokens] for r in requests))
    engine = ngram_engine(served.backend(), external_sam_budget=NODES - 1)
    for other in range(num_others):
        engine.controller.index.corpora.add(
            f"other {other}", corpus_of(rng.integers(2, 250, 2000).tolist())
        )
    engine.controller.index.corpora.add("own", own)
    found = drive(engine, [again(r) for r in requests])
    assert {n: o.tokens for n, o in found.items()} == {n: o.tokens for n, o in want.items()}
    assert np.mean([tokens_per_step(outcome) for outcome in found.values()]) >= 5


@either_sampling
def test_request_scope_acceptance_independent_of_overlap_and_neighbours(how, served):
    requests = requests_of(how)
    runs = [
        drive_staggered(ngram_engine(served.backend(), overlap=overlap, scope="request"), again_all)
        for overlap in (0, 1, 2)
        for again_all in [[again(r) for r in requests]]
    ]
    alone: dict[int, Outcome] = {}
    engine = ngram_engine(served.backend(), scope="request")
    for each in requests:
        alone |= drive(engine, [again(each)])
    accepted = [{n: o.accepted for n, o in run.items()} for run in [*runs, alone]]
    assert all(run == accepted[0] for run in accepted)
    assert sum(map(sum, accepted[0].values())), "nothing was accepted, so nothing was compared"


@either_sampling
def test_undrafted_row_continues_from_fully_accepted_tree(how, served):
    """Trap (vLLM 52942): a step without drafts after accepted drafts read a stale state."""
    requests = requests_of(how, 2)
    want = served.plain(requests, "qwen3_5")
    engine = ngram_engine(served.backend("qwen3_5"), external_sam_budget=NODES - 1, scope="request")
    # The corpus has only a part of the first output, and the whole second one.
    first, second = (want[r.request_id].tokens for r in requests)
    engine.controller.index.corpora.add("own", corpus_of(first[: 1 + NODES], second))
    rows: list[list[tuple[int, int]]] = []
    drafted = engine.controller.index.trees

    def noted(queried):
        trees = drafted(queried)
        sizes = trees.num_nodes.tolist()
        rows.append([(r.request_id, size) for r, size in zip(queried, sizes, strict=True)])
        return trees

    engine.controller.index.trees = noted
    found = drive(engine, [again(r) for r in requests])
    assert {n: o.tokens for n, o in found.items()} == {n: o.tokens for n, o in want.items()}
    sizes = [size for row in rows for number, size in row if number == 0]
    steps = list(zip(sizes, found[0].accepted, strict=True))
    pairs = pairwise(steps)
    assert any(a[1] == a[0] - 1 > 0 and b[0] == 1 for a, b in pairs), steps
    mixed = [row for row in rows if {size > 1 for _, size in row} == {True, False}]
    assert mixed, "no step had rows of both kinds"


class TrackedBackend:
    """A backend that counts decode steps submitted before the previous result was read."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.capacity, self.launch = backend, backend.capacity, backend.launch
        self.flights: list[tuple[StepKind, TrackedBackend.Future]] = []
        self.early, self.beside = 0, 0

    class Future:
        def __init__(self, future: StepFuture) -> None:
            self._future, self.is_known = future, False

        def result(self):
            self.is_known = True
            return self._future.result()

    def submit(self, plan: StepPlan) -> StepFuture:
        flying = [work for work, future in self.flights if not future.is_known]
        is_decode = plan.program.work is StepKind.DECODE
        self.early += is_decode and StepKind.DECODE in flying
        self.beside += bool(flying)
        self.flights.append((plan.program.work, TrackedBackend.Future(self._backend.submit(plan))))
        return self.flights[-1][1]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("overlap", [1, 2])
def test_ngram_decode_steps_serialize_and_overlap_prefill(overlap, served):
    tracked = TrackedBackend(served.backend())
    drive_staggered(ngram_engine(tracked, overlap=overlap), requests_of(GREEDY))
    assert not tracked.early
    assert tracked.beside


@pytest.mark.parametrize("overlap", [1, 2])
def test_ngram_at_max_one_prefill_between_decodes(overlap, served):
    tracked = TrackedBackend(served.backend())
    rng = np.random.default_rng(6)
    longs = [request(n, rng.integers(2, 250, 180).tolist()) for n in range(1, 5)]
    drive(ngram_engine(tracked, overlap=overlap), [request(0, [5, 6]), *longs])
    works = [work for work, _ in tracked.flights]
    first = works.index(StepKind.DECODE)
    last = len(works) - works[::-1].index(StepKind.PREFILL)
    runs = "".join("p" if work is StepKind.PREFILL else "d" for work in works[first:last])
    assert "pp" not in runs, runs


def test_ngram_lookup_miss_counts_no_drafts(served):
    engine = ngram_engine(served.backend(), max_trie_depth=2)
    one = request(0, [2, 3, 4, 5], max_tokens=2, **GREEDY)
    drive(engine, [one])
    found = engine.metrics.snapshot()
    assert found['ngram_lookups_total{result="miss"}'] == 1
    assert found['ngram_lookups_total{result="hit"}'] == 0
    assert found["spec_decode_num_drafts_total"] == 0


def test_max_draft_tokens_zero_disables_ngram_drafts(served):
    """The outputs stay the same."""
    requests = requests_of(GREEDY, 2)
    want = served.plain(requests)
    some = [again(requests[0]), again(requests[1])]
    some[0].sampling = replace(some[0].sampling, max_draft_tokens=0)
    found = drive(ngram_engine(served.backend()), some)
    assert {n: o.tokens for n, o in found.items()} == {n: o.tokens for n, o in want.items()}
    assert not any(found[0].accepted)
    assert any(found[1].accepted)


def test_ngram_preempted_requests_equal_plain_output(served):
    requests = requests_of({"max_tokens": 60, **GREEDY}, 3)
    want = served.plain(requests)
    engine = ngram_engine(served.backend(num_pages=1 + 34), overlap=2)
    found = drive(engine, [again(r) for r in requests])
    assert {n: o.tokens for n, o in found.items()} == {n: o.tokens for n, o in want.items()}
    assert engine.scheduler.num_preemptions
    alone = ngram_engine(served.backend())
    for each in requests:
        drive(alone, [again(each)])
    assert (
        engine.controller.index.num_ngrams == alone.controller.index.num_ngrams
    )  # every token was learnt once


def tree_after(index: NgramIndex, tokens: Sequence[int], tenant: str = "") -> list[int]:
    """The drafts after `tokens`, which the index forgets afterwards."""
    queried = Request(request_id=-1, prompt=(), sampling=SamplingParams(), tenant=tenant)
    index.add_tokens(queried, tokens)
    drafts = index.draft([queried])
    queried.output[:] = tokens
    index.end(queried, is_learnt=True)
    index.truncate(-1, 0)
    return drafts.tokens[0, 1 : drafts.num_nodes[0]].tolist()


@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_ngram_index_drops_tokens_after_stop_string(ends_by_itself, served):
    """The engine learns of the end of the output late, and later tokens are dropped.

    The request may have ended before by `max_tokens`: the string was in its last tokens.
    """
    length = 13 if ends_by_itself else 24
    engine = ngram_engine(served.backend(), max_trie_depth=4)
    one = request(0, [5, 6, 8], max_tokens=length, **GREEDY)
    engine.add(one)
    while len(one.output) < 12:
        engine.step()
    while ends_by_itself and engine.busy:
        engine.step()
    text = one.output[:]
    assert (one.finish_reason is FinishReason.LENGTH) == ends_by_itself
    engine.finish(0, 8)
    while engine.busy:
        checked_step(engine)
    assert len(set(text)) == len(text), "use another prompt: the removed tokens occur elsewhere"
    index = engine.controller.index
    assert tree_after(index, text[5:7]) == text[7:8]
    assert tree_after(index, text[7:8]) == []


def test_ngram_index_ignores_stale_tokens_of_aborted_request(served):
    engine, one = ngram_engine(served.backend(), max_trie_depth=4), request(0, [5, 6, 7], **GREEDY)
    (want,) = served.plain([one]).values()
    engine.add(one)
    while not (engine.flights and one.output):
        engine.step()
    known = len(one.output)
    engine.abort(0)
    while engine.busy:
        checked_step(engine)
    assert one.finish_reason is FinishReason.ABORT
    assert tree_after(engine.controller.index, want.tokens[known - 1 : known]) == []


def test_ngram_drafts_isolated_by_tenant(served):
    engine, (first,) = ngram_engine(served.backend()), requests_of(GREEDY, 1)
    first.tenant = "a"
    drive(engine, [first])
    text = [*first.prompt, *first.output]
    assert tree_after(engine.controller.index, text[-6:-3], "a")
    assert tree_after(engine.controller.index, text[-6:-3], "b") == []
    accepted = {}
    for tenant in ("a", "b"):
        request_of = again(first)
        request_of.tenant = tenant
        accepted[tenant] = sum(drive(engine, [request_of])[0].accepted)
    fresh = again(first)
    assert accepted["b"] == sum(drive(ngram_engine(served.backend()), [fresh])[0].accepted)
    assert accepted["a"] > accepted["b"]
