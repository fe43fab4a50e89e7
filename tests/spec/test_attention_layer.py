"""Attention layer between the QKV and output projections: its parts, and both backends' reference
ops.
"""

from dataclasses import replace

import numpy as np
import pytest

from shared.boundary.tp_group import TPGroup
from shared.spec import attention, layers
from shared.spec import attention_layer as spec
from tests.support.cases.attention.attention_layer import CASES, MixCase, arguments, specified
from tests.support.implementations import Implementation, each_implementation

# Float32 on both sides, sums over a hundred keys in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
NAMES = [name for name, case in CASES.items() if not case.half]


def real(case: MixCase) -> np.ndarray:
    return np.flatnonzero(case.rows.is_real)


def test_attention_layer_gate_multiplies_head_outputs() -> None:
    case = CASES["gate, partial rotary"]
    heads, D = case.heads, case.heads.head_size
    queries = case.qkv.shape[1] - 2 * heads.key_columns
    pairs = case.qkv[:, :queries].reshape(len(case.qkv), -1, 2, D)
    plain = np.concatenate([pairs[:, :, 0].reshape(len(pairs), -1), case.qkv[:, queries:]], axis=1)
    ungated = replace(case, qkv=plain, heads=replace(heads, gated=False))
    gate = layers.sigmoid(pairs[:, :, 1]).reshape(len(pairs), -1)
    np.testing.assert_allclose(specified(case)[0], specified(ungated)[0] * gate, **TOLERANCE)


def test_rotary_preserves_columns_beyond_rotary_width() -> None:
    case = CASES["gate, partial rotary"]
    turned, D = 2 * case.angles.cos.shape[1], case.heads.head_size
    still = replace(case, angles=spec.Angles(0 * case.angles.cos + 1, 0 * case.angles.sin))
    (_, keys, _), (_, others, _) = specified(case), specified(still)
    assert 0 < turned < D
    np.testing.assert_array_equal(keys[..., turned:], others[..., turned:])
    assert (keys[..., :turned] != others[..., :turned]).any()


def test_shared_kv_layer_equals_layer_with_kv() -> None:
    """Its projection lacks the keys and values that the other layer has written."""
    case = CASES["gate, partial rotary"]
    out, k_pages, v_pages = specified(case)
    queries = case.qkv[:, : case.qkv.shape[1] - 2 * case.heads.key_columns]
    norms = replace(case.norms, k=None)
    reader = replace(case, qkv=queries, heads=replace(case.heads, has_kv=False), norms=norms)
    reader = replace(reader, k_pages=k_pages, v_pages=v_pages)
    read, *pools = specified(reader)
    np.testing.assert_array_equal(read[real(case)], out[real(case)])
    np.testing.assert_array_equal(pools, [k_pages, v_pages])


@pytest.mark.parametrize(
    ("size", "paths"),
    [
        (None, [[0, 4, 4, 4], [0, 1, 4, 4], [0, 2, 4, 4], [0, 1, 3, 4]]),
        (2, [[0, 4, 4, 4], [0, 1, 4, 4], [0, 2, 4, 4], [4, 1, 3, 4]]),
    ],
)
def test_tree_paths_equal_positions_of_plain_decoding(size: int | None, paths: list) -> None:
    """The last row is two levels deep; a window of two positions cuts the root."""
    tree, one = np.array([[0, 0, 0, 1]]), np.array([4])
    rows, _ = attention.tree_rows(tree, one, 5 + one, np.ones((1, 8), int), 4)
    rows = attention.with_sliding_window(rows, size)
    np.testing.assert_array_equal(spec.tree_paths(rows), paths)
    (bounds,) = spec.row_bounds(rows, np.array([0, 4]))
    assert spec.RowBounds(*bounds).path_until == rows.positions.max() + 1


@pytest.mark.parametrize("name", ["trees", "shared KV, trees"])
@each_implementation
def test_full_width_norm_and_scaling_match_spec(name: str, implementation: Implementation) -> None:
    case, scale = CASES[name], 1 + np.arange(len(CASES[name].qkv), dtype=np.float32)
    rng, heads = np.random.default_rng(3), case.heads
    sizes = (case.qkv.shape[1] - 2 * heads.key_columns, heads.key_columns)
    scales = [rng.standard_normal(size, np.float32) for size in sizes]
    norms = spec.HeadNorms(scales[0], scales[1] if heads.has_kv else None, 1e-6)
    ops = implementation("attention_layer")
    got = ops.full_width_qk_norm(case.qkv, heads, norms, TPGroup(0, 1, None))
    np.testing.assert_allclose(got, spec.full_width_qk_norm(case.qkv, heads, norms), **TOLERANCE)
    got = ops.scale_queries(case.qkv, heads, scale)
    np.testing.assert_allclose(got, spec.scale_queries(case.qkv, heads, scale), **TOLERANCE)


@each_implementation
@pytest.mark.parametrize("name", NAMES)
def test_attention_layer_matches_spec(name: str, implementation: Implementation) -> None:
    case = CASES[name]
    given = arguments(case)
    names = ("qkv", "heads", "norms", "angles", "rows", "kv", "layer", "sinks")
    got = implementation("attention_layer").attention_layer(*(given[name] for name in names))
    got = got[0] if isinstance(got, tuple) else got
    np.testing.assert_allclose(got[real(case)], specified(case)[0][real(case)], **TOLERANCE)


@each_implementation
def test_write_kv_without_queries_matches_spec(
    implementation: Implementation,
) -> None:
    case = CASES["chains"]
    given, (_, k_pages, v_pages) = arguments(case), specified(case)
    keys = case.qkv[:, -2 * case.heads.key_columns :]
    rows, pools = given["rows"], given["kv"].pools
    ops = implementation("attention_layer")
    got = ops.write_kv(keys, case.heads, case.norms, case.angles, rows, pools, 0)
    if got is not None:  # torch writes in place, in a copy of its own
        written = np.stack([k_pages, v_pages])[:, 1:]
        np.testing.assert_allclose(got[0, :, 1:], written, **TOLERANCE)
    where = (case.k_pages, case.v_pages)
    wanted = spec.write_kv(keys, case.heads, case.norms, case.angles, case.rows, *where)
    np.testing.assert_array_equal(wanted, (k_pages, v_pages))
