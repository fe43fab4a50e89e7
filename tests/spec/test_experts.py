"""MoE: deterministic router, and independence of a row from the other rows."""

from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shared.models.activation import Activation
from shared.models.mlp import ExpertTensors, MoEConfig
from shared.spec import experts as spec
from shared.spec import layers
from shared.spec.experts import Experts, SelectedExperts
from shared.spec.linear import Matrix, NormedStream
from tests.support.implementations import Implementation, each_implementation, to_numpy
from tests.support.op_records import mapped

HIDDEN, WIDTH, ROWS = 12, 6, 7
SOFTMAX = MoEConfig(
    num_experts=8,
    top_k=3,
    intermediate=WIDTH,
    shared_intermediate=0,
    shared_is_gated=False,
    scores="softmax",
    has_score_bias=False,
    num_groups=1,
    num_chosen_groups=1,
    is_renormalised=True,
    routed_factor=1.0,
    output_factor=1.0,
    has_bias=False,
    activation=Activation(),
    has_expert_scale=False,
    parallel=None,
    tensors=ExpertTensors(),
)
SIGMOID = replace(SOFTMAX, scores="sigmoid", has_score_bias=True, routed_factor=2.5)
CONFIGS = {
    "softmax": SOFTMAX,
    "scaled output": replace(SOFTMAX, output_factor=0.22),
    "not renormalised": replace(SOFTMAX, is_renormalised=False),
    "sigmoid": SIGMOID,
    "sigmoid, not renormalised": replace(SIGMOID, is_renormalised=False),
    "groups": replace(SIGMOID, num_groups=4, num_chosen_groups=2),
    "groups of one": replace(SIGMOID, num_groups=8, num_chosen_groups=5),
    "one expert": replace(SOFTMAX, top_k=1),
    "all experts": replace(SOFTMAX, top_k=8),
}
SHARED = {
    "none": {},
    "in the stack": {"shared_intermediate": WIDTH},
    "gated in the stack": {"shared_intermediate": WIDTH, "shared_is_gated": True},
    "wider": {"shared_intermediate": 2 * WIDTH, "shared_is_gated": True},
}

# Float32 on both sides: only the order of sums over 12 terms differs, and a sigmoid by an ulp.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def bias_of(config: MoEConfig) -> np.ndarray | None:
    return normal(1, config.num_experts) / 4 if config.has_score_bias else None


def weights_of(config: MoEConfig) -> Experts:
    width, wide = config.intermediate, config.shared_intermediate
    is_apart = wide and not config.shares_stacks
    return Experts(
        router=Matrix.plain(normal(2, config.num_scored, HIDDEN)),
        gate_up=Matrix.plain(normal(3, config.num_stacked, 2 * width, HIDDEN) / 3),
        down=Matrix.plain(normal(4, config.num_stacked, HIDDEN, width) / 2),
        score_bias=bias_of(config),
        shared_gate_up=Matrix.plain(normal(5, 2 * wide, HIDDEN) / 3) if is_apart else None,
        shared_down=Matrix.plain(normal(6, HIDDEN, wide) / 2) if is_apart else None,
    )


def one_by_one(logits: np.ndarray, config: MoEConfig, bias: np.ndarray | None) -> SelectedExperts:
    """The choice for each row in Python's own numbers."""
    all_ids, all_weights = [], []
    for row in logits.tolist():
        scores = [1 / (1 + np.exp(-x)) for x in row]
        if config.scores == "softmax":
            scores = [np.exp(x) / sum(map(np.exp, row)) for x in row]
        biases = np.zeros(len(row)) if bias is None else bias
        ranked = [x + float(b) for x, b in zip(scores, biases, strict=True)]
        size = config.group_size
        groups = [sum(sorted(ranked[i : i + size])[-2:]) for i in range(0, len(row), size)]
        best = sorted(range(len(groups)), key=lambda g: -groups[g])[: config.num_chosen_groups]
        open_ = [i for i in range(len(row)) if i // size in best]
        ids = sorted(sorted(open_, key=lambda i: -ranked[i])[: config.top_k])
        total = sum(scores[i] for i in ids) if config.is_renormalised else 1
        all_ids.append(ids)
        all_weights.append([scores[i] / total * config.routed_factor for i in ids])
    return SelectedExperts(np.array(all_ids), np.array(all_weights, np.float32))


@pytest.mark.parametrize("name", CONFIGS)
def test_router_choose_matches_published_formula(name: str) -> None:
    config, logits = CONFIGS[name], normal(7, 50, 8)
    got, want = (f(logits, config, bias_of(config)) for f in (spec.choose, one_by_one))
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_allclose(got.weights, want.weights, **CLOSE)


def test_router_bias_and_groups_change_choice_not_weights() -> None:
    logits, groups = normal(7, 50, 8), CONFIGS["groups"]
    bias = bias_of(groups)
    plain, biased = spec.choose(logits, SIGMOID, 0 * bias), spec.choose(logits, SIGMOID, bias)
    assert (plain.ids != biased.ids).any()
    assert (spec.choose(logits, groups, bias).ids != biased.ids).any()
    same = (plain.ids == biased.ids).all(axis=1)
    assert same.any()
    np.testing.assert_array_equal(plain.weights[same], biased.weights[same])


@each_implementation
@pytest.mark.parametrize("name", CONFIGS)
def test_router_choose_matches_spec(name: str, implementation: Implementation) -> None:
    config, logits = CONFIGS[name], normal(7, 50, 8)
    want = spec.choose(logits, config, bias_of(config))
    got = implementation("experts").choose(logits, config, bias_of(config))
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_allclose(got.weights, want.weights, **CLOSE)


TIES = np.array(
    [
        [0, 0, 0, 0, 0, 0, 0, 0],
        [-1, 2, -1, 2, -1, 2, -1, 2],
        [1, 3, 0, -0.0, 0, -0.0, 0, 0],
        [0, -0.0, -0.0, 0, -1, 0, 0, 3],
        [-np.inf, -np.inf, -np.inf, -np.inf, -np.inf, 1, -np.inf, -np.inf],
    ],
    np.float32,
)
FIRST = [[0, 1, 2], [1, 3, 5], [0, 1, 2], [0, 1, 7], [0, 1, 5]]


def test_spec_router_ties_choose_lower_expert() -> None:
    assert spec.choose(TIES, SOFTMAX, None).ids.tolist() == FIRST
    even = replace(SIGMOID, num_groups=4, num_chosen_groups=2)
    assert spec.choose(TIES[:1], even, np.zeros(8, np.float32)).ids.tolist() == [[0, 1, 2]]


@each_implementation
def test_router_ties_match_spec(implementation: Implementation) -> None:
    choose = implementation("experts").choose
    assert choose(TIES, SOFTMAX, None).ids.tolist() == FIRST
    even = replace(SIGMOID, num_groups=4, num_chosen_groups=2)
    assert choose(TIES[:1], even, np.zeros(8, np.float32)).ids.tolist() == [[0, 1, 2]]


MANY = replace(SOFTMAX, num_experts=300, top_k=9)


@each_implementation
def test_router_ties_among_many_experts_match_spec(implementation: Implementation) -> None:
    """Sorts of more than eight elements may be unstable."""
    logits = np.random.default_rng(11).integers(-1, 2, (20, 300)).astype(np.float32)
    want = [np.flatnonzero(row == 1)[:9].tolist() for row in logits]
    assert spec.choose(logits, MANY, None).ids.tolist() == want
    assert implementation("experts").choose(logits, MANY, None).ids.tolist() == want


def spoiled(logits: np.ndarray) -> np.ndarray:
    logits = logits.copy()
    logits[1], logits[3, 2] = np.nan, np.nan
    return logits


def assert_nan_keeps_to_its_rows(choose, name: str) -> None:
    config, logits = CONFIGS[name], normal(7, ROWS, 8)
    got = choose(spoiled(logits), config, bias_of(config))
    want = choose(logits, config, bias_of(config))
    assert all(len({*row}) == config.top_k for row in got.ids.tolist())
    assert (np.diff(got.ids, axis=1) > 0).all()
    assert 0 <= got.ids.min() <= got.ids.max() < config.num_experts
    assert np.isnan(got.weights[1]).all()
    others = [0, 2, 4, 5, 6]
    np.testing.assert_array_equal(got.ids[others], want.ids[others])
    np.testing.assert_array_equal(got.weights[others], want.weights[others])


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", CONFIGS)
def test_router_nan_row_spoils_only_itself(name: str) -> None:
    assert_nan_keeps_to_its_rows(spec.choose, name)


@pytest.mark.filterwarnings("ignore:invalid value")
@each_implementation
@pytest.mark.parametrize("name", ["softmax", "groups"])
def test_router_nan_rows_match_spec(name: str, implementation: Implementation) -> None:
    config, logits = CONFIGS[name], spoiled(normal(7, ROWS, 8))
    choose = implementation("experts").choose
    assert_nan_keeps_to_its_rows(choose, name)
    got, want = (f(logits, config, bias_of(config)) for f in (choose, spec.choose))
    np.testing.assert_array_equal(got.ids, want.ids)
    np.testing.assert_array_equal(np.isnan(got.weights), np.isnan(want.weights))


def test_experts_output_sums_in_order_shared_last() -> None:
    config = replace(SOFTMAX, **SHARED["wider"])
    x, weights = normal(8, ROWS, HIDDEN), weights_of(config)
    logits = x @ weights.router.values.T
    chosen = spec.choose(logits[:, :8], config, None)
    want = np.zeros((ROWS, HIDDEN), np.float32)

    def mlp(row: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
        gate, up = np.split(row @ gate_up.T, 2, axis=-1)
        return (layers.silu(gate) * up) @ down.T

    # Products of an expert have all of its rows, since their number may change bits on a CPU.
    outputs = {}
    for expert in range(8):
        rows = np.flatnonzero((chosen.ids == expert).any(axis=1))
        of_rows = mlp(x[rows], weights.gate_up.values[expert], weights.down.values[expert])
        outputs |= {(row, expert): output for row, output in zip(rows, of_rows, strict=True)}
    for row in range(ROWS):
        for expert, share in zip(chosen.ids[row], chosen.weights[row], strict=True):
            want[row] = want[row] + share * outputs[row, expert]
    shared = mlp(x, weights.shared_gate_up.values, weights.shared_down.values)
    want = want + layers.sigmoid(logits[:, 8:]) * shared
    np.testing.assert_array_equal(spec.experts(x, config, weights), want)


def test_stacked_shared_expert_equals_separate_one() -> None:
    config = replace(SOFTMAX, **SHARED["gated in the stack"])
    x, weights = normal(8, ROWS, HIDDEN), weights_of(config)
    own = replace(
        weights,
        gate_up=Matrix.plain(weights.gate_up.values[:-1]),
        down=Matrix.plain(weights.down.values[:-1]),
        shared_gate_up=Matrix.plain(weights.gate_up.values[-1]),
        shared_down=Matrix.plain(weights.down.values[-1]),
    )
    got = spec.experts(x, config, weights)
    np.testing.assert_array_equal(got, spec.experts(x, config, own))
    without = replace(config, shared_intermediate=0, shared_is_gated=False)
    assert np.abs(got - spec.experts(x, without, own)).max() > 0.01


@each_implementation
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("name", ["softmax", "groups"])
def test_added_experts_matches_spec(name: str, shared: str, implementation: Implementation) -> None:
    config = replace(CONFIGS[name], **SHARED[shared])
    stream = NormedStream(3 * normal(8, ROWS, HIDDEN), 1 + normal(9, HIDDEN) / 4)
    given = (stream, 1e-6, config, weights_of(config))
    want = spec.added_experts(*given).rows
    got = implementation("experts").added_experts(*given).rows
    assert np.abs(want - stream.rows).max() > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)  # two products more


@each_implementation
def test_experts_nan_row_preserves_other_rows(implementation: Implementation) -> None:
    config = replace(SOFTMAX, **SHARED["gated in the stack"])
    x, weights, ops = normal(8, ROWS, HIDDEN), weights_of(config), implementation("experts")
    want, others = ops.experts(x, config, weights), [0, 1, 3, 4, 5, 6]
    x[2] = np.nan
    got = ops.experts(x, config, weights)
    assert np.isnan(got[2]).all()
    np.testing.assert_array_equal(got[others], want[others])


@each_implementation
def test_experts_unchosen_expert_nan_ignored(
    implementation: Implementation,
) -> None:
    x, weights, ops = normal(8, ROWS, HIDDEN), weights_of(SOFTMAX), implementation("experts")
    want = ops.experts(x, SOFTMAX, weights)
    has_chosen = (spec.choose(x @ weights.router.values.T, SOFTMAX, None).ids == 4).any(axis=1)
    assert 0 < has_chosen.sum() < ROWS
    weights.down.values[4] = np.inf
    weights.gate_up.values[4] = np.nan
    got = ops.experts(x, SOFTMAX, weights)
    assert np.isnan(got[has_chosen]).all()
    np.testing.assert_array_equal(got[~has_chosen], want[~has_chosen])


@each_implementation
def test_experts_row_is_batch_invariant(implementation: Implementation) -> None:
    """Both batches have the same number of rows, so that the products are the same programs."""
    x, weights, ops = normal(8, ROWS, HIDDEN), weights_of(SOFTMAX), implementation("experts")
    want = ops.experts(x, SOFTMAX, weights)
    among = normal(10, ROWS, HIDDEN)
    among[2] = x[2]
    np.testing.assert_array_equal(ops.experts(among, SOFTMAX, weights)[2], want[2])


@each_implementation
def test_experts_bfloat16_outputs_added_in_float32(implementation: Implementation) -> None:
    config = replace(SOFTMAX, **SHARED["wider"])
    x, weights = normal(8, ROWS, HIDDEN), weights_of(config)
    narrow, ops = partial(mapped, leaf=of_bfloat16, module=spec), implementation("experts")
    wide = partial(mapped, leaf=to_numpy, module=spec)
    got = ops.experts(narrow(x), config, narrow(weights))
    assert (got != to_numpy(of_bfloat16(got))).mean() > 0.9
    want = spec.experts(wide(narrow(x)), config, wide(narrow(weights)))
    # Inner values have 8 bits on one side.
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.01)
    # A stream that is far larger shows what is added in its last bits alone, rounded once.
    stream = np.full((ROWS, HIDDEN), 4.0, np.float32)
    given = (NormedStream(of_bfloat16(stream), np.ones(HIDDEN, np.float32)), 1e-6)
    given = (*given, config, narrow(weights))
    added = ops.experts(of_bfloat16(np.ones((ROWS, HIDDEN), np.float32)), config, narrow(weights))
    np.testing.assert_array_equal(
        ops.added_experts(*given).rows, to_numpy(of_bfloat16(stream + added))
    )


def of_bfloat16(value: Any) -> Any:
    return value.astype(ml_dtypes.bfloat16) if isinstance(value, np.ndarray) else value
