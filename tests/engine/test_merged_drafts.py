"""N-gram drafts merged with a drafter: built without waiting, verified where they pay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from shared.boundary.backend import Backend, BackendLimits, StepFuture, StepPlan
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.engine.adaptive.tiers import Shapes
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.ngram.backoff import LONGEST, SHORTEST
from shared.engine.ngram.corpus import SEPARATOR, Corpus
from shared.engine.ngram.drafter_acceptance import DrafterAcceptance, drafter_levels
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram.tree import NgramTreeBatch
from shared.engine.ngram_controllers.merged_drafts import KINDS, MergedDraftController
from shared.engine.request import CORPUS, NGRAM, Request, SamplingParams
from shared.options.ngram import NgramConfig
from shared.spec.draft_tree import TreeShape
from tests.support.backends import make_backend
from tests.support.limits import make_limits, make_program
from tests.support.run_engine import Outcome, drive
from tests.support.tiny_models import tiny_model
from tests.support.traces import check_trace

BATCH, DEPTH = 3, 6
PLAIN, CHAIN = TreeShape.plain(BATCH), TreeShape.chain(2, BATCH)
AHEAD = 2 * (DEPTH + 1)
JOINED = TreeShape(
    nodes=CHAIN.nodes + DEPTH,
    depth=DEPTH,
    width=1,
    rows=6 * BATCH,
    grown=CHAIN,
    copied=1 + AHEAD + 2 * DEPTH,
)

COPIED = replace(JOINED, nodes=1 + DEPTH, grown=PLAIN)
SHARE = 0.2
"""Time of the drafter's passes as a fraction of a plain step."""


def capacity_of(vocab: int) -> BackendLimits:
    def program(work: StepKind, shape: TreeShape, tokens: int = 0) -> Program:
        made = make_program(work, shape, tokens, batch=BATCH, pages=64)
        return made.with_features({ProgramFeature.NGRAM_DRAFTS: shape.copied > 0})

    decodes = (program(StepKind.DECODE, shape) for shape in (PLAIN, CHAIN, JOINED, COPIED))
    return make_limits(
        (program(StepKind.PREFILL, PLAIN, 64), *decodes),
        page_size=4,
        context_length=160,
        vocab=vocab,
        max_stop_ids=2,
        max_bias=2,
    )


class TrackedBackend:
    """A backend that records the number of steps in flight at each submission."""

    def __init__(self, backend: Backend) -> None:
        self.capacity, self.launch, self._backend = backend.capacity, backend.launch, backend
        self.in_flight: list[int] = []
        self._pending = 0

    def submit(self, plan: StepPlan) -> StepFuture:
        self.in_flight.append(self._pending)
        self._pending += 1
        return _TrackedFuture(self, self._backend.submit(plan))

    def finished(self) -> None:
        self._pending -= 1


class _TrackedFuture:
    def __init__(self, of: TrackedBackend, future: StepFuture) -> None:
        self._of, self._future = of, future

    def result(self):
        self._of.finished()
        return self._future.result()


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    config, weights = tiny_model("qwen3_5", seed=3)
    made = make_backend("reference", config, weights, capacity_of(config.vocab), "NEXTN")
    yield made
    made.close()


def index_of(capacity: BackendLimits, **config: int) -> NgramIndex:
    named = {f"speculative_ngram_{name}": value for name, value in config.items()}
    return NgramIndex(
        NgramConfig(**named),
        nodes=JOINED.copied,
        depth=JOINED.copied - 1,
        vocab=capacity.vocab,
        chain=False,
        ahead=AHEAD,
        path=AHEAD + DEPTH,
    )


def requests_of(sampled: bool) -> list[Request]:
    how: dict = {"temperature": 0.9, "presence_penalty": 0.2} if sampled else {"temperature": 0.0}
    rng = np.random.default_rng(2)
    return [
        Request(
            request_id=number,
            prompt=tuple(rng.integers(8, 250, 9 + 4 * number).tolist()),
            sampling=SamplingParams(
                max_tokens=40,
                seed32=number,
                traces=True,
                max_draft_tokens=5 if number == 2 else None,
                **how,
            ),
        )
        for number in range(4)
    ]


def served(backend: Backend, controller, overlap: int, sampled: bool) -> dict[int, Outcome]:
    engine = Engine(backend, controller, overlap=overlap, chunked_prefill_size=64, cache=NO_CACHE)
    return drive(engine, requests_of(sampled))


@pytest.fixture(scope="module")
def plain(backend) -> dict[bool, dict[int, Outcome]]:
    def texts(sampled: bool) -> dict[int, Outcome]:
        controller = StaticController(backend.capacity, nodes=1, depth=0, width=0)
        return served(backend, controller, 1, sampled)

    return {sampled: texts(sampled) for sampled in (False, True)}


def add_output_corpus(index: NgramIndex, texts: dict[int, Outcome], wrong: int) -> None:
    """Adds a corpus of the expected outputs, in which every `wrong`-th token is replaced."""
    words = [
        20 if place % wrong == wrong - 1 else token
        for outcome in texts.values()
        for place, token in enumerate([*outcome.tokens, SEPARATOR])
    ]
    index.corpora.add("outputs", Corpus.build(np.array(words, np.int32)))


@pytest.mark.parametrize(
    ("sampled", "overlap"), [(False, 0), (False, 1), (True, 1), (True, 2)], ids=str
)
def test_merged_output_equals_plain_and_accepts_corpus_drafts(backend, plain, sampled, overlap):
    index = index_of(backend.capacity, external_sam_budget=DEPTH)
    add_output_corpus(index, plain[sampled], wrong=9)
    tracked = TrackedBackend(backend)
    controller = MergedDraftController(tracked.capacity, index, SHARE, {})
    found = served(tracked, controller, overlap, sampled)
    for number, outcome in found.items():
        assert outcome.tokens == plain[sampled][number].tokens
        check_trace(outcome, max_rows=BATCH)
        assert number != 2 or max(outcome.accepted) <= 5
    longest = max(count for outcome in found.values() for count in outcome.accepted)
    assert longest > CHAIN.depth
    assert controller.steps["merged"] + controller.steps["ngram"] > 3
    assert controller.accepted[CORPUS] > 20
    assert max(tracked.in_flight) == overlap, "a step waited for the one before"
    for source in ("model", NGRAM, CORPUS):
        of = f'{{source="{source}"}}'
        gauges = controller.gauges
        assert gauges[f"spec_decode_source_accepted_tokens_total{of}"]() <= (
            gauges[f"spec_decode_source_draft_tokens_total{of}"]()
        )
    assert sum(controller.accepted.values()) == sum(sum(o.accepted) for o in found.values())


def test_merged_without_ngrams_uses_model_steps(backend, plain):
    """Without n-gram matches the steps are those of the drafter alone."""
    controller = MergedDraftController(backend.capacity, index_of(backend.capacity), SHARE, {})
    found = served(backend, controller, 1, True)
    alone = StaticController(
        backend.capacity, nodes=CHAIN.nodes, depth=CHAIN.depth, width=CHAIN.width
    )
    own = served(backend, alone, 1, True)
    assert controller.steps["model"] > 4 * controller.steps["merged"]
    assert {n: o.tokens for n, o in found.items()} == {n: o.tokens for n, o in own.items()}


def test_tokens_ahead_after_ngram_step_equals_max_depth(backend, plain):
    """After a wrong n-gram token, the drafts of the next step no longer match the output."""
    index = index_of(backend.capacity, external_sam_budget=DEPTH)
    add_output_corpus(index, plain[False], wrong=9)
    controller = MergedDraftController(backend.capacity, index, SHARE, {})
    worth, weigh = controller.worth, controller.worth.expected_tokens_of_tree
    noted = list[tuple[str, int]]()

    def noting(trees, chances, ahead):
        kind = next(iter(controller.steps - before), "none")
        before.update(controller.steps - before)
        noted.extend((kind, int(each)) for each in ahead if each > 1)  # a decode step is in flight
        return weigh(trees, chances, ahead)

    before = Counter[str]()
    vars(worth)["expected_tokens_of_tree"] = noting
    served(backend, controller, 1, False)
    with_copies = {ahead for kind, ahead in noted if kind in ("merged", "ngram")}
    assert with_copies == {worth.depth + 1}
    alone = {ahead for kind, ahead in noted if kind == "model"}
    assert alone
    assert max(alone) <= CHAIN.max_tokens


def test_ngram_tree_path_exceeds_trie_depth(backend):
    index = index_of(backend.capacity, max_trie_depth=4)
    text = Request(request_id=1, prompt=(), sampling=SamplingParams())
    sequence = list(range(10, 40))
    index.add_tokens(text, [*sequence, 50, *sequence[:3]])
    index.trees([text])
    index.learn()
    trees = index.trees([text])
    length = AHEAD + DEPTH
    assert trees.tokens[0, 1 : 1 + length].tolist() == sequence[3 : 3 + length]
    assert trees.parents[0, 1 : 1 + length].tolist() == list(range(length))


def trees_of(parents: Sequence[int]) -> NgramTreeBatch:
    count = 1 + len(parents)
    zeros, known = np.zeros((1, count), np.int32), np.array([[0, *parents]], np.int32)
    return NgramTreeBatch(zeros, known, np.array([count], np.int32), zeros)


def test_expected_tokens_of_tree_counts_gain_over_drafter():
    worth = DrafterAcceptance(2, 4)
    worth.rates[:] = 0.9, 0.5
    chances = np.array([[1.0, 0.8, 0.7, 0.3, 0.6]])
    fork = trees_of([0, 1, 1, 2])  # two children at depth 2, the better one has 0.7
    now, later, never = (
        worth.expected_tokens_of_tree(fork, chances, np.array([n])) for n in (0, 1, 3)
    )
    own = 1 + 0.9 + 0.45
    assert now == pytest.approx((own, own + (0.7 - 0.45) + 0.6, 1 + 0.8 + 0.7 + 0.6))
    assert later == pytest.approx((own, own + (0.6 - 0.45), 1 + 0.7 + 0.6))
    assert never == pytest.approx((own, own, 1))


def test_drafter_acceptance_learns_only_from_observed_levels():
    worth = DrafterAcceptance(2, 4)
    for _ in range(400):
        worth.learn(drafted=2, by_drafter=1)  # n-gram nodes continued after its first draft
        worth.learn(drafted=0, by_drafter=0)  # no observation
    assert worth.rates == pytest.approx([1, 0], abs=0.02)
    assert worth.expected_tokens == pytest.approx(2, abs=0.05)


def test_drafter_levels_end_at_first_ngram_node():
    drafted = [True, True, False, False]  # two chains; the second continues from node 1
    assert drafter_levels([0, 1, 1, 3], drafted, [1, 3, 4]) == (2, 1)
    assert drafter_levels([0, 1, 1, 3], drafted, [1, 2]) == (2, 2)
    assert drafter_levels([], [], []) == (0, 0)


SECONDS = {"none": 1.0, "model": 1.2, "ngram": 1.1, "merged": 1.3}
"""Step times by kind, where drafts cost little."""


def table_of(capacity: BackendLimits, seconds: dict[str, float]) -> dict[int, list[float]]:
    """The step times by tier of the backend's programs."""
    named = {PLAIN: "none", CHAIN: "model", COPIED: "ngram", JOINED: "merged"}
    shapes = Shapes.of(capacity, host_draft=False)
    return {BATCH: [seconds[named[shapes.by_size[BATCH, t]]] for t in range(len(shapes.tiers))]}


@pytest.mark.parametrize("expensive", [None, "drafts", "all"])
def test_merged_kind_maximizes_tokens_per_measured_second(backend, plain, expensive):
    """N-grams of the output exist; where all drafts are expensive almost none are made."""
    index = index_of(backend.capacity, external_sam_budget=DEPTH)
    add_output_corpus(index, plain[False], wrong=9)
    factor = {"drafts": {"model": 9, "merged": 9}, "all": dict.fromkeys(KINDS, 40)}
    more = factor.get(expensive or "", {})
    seconds = {kind: each * more.get(kind, 1) for kind, each in SECONDS.items()}
    table = table_of(backend.capacity, seconds)
    controller = MergedDraftController(backend.capacity, index, SHARE, table)
    found = served(backend, controller, 1, False)
    assert {n: o.tokens for n, o in found.items()} == {n: o.tokens for n, o in plain[False].items()}
    steps = controller.steps
    if expensive == "all":
        assert steps["none"] > 0.8 * sum(steps.values())
    elif expensive == "drafts":
        assert steps["ngram"] > max(steps["model"] + steps["merged"], 3)
    else:
        assert steps["none"] == 0
        assert steps["merged"] + steps["model"] > 3


def controller_with(backend: Backend, **seconds: float) -> MergedDraftController:
    table = table_of(backend.capacity, {**SECONDS, **seconds})
    return MergedDraftController(backend.capacity, index_of(backend.capacity), SHARE, table)


def test_merged_backoff_doubles_between_failed_trials(backend):
    controller, kinds = controller_with(backend, joined=9, copied=9), []
    for _ in range(600):
        worth = controller.worth
        tokens = {"model": worth.expected_tokens, "merged": worth.expected_tokens, "ngram": 1.0}
        kinds.append(controller.kind_of(tokens, BATCH))
        if kinds[-1] == "model":  # and no draft is accepted
            worth.learn(drafted=2, by_drafter=0)
    first, *trials = np.flatnonzero(np.array(kinds) == "model")
    assert first == 0
    gaps = np.diff([first, *trials])
    pauses = gaps[gaps > 1] - 1
    assert pauses.tolist() == [SHORTEST * 2**n for n in range(len(pauses))]
    assert len(pauses) > 3
    after = kinds[kinds.index("none") :]
    assert after.count("model") < 0.1 * len(after)


def test_merged_backoff_ends_with_ngrams_or_accepted_drafts(backend):
    controller = controller_with(backend, joined=9)
    controller.worth.rates[:] = 0.01
    none = {"model": 1.01, "merged": 1.01, "ngram": 1.0}
    assert controller.kind_of(none, BATCH) == "none"
    assert controller.kind_of(none | {"ngram": 3.0}, BATCH) == "ngram"
    assert controller.pause.left == 0
    for _ in range(2 * LONGEST):
        worth = controller.worth
        if controller.kind_of(none | {"model": worth.expected_tokens}, BATCH) == "model":
            worth.learn(drafted=2, by_drafter=2)
    assert controller.worth.expected_tokens > 2.5
    assert controller.kind_of(none | {"model": controller.worth.expected_tokens}, BATCH) == "model"


def test_merged_kind_follows_observed_step_times(backend):
    controller = controller_with(backend)
    tokens = {"model": 2.0, "merged": 2.1, "ngram": 1.0}
    assert controller.kind_of(tokens, BATCH) == "model"
    for _ in range(50):
        controller.measured.observe(BATCH, "model", 1.9)
    assert controller.kind_of(tokens | {"merged": 2.6}, BATCH) == "merged"


def test_merged_controller_rejects_mismatched_ngram_nodes(backend):
    index = NgramIndex(NgramConfig(), nodes=5, depth=4, vocab=backend.capacity.vocab, chain=False)
    with pytest.raises(ValueError, match="with 5 n-gram nodes"):
        MergedDraftController(backend.capacity, index, SHARE, {})
