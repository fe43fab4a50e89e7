"""Estimates of the adaptive controller: acceptance rates and step costs."""

from __future__ import annotations

import numpy as np
import pytest

from shared.engine.adaptive.acceptance import AcceptanceModel
from shared.engine.adaptive.costs import Costs
from shared.engine.adaptive.tiers import Shapes, Tier
from shared.spec.draft_tree import TreeShape
from tests.support.toy_backend import toy_capacity

OFF, SHORT, LONG, TREE = Tier(1, 0, 0), Tier(4, 3, 1), Tier(8, 7, 1), Tier(16, 5, 4)
TIERS = (OFF, SHORT, LONG, TREE)
SECONDS = (1.0,) * len(TIERS)
NUMBER = {tier: number for number, tier in enumerate(TIERS)}


def learn(known: AcceptanceModel, request: int, tier: Tier, accepted: list[int]) -> None:
    rows = known.rows_of([request])
    for count in accepted:
        drafted = np.array([tier.depth])
        known.learn(rows, NUMBER[tier], drafted, np.array([count]))


def chances(known: AcceptanceModel, request: int) -> np.ndarray:
    """Estimated conditional acceptance rate of a request by depth of a chain."""
    _, survivals = known.predict(
        known.rows_of([request]), np.array([99]), np.zeros(1, bool), 1, SECONDS
    )
    return survivals[0] / np.concatenate([[1.0], survivals[0, :-1]])


def tokens(known: AcceptanceModel, request: int, most: int = 99, is_after_off: bool = False):
    found, _ = known.predict(
        known.rows_of([request]), np.array([most]), np.array([is_after_off]), 1, SECONDS
    )
    return found


def test_acceptance_model_estimates_observed_conditional_rates():
    """A draft of every second chain is accepted at depth 1, and then always at depth 2."""
    known = AcceptanceModel(TIERS)
    learn(known, 1, SHORT, [0, 3] * 100)
    assert chances(known, 1)[:3] == pytest.approx([0.5, 0.95, 0.95], abs=0.06)
    assert tokens(known, 1).tokens[NUMBER[SHORT]] == pytest.approx(2.5, abs=0.2)


def test_acceptance_model_ignores_unobserved_depths():
    """Depths below a rejected draft, and deeper than the tier, are not observed."""
    known, both = AcceptanceModel(TIERS), AcceptanceModel(TIERS)
    learn(known, 1, SHORT, [3] * 60)
    assert chances(known, 1)[6] > 0.85  # chains of 3 are no evidence against depth 7
    learn(both, 1, LONG, [0, 0, 0, 7] * 30)
    assert chances(both, 1)[1:] == pytest.approx([0.95] * 6, abs=0.06)


def test_acceptance_model_new_request_starts_from_population():
    known = AcceptanceModel(TIERS)
    for request in range(10):
        learn(known, request, SHORT, [3] * 20)
    assert chances(known, 99)[0] > 0.9
    learn(known, 99, SHORT, [0] * 8)
    assert chances(known, 99)[0] < 0.35
    assert chances(known, 5)[0] > 0.8


def test_acceptance_model_prefers_recent_steps_and_decays_confidence():
    known = AcceptanceModel(TIERS)
    learn(known, 1, SHORT, [3] * 300)
    learn(known, 1, SHORT, [0] * 40)
    assert chances(known, 1)[0] < 0.25
    before = tokens(known, 1).trial_gain[NUMBER[SHORT]][NUMBER[OFF]]
    learn(known, 1, OFF, [0] * 200)
    assert tokens(known, 1).trial_gain[NUMBER[SHORT]][NUMBER[OFF]] > 2 * before


def test_acceptance_model_predicts_tree_from_chains_until_observed():
    known = AcceptanceModel(TIERS)
    learn(known, 1, LONG, [0, 1, 0, 2] * 50)
    guess = tokens(known, 1).tokens
    assert guess[NUMBER[TREE]] > 1.3 * guess[NUMBER[SHORT]]
    learn(known, 1, TREE, [0] * 100)
    seen = tokens(known, 1).tokens
    assert seen[NUMBER[TREE]] < 1.4


def test_acceptance_model_remembers_tree_correction_while_chains_run():
    """The correction of a shape family is learnt in trials and outlives their rates."""
    known, unaware = AcceptanceModel(TIERS), AcceptanceModel(TIERS)
    for tried in (known, unaware):
        learn(tried, 1, LONG, [0, 3, 7] * 40)
    learn(known, 1, TREE, [0, 0, 1] * 20)
    for tried in (known, unaware):
        learn(tried, 2, LONG, [0, 3, 7] * 60)
    found = [tokens(tried, 3).tokens[NUMBER[TREE]] for tried in (known, unaware)]
    assert found[0] < 0.8 * found[1]


def test_acceptance_model_perfect_tree_preserves_chain_rates():
    """Steps of the tree cannot distinguish a chain rate of 0.95 from a rate of 1."""
    known = AcceptanceModel(TIERS)
    for request in range(10):
        learn(known, request, LONG, ([7] * 19 + [0]) * 2)
    before = chances(known, 99)[0]
    learn(known, 10, TREE, [5] * 40)
    assert chances(known, 99)[0] == pytest.approx(before, abs=0.02)


def test_acceptance_model_perfect_tree_keeps_chain_rates_high():
    """Lower chain rates would make the tree miss at times, and it never does."""
    known = AcceptanceModel(TIERS)
    ends(known, range(3), LONG, ([7] * 19 + [0]) * 2)
    ends(known, range(3, 13), TREE, [5] * 100)
    assert chances(known, 99)[0] > 0.86


def ends(known: AcceptanceModel, requests: range, tier: Tier, accepted: list[int]) -> None:
    """Learns from consecutive requests with equal outcomes."""
    for request in requests:
        learn(known, request, tier, accepted)
        known.forget(request)


def test_acceptance_model_learns_spread_between_requests():
    """Among equal requests a miss is chance; among mixed ones it identifies the kind."""
    alike, mixed = AcceptanceModel(TIERS), AcceptanceModel(TIERS)
    ends(alike, range(60), LONG, [7] * 7 + [0] + [7] * 8)
    for request in range(60):
        ends(mixed, range(request, request + 1), LONG, ([7] if request % 2 else [0]) * 16)
    for known in (alike, mixed):
        learn(known, 99, LONG, [0])
    assert chances(alike, 99)[0] > 0.8
    assert chances(mixed, 99)[0] < 0.3
    assert chances(alike, 99)[0] - chances(mixed, 99)[0] > 0.5


def test_acceptance_model_weighs_many_requests_above_one():
    """Both models have the same number of observations, from one and from 40 requests."""
    one, many = AcceptanceModel(TIERS), AcceptanceModel(TIERS)
    learn(one, 0, SHORT, [0] * 40)
    for request in range(40):
        learn(many, request, SHORT, [0])
    assert chances(many, 99)[0] < 0.6 * chances(one, 99)[0]


def test_acceptance_model_tolerates_single_tree_miss():
    """The traffic changes: the prediction was wrong, and chains show it at once."""
    known, unaware = AcceptanceModel(TIERS), AcceptanceModel(TIERS)
    for tried in (known, unaware):
        learn(tried, 1, LONG, [7] * 60)
    learn(known, 1, TREE, [5, 5, 5, 0])
    for tried in (known, unaware):
        learn(tried, 1, LONG, [0, 1, 0, 2] * 40)
    found = [tokens(tried, 2).tokens[NUMBER[TREE]] for tried in (known, unaware)]
    assert found[0] > 0.85 * found[1]


def test_trial_gain_of_too_slow_tier_equals_zero():
    """A step of eight tokens takes twenty times as long, so no result can pay."""
    known, seconds = AcceptanceModel(TIERS), [1.0, 1.0, 20.0, 1.0]
    rows = known.rows_of([1])
    found, _ = known.predict(rows, np.array([99]), np.zeros(1, bool), 1, seconds)
    assert found.trial_gain[NUMBER[LONG]][NUMBER[OFF]] == 0
    assert found.trial_gain[NUMBER[SHORT]][NUMBER[OFF]] > 0


def test_trial_gain_without_contender_equals_zero():
    """Deep shapes cost more than they can gain over the fastest tier, so nothing is tried."""
    known = AcceptanceModel(TIERS)
    learn(known, 1, SHORT, [3] * 100)
    rows, none = known.rows_of([1]), np.zeros(1, bool)
    found, _ = known.predict(rows, np.array([99]), none, 1, [1.0, 1.0, 20.0, 20.0])
    assert not found.trial_gain.any()
    found, _ = known.predict(rows, np.array([99]), none, 1, [1.0, 1.0, 2.0, 20.0])
    assert found.trial_gain[NUMBER[LONG]][NUMBER[SHORT]] > 0


def test_expected_tokens_bounded_by_remaining_and_cold_rows():
    known = AcceptanceModel(TIERS)
    learn(known, 1, LONG, [7] * 50)
    assert tokens(known, 1, most=0).tokens.tolist() == [1.0] * 4
    assert tokens(known, 1, most=1).tokens[NUMBER[LONG]] == pytest.approx(1.97, abs=0.04)
    assert tokens(known, 1, is_after_off=True).next_tokens.tolist() == [1.0] * 4
    assert tokens(known, 1, is_after_off=True).tokens[NUMBER[LONG]] > 5


def test_acceptance_model_forget_clears_request_row():
    known = AcceptanceModel(TIERS)
    learn(known, 1, SHORT, [0] * 50)
    known.forget(1)
    known.forget(2)  # unknown request
    fresh = AcceptanceModel(TIERS)
    fresh.population = known.population
    assert chances(known, 3) == pytest.approx(chances(fresh, 3))


def costs() -> Costs:
    return Costs({1: [4.0, 5.0, 6.0], 8: [5.0, 7.0, 9.0]}, (1, 8), last_waits=True)


def observe(known: Costs, tier: int, seconds: float, steps: int) -> None:
    for _ in range(steps):
        known.observe(8, 8, tier, seconds)


def test_costs_observed_drift_shifts_all_tiers():
    """Longer contexts add two units of time, also to tiers that have not run."""
    known = costs()
    observe(known, 1, 7.0, 50)
    observe(known, 1, 9.0, 300)
    assert known.of(8, 8) == pytest.approx([7.0, 9.0, 11.0], abs=0.5)
    assert known.of(1, 1) == [4.0, 5.0, 6.0]


def test_costs_overlapped_tier_ignores_host_drift():
    known = Costs({8: [5.0, 7.0, 9.0, 4.0]}, (1, 8), last_waits=False)
    observe(known, 1, 8.5, 100)
    assert known.of(8, 8) == pytest.approx([6.5, 8.5, 10.5, 4.0], abs=0.3)


def test_costs_wrong_table_entry_corrected_by_observations():
    known = costs()
    for _ in range(30):
        observe(known, 0, 5.0, 5)
        observe(known, 1, 6.0, 5)
    found = known.of(8, 8)
    assert found is not None
    assert found[1] - found[0] == pytest.approx(1.0, abs=0.25)


def test_costs_ignore_outlier_and_unknown_times():
    known = costs()
    observe(known, 1, 7.0, 50)
    known.observe(8, 8, 1, 700.0)
    known.observe(8, 8, 1, None)
    assert known.of(8, 8) == pytest.approx([5.0, 7.0, 9.0], rel=0.05)


def test_costs_interpolate_between_measured_batch_sizes():
    """MoE: an observed step updates every number of requests in its bucket."""
    table = {1: [2.0, 4.0], 2: [2.5, 5.0], 5: [4.0, 8.0], 8: [5.5, 9.5]}
    known = Costs(table, (1, 2, 8), last_waits=True)
    assert known.table == table
    assert known.of(8, 6) == pytest.approx([4.5, 8.5])
    assert known.of(8, 4) == known.of(8, 5) == [4.0, 8.0]
    for _ in range(300):
        known.observe(8, 6, 0, 5.5)
        known.observe(8, 6, 1, 9.5)
    assert known.of(8, 8) == pytest.approx([6.5, 10.5], abs=0.1)
    assert known.of(8, 5) == pytest.approx([5.0, 9.0], abs=0.1)
    assert known.of(2, 2) == [2.5, 5.0]


def test_costs_without_table_return_none():
    known = Costs({}, (8,), last_waits=True)
    known.observe(8, 8, 1, 7.0)
    assert known.of(8, 8) is None


def test_shapes_list_tiers_common_to_all_batches():
    capacity = toy_capacity(num_pages=40, num_slots=5, overlap=1, depths=(0, 1, 3))
    shapes = Shapes.of(capacity, host_draft=False)
    assert [str(tier) for tier in shapes.tiers] == ["none", "S1", "S3"]
    assert (shapes.batches, shapes.bucket(1), shapes.bucket(3)) == ((2, 4), 2, 4)
    assert shapes.by_size[4, 2] == TreeShape.chain(3, 4)
    with pytest.raises(ValueError, match="nothing to choose from"):
        Shapes.of(toy_capacity(num_pages=40, num_slots=5, overlap=1, depths=(0,)), host_draft=False)
    for tier in (*TIERS, Tier(16, 5, 4, 0.5), Tier(8, 7, 1, 0.25)):
        assert Tier.parse(str(tier)) == tier
    with pytest.raises(ValueError, match="S3x is no tier"):
        Tier.parse("S3x")


def test_verify_budget_goes_to_requests_that_accept():
    """One request accepts all drafts, one none: half of the rows yield nearly all tokens."""
    tiers = (OFF, Tier(8, 7, 1, 0.5), LONG)
    known = AcceptanceModel(tiers)
    rows, drafted = known.rows_of([1, 2]), np.array([7, 7])
    for _ in range(60):
        known.learn(rows, 2, drafted, np.array([7, 0]))
    found, survivals = known.predict(rows, np.array([99, 99]), np.zeros(2, bool), 2, [1.0] * 3)
    assert found.tokens[1] == pytest.approx(survivals[0, :6].sum() + 2, abs=0.1)
    assert found.tokens[2] == pytest.approx(survivals.sum() + 2)
    cold, _ = known.predict(rows, np.array([99, 99]), np.array([True, False]), 2, [1.0] * 3)
    assert cold.next_tokens[1] == pytest.approx(survivals[1, :6].sum() + 2, abs=0.1)
