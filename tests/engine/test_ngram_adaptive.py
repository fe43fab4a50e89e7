"""Adaptive NGRAM: values of nodes, selection of nodes, disabling and probes."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from shared.boundary.backend import BackendLimits
from shared.boundary.program import ProgramFeature, StepKind
from shared.engine.cache_policy import NO_CACHE
from shared.engine.engine import Engine
from shared.engine.ngram.acceptance_estimate import NodeAcceptance, select_nodes
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram.probe_schedule import ProbeSchedule
from shared.engine.ngram.tree import NgramTreeBatch, roots_of
from shared.engine.ngram_controllers.adaptive import AdaptiveNgramController
from shared.options.ngram import NgramConfig
from shared.spec.draft_tree import TreeShape
from tests.support.backends import make_backend
from tests.support.closing_fixture import closing_fixture
from tests.support.run_engine import drive
from tests.support.tree_subjects import BATCH, DRAFTED, Served, request, tree_capacity

SIZES = (2, 8)
PROMPTS = ((5, 9, 5, 9, 11, 5, 9), (3,) * 20, (8, 1, 8, 2, 8), (60, 61), (7, 7, 9))


def trees(*rows: tuple[tuple[int, int, int], ...]) -> NgramTreeBatch:
    """Trees of nodes, each with token, parent and kind, below a root."""
    count, nodes = len(rows), 1 + max(map(len, rows))
    tokens, parents, evidence = (np.zeros((count, nodes), np.int32) for _ in range(3))
    for row, found in enumerate(rows):
        for node, (token, parent, kind) in enumerate(found, start=1):
            tokens[row, node], parents[row, node], evidence[row, node] = token, parent, kind
    sizes = np.array([1 + len(row) for row in rows], np.int32)
    return NgramTreeBatch(tokens, parents, sizes, evidence)


FORK = ((11, 0, 5), (12, 0, 6), (13, 1, 7), (14, 2, 7))


def learn(known: NodeAcceptance, found: NgramTreeBatch, text: list[int], times: int) -> None:
    texts, counts = np.array([text], np.int32), np.array([len(text)], np.int32)
    for _ in range(times):
        known.learn(found, np.array([0]), texts, counts)


def test_node_acceptance_learns_only_below_accepted_parents():
    known, fork = NodeAcceptance(), trees(FORK)
    before = known.rates
    learn(known, fork, [12, 99], 100)  # the second child, and none below it
    assert known.rates[[5, 6, 7]] == pytest.approx([0, 1, 0], abs=0.05)
    learn(known, fork, [12], 100)  # a plain step does not observe deeper nodes
    assert known.rates[[5, 6]] == pytest.approx([0, 1], abs=0.05)
    others = np.delete(np.arange(len(before)), [5, 6, 7])
    assert (known.rates[others] == before[others]).all()


def test_node_acceptance_follows_recent_steps():
    known, fork = NodeAcceptance(), trees(FORK)
    learn(known, fork, [11], 2000)
    learn(known, fork, [50], 1500)
    assert known.rates[5] < 0.3


def selected(
    found: NgramTreeBatch, weights: np.ndarray, sizes: list[tuple[int, int]], costs: list[float]
):
    """The selected size, the gain of each size, and the trees."""
    nodes, budgets = np.array(sizes).T.copy()
    gains, cut = np.empty(len(sizes)), roots_of(*weights.shape)
    size = select_nodes(found, weights, nodes, budgets, np.array(costs), gains, cut)
    return size, gains, cut


def test_select_nodes_keeps_best_nodes_as_trees():
    found = trees(FORK, ((21, 0, 0), (22, 1, 0), (23, 2, 0)))
    weights = np.array([[1, 0.6, 0.3, 0.5, 0.1], [1, 0.9, 0.8, 0.7, 0]])
    many, few = (5, 4), (3, 99)  # (max nodes per row with root, budget of all rows without roots)
    size, gains, cut = selected(found, weights, [(1, 0), many, few], [1.0, 9.0, 2.0])
    assert gains == pytest.approx([0, 0.9 + 0.8 + 0.7 + 0.6, 0.6 + 0.5 + 0.9 + 0.8])
    assert size == 2
    assert cut.tokens[:, :3].tolist() == [[0, 11, 13], [0, 21, 22]]
    assert cut.parents[:, :3].tolist() == [[0, 0, 1], [0, 0, 1]]
    assert cut.num_nodes.tolist() == [3, 3]


@pytest.mark.parametrize(("costs", "size"), [([1, 2, 3.5], 1), ([1, 3, 3.5], 0), ([1, 3, 3], 2)])
def test_select_nodes_maximizes_tokens_per_cost(costs, size):
    chain = trees(((21, 0, 0), (22, 1, 0), (23, 2, 0)))
    weights = np.array([[1, 0.9, 0.8, 0.7]])
    assert selected(chain, weights, [(1, 0), (3, 2), (4, 3)], costs)[0] == size


def test_node_weights_zero_beyond_remaining_tokens():
    known, found = NodeAcceptance(), trees(FORK)
    assert (known.weights(found, np.array([1]))[0, [3, 4]] == 0).all()
    assert (known.weights(found, np.array([0]))[0, 1:] == 0).all()
    assert (known.weights(found, np.array([2]))[0, 1:] > 0).all()


def capacity_of(vocab: int) -> BackendLimits:
    """Programs of plain steps and of host-built trees of two sizes."""
    capacity = tree_capacity(vocab)
    kept = [p for p in capacity.programs if p.work is not StepKind.DECODE or p.shape.is_plain]
    plain = next(p for p in kept if p.work is StepKind.DECODE)
    shapes = [TreeShape(size, size - 1, 1, BATCH * size) for size in SIZES]
    more = [
        replace(plain, shape=shape, extras=plain.extras | ProgramFeature.HOST_DRAFT)
        for shape in shapes
    ]
    return replace(capacity, programs=(*kept, *more))


def engine_of(table: dict[int, list[float]], overlap: int):
    config, weights = DRAFTED["NEXTN"].model()
    capacity = capacity_of(config.vocab)
    backend = make_backend("reference", config, weights, capacity, "none")
    index = NgramIndex(
        NgramConfig(), nodes=SIZES[-1], depth=SIZES[-1] - 1, vocab=config.vocab, chain=False
    )
    controller = AdaptiveNgramController(capacity, index, table)
    return Engine(
        backend, controller, overlap=overlap, chunked_prefill_size=128, cache=NO_CACHE
    ), controller


def requests() -> list:
    return [
        request(number, prompt, temperature=0.8 * (number % 2), max_tokens=40)
        for number, prompt in enumerate(PROMPTS)
    ]


served = closing_fixture(Served)


NEVER, ALWAYS = [1.0, 50.0, 90.0, 0.5], [1.0, 1e-3, 1e-2, 50.0]


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize(
    "table", [{}, {BATCH: NEVER}, {BATCH: ALWAYS}], ids=["no table", "never", "always"]
)
def test_adaptive_ngram_output_equals_plain(table, overlap, served):
    engine, controller = engine_of(table, overlap)
    controller._clock = lambda: 0.0  # keeps the table
    outcomes = drive(engine, requests())
    for asked in requests():
        assert outcomes[asked.request_id].tokens == served.plain("NEXTN", asked).tokens
    steps = controller.steps
    if table.get(BATCH) is NEVER:
        assert controller.is_asleep
        assert steps[3] > 5 * sum(steps[tier] for tier in (0, 1, 2))
    else:
        assert sum(sum(outcome.accepted) for outcome in outcomes.values()) > 0
        assert not controller.is_asleep
    assert controller.evidence.tried.sum() > 0


def test_adaptive_ngram_reenables_when_drafts_pay():
    engine, controller = engine_of({BATCH: [1.0, 1.01, 1.02, 0.95]}, 1)
    controller._clock = lambda: 0.0
    controller.is_asleep = True
    drive(engine, [request(0, (3,) * 20, temperature=0.0, max_tokens=150)])
    drafted = controller.steps[1] + controller.steps[2]
    assert controller.steps[3] > 0
    assert drafted > 0


@pytest.mark.parametrize("waits", [True, False])
def test_disabled_ngram_updates_index_when_host_idle(waits):
    """Without idle host time only probes update the index."""
    engine, controller = engine_of({BATCH: [1.0, 50.0, 90.0, 1e-6]}, 1)
    ticks = count()
    controller._clock = lambda: next(ticks) * 1e-4 * waits
    drive(engine, [request(0, (3,) * 20, temperature=0.0, max_tokens=40)])
    controller.sleep.on_gain(-1.0)  # the probe budget is spent
    before = controller.index.num_ngrams
    drive(engine, [request(1, (60, 61, 62, 63), temperature=0.0, max_tokens=40)])
    assert controller.is_asleep
    assert (controller.index.num_ngrams > before) == waits
    controller.sleep.on_gain(1.0)
    drive(engine, [request(2, (60, 61, 62, 63), temperature=0.0, max_tokens=40)])
    assert controller.index.num_ngrams > before


def probes(sleep: ProbeSchedule, step_s: float, probe_s: float, steps: int) -> list[int]:
    """The disabled steps after which a probe runs, where no tree pays."""
    found = []
    for step in range(steps):
        if sleep.is_due(step_s):
            found.append(step)
            sleep.on_probe(probe_s)
    return found


def test_probe_schedule_probes_every_step_within_budget():
    assert probes(ProbeSchedule(), step_s=5e-3, probe_s=0.0, steps=99) == list(range(99))
    short = probes(ProbeSchedule(), step_s=2.5e-4, probe_s=0.0, steps=300)
    assert short[:32] == list(range(32))
    assert set(np.diff(short[36:])) == {10}  # 50 us of 10 steps of 0.25 ms are 2 %


@pytest.mark.parametrize("probe_s", [0.0, 3e-4])
def test_probe_schedule_respects_time_share(probe_s):
    took, steps = max(probe_s, 5e-5), 10_000
    found = len(probes(ProbeSchedule(), step_s=2.5e-4, probe_s=probe_s, steps=steps))
    assert found * took == pytest.approx(0.02 * steps * 2.5e-4, rel=0.1)


def test_probe_overrun_is_charged_to_budget():
    sleep, took, steps = ProbeSchedule(), 0.0, 20_000
    for step in range(steps):
        if sleep.is_due(2.5e-4):
            probe_s = 2e-3 if step % 7 == 0 else 5e-5
            sleep.on_probe(probe_s)
            sleep.on_gain(-1e-3)
            took += probe_s
    assert took < 1.1 * 0.02 * steps * 2.5e-4


def test_rare_long_probe_is_charged_in_full():
    sleep, took = ProbeSchedule(), 0.0
    steps = range(200_000)
    for step in steps:
        if sleep.is_due(2.5e-4):
            probe_s = 2e-2 if step % 50 == 0 else 5e-5
            sleep.on_probe(probe_s)
            took += probe_s
    assert took < 1.1 * 0.02 * len(steps) * 2.5e-4


def test_probe_budget_grows_with_gain_after_debt():
    sleep, probe_s = ProbeSchedule(), 5e-5
    probes(sleep, step_s=2.5e-4, probe_s=0.0, steps=300)
    sleep.on_gain(10 * probe_s / 0.2)
    assert len(probes(sleep, step_s=0.0, probe_s=0.0, steps=50)) in (10, 11)
    sleep.on_gain(10 * probe_s / 0.2)
    sleep.on_gain(-8 * probe_s)
    assert len(probes(sleep, step_s=0.0, probe_s=0.0, steps=50)) in (2, 3)
    sleep.on_gain(-1.0)  # a debt of four probes remains
    sleep.on_gain(4 * probe_s)
    assert not probes(sleep, step_s=0.0, probe_s=0.0, steps=50)
    sleep.on_gain(1 * probe_s / 0.19)
    assert len(probes(sleep, step_s=0.0, probe_s=0.0, steps=50)) == 1


def test_should_draft_tolerates_poor_trees_when_waiting_costs():
    """Poor trees are tolerated only if good ones followed them before and waits are long."""

    def drafted_poor_trees(good_after_poor: bool, wait: float) -> int:
        """Number of consecutive poor trees that are drafted, after poor trees in pairs or alone."""
        sleep = ProbeSchedule()
        for _ in range(60):
            sleep.should_draft(0.9, wait, False)
            sleep.should_draft(-0.5, wait, False)
            for _ in range(0 if good_after_poor else 20):
                sleep.should_draft(-0.5, wait, True)
        sleep.should_draft(0.9, wait, True)
        return next(n for n in range(99) if not sleep.should_draft(-0.5, wait, False))

    assert (
        drafted_poor_trees(True, wait=0.8) == 6
    )  # 4 waits of 0.8 plain steps each pay for six losses
    assert drafted_poor_trees(True, wait=0.05) == 0
    assert drafted_poor_trees(False, wait=0.8) == 0


def test_probe_budget_is_capped():
    sleep = ProbeSchedule()
    sleep.on_gain(1.0)
    assert len(probes(sleep, step_s=0.0, probe_s=0.0, steps=99)) == 32


def test_adaptive_ngram_metrics_report_tiers_and_disabled():
    engine, _ = engine_of({BATCH: NEVER}, 1)
    drive(engine, requests())
    found = engine.metrics.snapshot()
    assert found['spec_decode_adaptive_steps_total{tier="disabled"}'] > 0
    assert 'spec_decode_adaptive_steps_total{tier="S7"}' in found
    assert sum(found[f'ngram_lookups_total{{result="{each}"}}'] for each in ("hit", "miss")) > 0
