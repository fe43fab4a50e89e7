"""Simulated acceptance: rates, equality of all backends, and the metric."""

from dataclasses import replace

import numpy as np
import pytest

from shared.boundary.backend import Backend, StepResult
from shared.boundary.program import StepKind
from shared.engine.branch_calibration import with_branch_calibration
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import Controller, DelegatingController, StaticController
from shared.engine.engine import Engine
from shared.engine.rows import ScheduledRows
from shared.spec import acceptance as spec
from shared.spec import draft_tree
from shared.spec.gumbel_noise import uniforms
from tests.support import drafter_cases
from tests.support.backends import make_backend
from tests.support.implementations import Implementation, each_implementation
from tests.support.random_trees import random_trees
from tests.support.run_engine import Outcome, drive
from tests.support.tree_subjects import CHAIN, DRAFTED, TREE, request, tree_capacity

PROMPTS = ((5, 17, 3, 29, 8, 40, 2), (9, 9, 31))
ROWS = 64


def trees_of(seed: int, B: int = ROWS, N: int = 9) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    tokens, parents, num_nodes = random_trees(rng, B, N)
    choices = rng.integers(0, 3, (B, N)).astype(np.int32)
    seeds = rng.integers(0, 2**32, B, np.uint32)
    return tokens, parents, num_nodes, choices, seeds, rng.integers(0, 99, B).astype(np.int32)


@pytest.mark.parametrize("rates", [(0.0,), (1.0,), (1.0, 0.5), (0.7, 0.7, 0.7, 0.7)])
def test_simulate_accepts_first_child_path(rates) -> None:
    tokens, parents, num_nodes, choices, seeds, lengths = trees_of(1)
    found, walked = spec.simulate(tokens, parents, num_nodes, choices, rates, seeds, lengths)
    depth = int(draft_tree.depths(parents).max())
    path, counts = spec.accept_greedy_path(tokens, parents, walked, found, depth)
    out, chance = spec.emitted(found, path, counts), uniforms(seeds, lengths, len(rates))
    for b in range(ROWS):
        way = [0]
        for level, rate in enumerate(rates):
            children = [n for n in range(1, num_nodes[b]) if parents[b, n] == way[-1]]
            if not children or chance[b, level] >= rate:
                break
            way.append(children[0])
        assert path[b, : counts[b]].tolist() == way
        assert out[b, : counts[b]].tolist() == [*tokens[b, way[1:]], choices[b, way[-1]]]


@each_implementation
@pytest.mark.parametrize("rates", [(0.0,), (1.0, 0.4), (0.9, 0.6, 0.3)])
def test_simulate_matches_spec(rates, implementation) -> None:
    tokens, parents, num_nodes, choices, seeds, lengths = trees_of(2)
    given = (tokens, parents, num_nodes, choices, rates, seeds, lengths)
    for got, want in zip(_run(implementation, given), spec.simulate(*given), strict=True):
        np.testing.assert_array_equal(got, want)


def _run(implementation: Implementation, given: tuple) -> tuple[np.ndarray, ...]:
    """Rates are numbers of the program, not an array."""
    *before, rates, seeds, lengths = given
    module = implementation("acceptance")
    return module.simulate(*before, rates, seeds, lengths)


def test_simulate_rates_equal_level_reach_frequency() -> None:
    B, rates = 4096, (1.0, 0.5, 0.25)
    parents = np.tile(np.arange(-1, 3, dtype=np.int32).clip(min=0), (B, 1))
    tokens, num_nodes = np.tile(np.arange(4, dtype=np.int32), (B, 1)), np.full(B, 4, np.int32)
    choices, lengths = np.zeros((B, 4), np.int32), np.arange(B, dtype=np.int32)
    given = (tokens, parents, num_nodes, choices, rates, np.full(B, 7, np.uint32), lengths)
    _, walked = spec.simulate(*given)
    assert walked.mean() == pytest.approx(1 + 1 + 0.5 + 0.125, abs=0.05)
    capacity = replace(tree_capacity(272), accept_rates=rates)
    assert capacity.simulated_accept_length == 1 + 1 + 0.5 + 0.125


MADE: dict = {}
"""By framework and rates; the shapes share one."""


@pytest.fixture(scope="module", autouse=True)
def closed():
    yield
    for backend in MADE.values():
        backend.close()
    MADE.clear()


def backend_of(framework: str, rates: tuple[float, ...] | None) -> Backend:
    if (framework, rates) not in MADE:
        config, weights = DRAFTED["NEXTN"].model()
        capacity = replace(tree_capacity(config.vocab), accept_rates=rates)
        made = make_backend(framework, config, weights, capacity, "NEXTN")
        MADE[framework, rates] = made
    return MADE[framework, rates]


def serve(framework: str, shape, rates: tuple[float, ...] | None, temperature: float):
    """Texts and acceptance of the hybrid with its mtp layer, and the engine's metrics."""
    backend = backend_of(framework, rates)
    controller = StaticController(
        backend.capacity, nodes=shape.nodes, depth=shape.depth, width=shape.width
    )
    engine = Engine(backend, controller, overlap=1, chunked_prefill_size=128, cache=NO_CACHE)
    asked = [
        request(number, prompt, temperature=temperature, max_tokens=20, seed32=number)
        for number, prompt in enumerate(PROMPTS)
    ]
    return drive(engine, asked), engine.metrics.snapshot()


def texts(outcomes: dict[int, Outcome]) -> list[list[int]]:
    return [outcome.tokens for outcome in outcomes.values()]


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("framework", ["reference", "torch"])
def test_simulate_rate_zero_equals_plain_output(framework, temperature, shape) -> None:
    judged, _ = serve("reference", shape, None, temperature)
    rejected, metrics = serve(framework, shape, (0.0,), temperature)
    assert texts(rejected) == texts(judged)
    assert sum(sum(outcome.accepted) for outcome in judged.values()) > 0
    assert all(set(outcome.accepted) == {0} for outcome in rejected.values())
    assert metrics["spec_decode_simulated_accept_length"] == 1


BACKENDS = [
    pytest.param("torch", CHAIN, id="torch-chain"),
    pytest.param("torch", TREE, id="torch-tree"),
    pytest.param("jax", TREE, id="jax-tree"),
    # Judged as a tree is, in programs that XLA compiles for some ten seconds.
    pytest.param("jax", CHAIN, id="jax-chain", marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("framework", "shape"), BACKENDS)
def test_simulate_backends_match_spec(framework, shape) -> None:
    rates = (1.0, 0.6)
    want, metrics = serve("reference", shape, rates, 0.9)
    got, _ = serve(framework, shape, rates, 0.9)
    assert texts(got) == texts(want)
    lengths = [accepted for outcome in want.values() for accepted in outcome.accepted]
    assert [a for outcome in got.values() for a in outcome.accepted] == lengths
    assert set(lengths) == {1, 2}
    assert metrics["spec_decode_simulated_accept_length"] == 2.6


class TreeRecorder(DelegatingController):
    """Controller that records the verified trees of running requests."""

    def __init__(self, inner: Controller) -> None:
        super().__init__(inner)
        self.trees: list[tuple[list[int], list[int]]] = []

    def on_result(self, rows: ScheduledRows, result: StepResult) -> None:
        super().on_result(rows, result)
        if rows.work is not StepKind.DECODE:
            return
        for row, each in enumerate(rows.requests):
            if each.finish_reason is None:
                tree = result.parents[row].tolist(), result.drafts[row].tolist()
                self.trees.append(tree)


@pytest.mark.parametrize(("framework", "family"), [("reference", "llama"), ("torch", "qwen3_5")])
def test_simulated_block_trees_ignore_earlier_requests(framework: str, family: str) -> None:
    shape = drafter_cases.BLOCK_TREE
    capacity = drafter_cases.capacity_of(family, "DFLASH", shape)
    capacity = replace(capacity, accept_rates=(0.9, 0.8, 0.7))
    config, weights = drafter_cases.model_of(family, "DFLASH")
    head = drafter_cases.drafter_of(family, "DFLASH")
    backend = make_backend(framework, config, weights, capacity, head)
    controller = StaticController(capacity, nodes=shape.nodes, depth=shape.depth, width=shape.width)
    calibrated = with_branch_calibration(controller, capacity)
    rounds = []
    for _ in range(2):
        recorder = TreeRecorder(calibrated)
        engine = Engine(backend, recorder, overlap=2, chunked_prefill_size=64, cache=NO_CACHE)
        asked = [request(i, (5, 17, i), temperature=0.0, max_tokens=40) for i in range(3)]
        rounds.append((texts(drive(engine, asked)), recorder.trees))
    backend.close()
    assert rounds[0] == rounds[1]


def test_simulated_accept_length_gauge_absent_by_default() -> None:
    _, metrics = serve("reference", CHAIN, None, 0.0)
    assert "spec_decode_simulated_accept_length" not in metrics


def test_simulated_acceptance_conflicts_with_rejection_sampling() -> None:
    capacity = tree_capacity(272)
    chains = tuple(program for program in capacity.programs if program.shape.width <= 1)
    with pytest.raises(ValueError, match="not supported with simulated acceptance"):
        replace(capacity, programs=chains, accept_rule="block", accept_rates=(0.5,))


def test_simulated_acceptance_rejects_empty_rates() -> None:
    with pytest.raises(ValueError, match="must contain the rate of at least one draft level"):
        replace(tree_capacity(272), accept_rates=())
