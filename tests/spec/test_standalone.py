"""Small draft model: guarantees of its specification, and invariants of a step.

Its outputs and accepted drafts are compared between backends in
`tests/device/test_cross_backend_trees.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from shared.boundary.backend import Backend
from shared.reference import drafters
from shared.spec import attention, cache_pools, draft_tree, eagle, sampling, standalone, tree_growth
from shared.spec.recurrent_mixer import RecurrentPrefill
from shared.spec.recurrent_state import RecurrentState
from shared.spec.tree_growth import DraftRequests
from tests.support.backends import make_backend
from tests.support.contract_host import Host, emitted, prompt
from tests.support.implementations import Implementation
from tests.support.tiny_models import tiny_model
from tests.support.tiny_small import same_model, small_model
from tests.support.tree_subjects import CHAIN, PLAIN, TREE, tree_capacity

LENGTHS = np.array([7, 3])
TABLE = np.array([[4, 1, 7, 2], [3, 6, 5, 8]])
PAGE_SIZE = 8
FAMILIES = ("qwen3_5", "llama")
GREEDY: dict = {"temperature": 0.0}
SAMPLED: dict = {"temperature": 1.0, "seed32": 77}
either_sampling = pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
Memory = tuple[cache_pools.KV, RecurrentState]


class Drafting:
    """A small model with the memory of two requests; it records ranked logits."""

    def __init__(self, family: str, draft_from: np.ndarray) -> None:
        rng = np.random.default_rng(0)
        target = tiny_model("qwen3", 6)
        self.small = small_model(*target, family, 4)
        self.draft_from = draft_from
        self.texts = [rng.integers(0, 250, length) for length in LENGTHS]
        self.newest = np.array([11, 12])
        kv = cache_pools.new_pools(self.small.config, 10, PAGE_SIZE)
        self.kv, self.state = self.after(kv, self.texts)
        self.ranked: list[tuple[np.ndarray, np.ndarray]] = []

    def after(self, kv: cache_pools.Pools, texts: list[np.ndarray]) -> Memory:
        """The memory after texts that are prefilled from their first token on."""
        states = []
        for b, text in enumerate(texts):
            state = cache_pools.new_state(self.small.config, 1)
            where = (self.draft_from[[b]], TABLE[[b]])
            kv, state = standalone.prefill(self.small, kv, state, text, 0, *where)
            states.append(state)
        recurrent = np.concatenate([state.recurrent for state in states], axis=1)
        return kv, RecurrentState(recurrent, np.concatenate([s.window for s in states], axis=1))

    def rank(self, logits: np.ndarray, paths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.ranked.append((logits, paths))
        B, k, vocab = logits.shape
        weights = sampling.log_softmax(logits.reshape(-1, vocab))
        ids = sampling.top_candidates(weights, 3)
        edges = np.take_along_axis(weights, ids, axis=1)
        return ids.reshape(B, k, 3), edges.reshape(B, k, 3)

    def draft(self, max_drafts: int) -> tuple[Any, ...]:
        shape = draft_tree.TreeShape(nodes=8, depth=4, width=3, rows=16)
        limits = np.full(2, max_drafts)
        requests = DraftRequests(self.newest, LENGTHS, self.draft_from, limits, TABLE)
        tree, kv = standalone.draft(self.small, self.kv, self.state, requests, shape, self.rank)
        return (*tree, kv)

    def along(self, request: int, path: np.ndarray) -> np.ndarray:
        """The logits after the newest token and a path, by prefilling all of them."""
        tokens = np.concatenate([self.texts[request], self.newest[[request]], path])
        rows = attention.causal_rows(
            np.array([0, len(tokens)]),
            np.array([0]),
            self.draft_from[[request]],
            TABLE[[request]],
            len(tokens),
        )
        state = cache_pools.new_state(self.small.config, 1)
        mixer = RecurrentPrefill(
            self.small.config, self.small.weights, state, np.array([0, len(tokens)])
        )
        passed = self.small.forward(self.kv, rows, tokens, mixer)
        return self.small.logits(passed.hidden[-1:])[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_standalone_tree_node_equals_prefill_of_path(family):
    drafting = Drafting(family, np.array([0, 0]))
    drafting.draft(7)
    assert [paths.shape[1:] for _, paths in drafting.ranked] == [(1, 0), (3, 1), (3, 2), (3, 3)]
    for logits, paths in drafting.ranked:
        for request in range(2):
            for place in range(paths.shape[1]):
                want = drafting.along(request, paths[request, place])
                # Float32, sums in another order and the chunked against the sequential rule.
                np.testing.assert_allclose(logits[request, place], want, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_standalone_drafting_writes_within_scratch(family):
    drafting = Drafting(family, np.array([0, 0]))
    state = RecurrentState(drafting.state.recurrent.copy(), drafting.state.window.copy())
    *_, kv = drafting.draft(7)
    before, after = (attention.read(pool[0, 0], TABLE, 32) for (pool,) in (drafting.kv, kv))
    changed = (before != after).any(axis=(2, 3))
    for request, length in enumerate(LENGTHS):
        np.testing.assert_array_equal(np.flatnonzero(changed[request]), length + np.arange(10))
    np.testing.assert_array_equal(drafting.state.recurrent, state.recurrent)
    np.testing.assert_array_equal(drafting.state.window, state.window)


@pytest.mark.parametrize("family", FAMILIES)
def test_standalone_request_without_context_drafts_nothing(family):
    drafting = Drafting(family, np.array([0, 3]))  # draft KV of the second begins at its length
    drafting.state.recurrent[:, 1] = np.nan
    before = attention.read(drafting.kv[0][0, 0], TABLE, 32)[1]
    tokens, _, num_nodes, _, kv = drafting.draft(7)
    np.testing.assert_array_equal(num_nodes, [8, 1])
    np.testing.assert_array_equal(tokens[1, 1:], 0)
    np.testing.assert_array_equal(attention.read(kv[0][0, 0], TABLE, 32)[1], before)
    alone = Drafting(family, np.array([0, 0]))
    np.testing.assert_array_equal(tokens[0], alone.draft(7)[0][0])


@pytest.mark.parametrize("family", FAMILIES)
def test_standalone_extend_equals_prefill(family):
    drafting = Drafting(family, np.array([0, 0]))
    *_, kv = drafting.draft(7)  # the extend overwrites its rows
    path, counts = np.array([[11, 20, 21], [12, 30, 31]]), np.array([3, 1])
    kv, state, saved, passed = standalone.extend(
        drafting.small,
        kv,
        drafting.state,
        path,
        LENGTHS,
        counts,
        drafting.draft_from,
        TABLE,
        np.array([2, 2]),
    )
    texts = [np.append(text, path[b, : counts[b]]) for b, text in enumerate(drafting.texts)]
    want_kv, want = drafting.after(drafting.kv, texts)
    # Float32, the chunked against the sequential rule.
    np.testing.assert_allclose(state.recurrent, want.recurrent, atol=1e-4)
    np.testing.assert_allclose(state.window, want.window, atol=1e-4)
    (pool,), (want_pool,) = kv, want_kv
    for pages, wanted in zip(pool[0], want_pool[0], strict=True):
        for b, text in enumerate(texts):
            got, held = (attention.read(x, TABLE, 32)[b, : len(text)] for x in (pages, wanted))
            np.testing.assert_allclose(got, held, atol=1e-4)
    np.testing.assert_array_equal(passed, [True, False])
    _, earlier = drafting.after(drafting.kv, [texts[0][:9], texts[1]])
    np.testing.assert_allclose(saved.recurrent[:, 0], earlier.recurrent[:, 0], atol=1e-4)


@pytest.mark.parametrize("framework", ["reference", "torch", "jax"])
@pytest.mark.parametrize("vocab", [3, 5, 8])
def test_over_target_cuts_or_pads_vocabulary(framework, vocab):
    logits = np.arange(10, dtype=np.float32).reshape(2, 5)
    want = np.full((2, vocab), -np.inf, np.float32)
    want[:, :5] = logits[:, :vocab]
    np.testing.assert_array_equal(over_target(framework)(logits, vocab), want)


def over_target(framework: str) -> Callable[[np.ndarray, int], np.ndarray]:
    if framework == "reference":
        return standalone.over_target
    ops = Implementation(framework)("vocab_parallel")
    return lambda logits, vocab: ops.over_tokens(logits, None, vocab)


# Steps


@lru_cache
def target_of(family: str):
    return tiny_model(family, {"qwen3_5": 3, "llama": 5}[family])


def made(framework: str, family: str) -> Backend:
    """A backend with the target model as its own drafter."""
    config, weights = target_of(family)
    capacity = replace(tree_capacity(config.vocab), num_snapshots=4)
    return make_backend(framework, config, weights, capacity, same_model(config, weights))


@pytest.fixture(params=["reference", "torch"])
def host(request: pytest.FixtureRequest, family: str) -> Iterator[Host]:
    backend = made(request.param, family)
    yield Host(backend, {})
    backend.close()


either_family = pytest.mark.parametrize("family", FAMILIES)
hybrid = pytest.mark.parametrize("family", FAMILIES[:1])


def accepts_all(host: Host, how: dict) -> None:
    request = host.request(prompt(3, 20), **how)
    text = emitted(host.prefill(request), 0)
    for _ in range(6):
        result = host.decode(request, shape=CHAIN)
        assert result.counts[0] == CHAIN.max_tokens
        text += emitted(result, 0)
    assert text == host.alone(prompt(3, 20), len(text), **how)


@either_family
@either_sampling
def test_standalone_target_as_drafter_accepts_all(host, how):
    accepts_all(host, how)


@either_family
@either_sampling
def test_standalone_tree_of_target_holds_its_choices(host, how):
    request = host.request(prompt(4, 20), **how)
    text = emitted(host.prefill(request), 0)
    results = [host.decode(request, shape=TREE) for _ in range(6)]
    text += [token for result in results for token in emitted(result, 0)]
    assert text == host.alone(prompt(4, 20), len(text), **how)
    # A tree always keeps the best child of the root; a deeper choice may be on no kept path.
    counts = [int(result.counts[0]) for result in results]
    assert min(counts) >= 2
    assert max(counts) == TREE.max_tokens


@either_family
@either_sampling
def test_standalone_step_without_drafts_preserves_output(host, how):
    request = host.request(prompt(5, 20), **how)
    text = emitted(host.prefill(request), 0)
    for max_drafts in (3, 0, 3, 0, 0, 1, 3):
        plan = host.decode_plan(request, shape=CHAIN)
        plan.sampling.max_drafts[:] = max_drafts
        result = host.run(plan)
        assert result.counts[0] == max_drafts + 1
        text += emitted(result, 0)
    assert text == host.alone(prompt(5, 20), len(text), **how)


@either_family
@either_sampling
def test_standalone_drafts_nothing_after_plain_steps(host, how):
    request = host.request(prompt(6, 20), **how)
    text = emitted(host.prefill(request), 0)
    counts = []
    for shape in (CHAIN, PLAIN, PLAIN, *[CHAIN] * 8):
        result = host.decode(request, shape=shape)
        counts.append(int(result.counts[0]))
        text += emitted(result, 0)
    assert counts[:4] == [4, 1, 1, 1], "with no context there are no drafts"
    assert text == host.alone(prompt(6, 20), len(text), **how)


@hybrid
def test_standalone_restored_snapshot_drafts_same_tokens(host):
    tokens = prompt(7, 90)
    first = host.request(tokens)
    plan = host.prefill_plan(first)
    plan.snapshots.save[0], plan.snapshots.save_at[0] = 1, 64
    assert host.run(plan).snapshot_saved[0]
    heir = host.request(tokens)
    host.share(first, heir, 64)
    host.run(host.restored_plan(heir, 64, 1))
    for _ in range(4):
        result = host.decode(heir, shape=CHAIN)
        assert result.counts[0] == CHAIN.max_tokens


@hybrid
def test_standalone_decode_snapshot_holds_drafter_state(host):
    tokens = prompt(8, 30)
    first = host.request(tokens)
    text = emitted(host.prefill(first), 0)
    for _ in range(3):
        plan = host.decode_plan(first, shape=CHAIN)
        plan.snapshots.save[0], plan.snapshots.save_at[0] = 2, 36
        text += emitted(host.run(plan), 0)
    heir = host.request((*tokens, *text[:7]))
    host.share(first, heir, 36)
    host.run(host.restored_plan(heir, 36, 2))
    for _ in range(4):
        result = host.decode(heir, shape=CHAIN)
        assert result.counts[0] == CHAIN.max_tokens


# Planted faults


def drafting_moves_the_state(patch: pytest.MonkeyPatch) -> None:
    healthy = drafters.StandaloneDrafter.draft

    def draft(drafter: Any, batch: Any, newest: np.ndarray, *rest: Any) -> Any:
        trees = healthy(drafter, batch, newest, *rest)
        drafter._state.window[:, batch.slots] *= np.float32(0.5)
        return trees

    patch.setattr(drafters.StandaloneDrafter, "draft", draft)


def no_extend(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drafters.StandaloneDrafter, "extend", lambda *arguments: None)


def root_at_a_wrong_position(patch: pytest.MonkeyPatch) -> None:
    healthy = eagle.extend_rows

    def rows(*arguments: Any, depth: int) -> attention.AttentionRows:
        rows = healthy(*arguments, depth)
        return rows if depth else replace(rows, positions=rows.positions + 1)

    patch.setattr(eagle, "extend_rows", rows)


def nodes_at_the_heads_positions(patch: pytest.MonkeyPatch) -> None:
    healthy = tree_growth._expansion_rows

    def rows(*arguments: Any) -> attention.AttentionRows:
        found = healthy(*arguments)
        return replace(found, positions=found.positions - 1)

    patch.setattr(tree_growth, "_expansion_rows", rows)


def nodes_start_from_the_requests_state(patch: pytest.MonkeyPatch) -> None:
    healthy = standalone._step

    def step(small: Any, kv: Any, state: RecurrentState, *rest: Any) -> Any:
        logits, kv, _ = healthy(small, kv, state, *rest)
        return logits, kv, state

    patch.setattr(standalone, "_step", step)


FAULTS = (
    drafting_moves_the_state,
    no_extend,
    root_at_a_wrong_position,
    nodes_at_the_heads_positions,
    nodes_start_from_the_requests_state,
)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_detected(plant, monkeypatch):
    backend = made("reference", "qwen3_5")
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        accepts_all(Host(backend, {}), SAMPLED)
    backend.close()
