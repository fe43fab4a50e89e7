"""Paged attention equals dense attention for any pages, tree and batch."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch

from shared.spec import attention as spec
from shared.spec import draft_tree
from shared.spec.layers import apply_rotary
from tests.support.implementations import Implementation, each_implementation

HQ, HK, D = 4, 2, 8
NUM_PAGES = 40

# Float32 on both sides, sums over at most 606 keys in another order, some of them block by block.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@dataclass
class Case:
    """Requests of given lengths, their KV (committed and window), and a random tree for each."""

    page_size: int
    lengths: np.ndarray
    k: list[np.ndarray]
    v: list[np.ndarray]
    parents: np.ndarray
    num_nodes: np.ndarray
    page_table: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray


def case(seed: int, page_size: int, lengths: tuple[int, ...] = (0, 5, 33), N: int = 6) -> Case:
    rng = np.random.default_rng(seed)
    B = len(lengths)
    parents = np.array([[0] + [rng.integers(0, n) for n in range(1, N)] for _ in range(B)])
    num_nodes = np.array([N, N - 2, N])[:B]
    per_request = -(-(max(lengths) + N) // page_size)
    pages = 1 + rng.permutation(max(NUM_PAGES, B * per_request))[: B * per_request]
    page_table = pages.reshape(B, per_request)
    total = max(NUM_PAGES, B * per_request) + 1
    # Whatever is not written is NaN, the sink as well.
    k_pages = np.full((total, page_size, HK, D), np.nan, np.float32)
    v_pages = k_pages.copy()
    k, v = (
        [rng.standard_normal((length + N, HK, D)).astype(np.float32) for length in lengths]
        for _ in range(2)
    )
    for b in range(B):
        places = np.arange(lengths[b] + num_nodes[b])
        where = (page_table, np.full_like(places, b), places, np.ones(len(places), bool))
        k_pages = spec.write(k_pages, *where, k[b][: len(places)])
        v_pages = spec.write(v_pages, *where, v[b][: len(places)])
    return Case(
        page_size, np.array(lengths), k, v, parents, num_nodes, page_table, k_pages, v_pages
    )


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of one row over its visible keys, in float64."""
    k, v = (np.repeat(x.astype(np.float64), HQ // HK, axis=1) for x in (k, v))
    scores = np.einsum("hd,phd->hp", q, k) / np.sqrt(D)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hp,phd->hd", weights / weights.sum(axis=1, keepdims=True), v)


def queries(rows: int) -> np.ndarray:
    return np.random.default_rng(9).standard_normal((rows, HQ, D)).astype(np.float32)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_attend_tree_node_sees_prefix_and_ancestors_only(page_size: int) -> None:
    c = case(0, page_size)
    rows, node = spec.tree_rows(c.parents, c.num_nodes, c.lengths, c.page_table, rows=20)
    q = queries(20)
    got = spec.attend(
        q, c.k_pages, c.v_pages, rows.page_table, rows.request, rows.first, rows.until, rows.window
    )
    seen_by = draft_tree.ancestors(c.parents)
    for r in np.flatnonzero(rows.is_real):
        b, length = rows.request[r], c.lengths[rows.request[r]]
        sees = np.concatenate([np.arange(length), length + np.flatnonzero(seen_by[b, node[r]])])
        np.testing.assert_allclose(got[r], dense(q[r], c.k[b][sees], c.v[b][sees]), **TOLERANCE)
    np.testing.assert_array_equal(got[~rows.is_real], 0)


@pytest.mark.parametrize("page_size", [1, 16])
def test_attend_prefill_row_sees_positions_up_to_itself(page_size: int) -> None:
    c = case(1, page_size)
    row_starts, first_positions = np.array([0, 4, 4, 9]), np.array([0, 5, 20])
    rows = spec.causal_rows(row_starts, first_positions, np.zeros(3, int), c.page_table, 12)
    np.testing.assert_array_equal(rows.positions[:9], [0, 1, 2, 3, 20, 21, 22, 23, 24])
    q = queries(12)
    got = spec.attend(
        q, c.k_pages, c.v_pages, rows.page_table, rows.request, rows.first, rows.until, rows.window
    )
    for r in range(9):
        b, until = rows.request[r], rows.positions[r] + 1
        np.testing.assert_allclose(got[r], dense(q[r], c.k[b][:until], c.v[b][:until]), **TOLERANCE)
    np.testing.assert_array_equal(got[9:], 0)


def test_attend_ignores_positions_before_draft_from() -> None:
    c = case(2, 4)
    c.k_pages[c.page_table[2, 0]] = np.nan  # a hole in the draft KV
    rows = spec.causal_rows(
        np.array([0, 0, 0, 1]), np.array([0, 5, 30]), np.array([0, 0, 4]), c.page_table, 1
    )
    q = queries(1)
    got = spec.attend(
        q, c.k_pages, c.v_pages, rows.page_table, rows.request, rows.first, rows.until, rows.window
    )
    np.testing.assert_allclose(got[0], dense(q[0], c.k[2][4:31], c.v[2][4:31]), **TOLERANCE)


def test_attend_ignores_nan_in_invisible_positions() -> None:
    c = case(3, 16)
    args = (c.page_table, np.array([1]), np.array([0]), np.array([5]), np.zeros((1, 0), bool))
    want = spec.attend(queries(1), c.k_pages, c.v_pages, *args)
    page, place = c.page_table[1, 0], 5  # the first position past the length
    c.k_pages[page, place:] = c.v_pages[page, place:] = np.nan
    c.v_pages[page, -1] = np.inf
    np.testing.assert_array_equal(spec.attend(queries(1), c.k_pages, c.v_pages, *args), want)


def test_write_padding_rows_change_scratch_page_only() -> None:
    c = case(4, 4)
    is_real = np.array([True, False, False])
    new = np.ones((3, HK, D), np.float32)
    places = np.array([3, 10**6, 0])  # a padding row's place may be anything
    request = np.array([2, 0, 1])
    after = spec.write(c.k_pages, c.page_table, request, places, is_real, new)
    changed = np.flatnonzero((after == 1).all(axis=(2, 3)).any(axis=1))
    np.testing.assert_array_equal(changed, [0, c.page_table[2, 0]])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ([[0, 1, 2], [0, 2, 3], [0, 4, 5]], [3, 3, 3]),
        ([[0, 2, 5], [0, 0, 0], [0, 1, 1]], [3, 1, 2]),
        ([[0, 1, 2], [0, 3, 3], [0, 5, 5]], [0, 2, 2]),
    ],
)
def test_compact_accepted_kv_moves_accepted_path_only(
    page_size: int, path: list[list[int]], counts: list[int]
) -> None:
    c = case(5, page_size)
    after = spec.compact_accepted_kv(
        c.k_pages, c.page_table, c.lengths, np.array(path), np.array(counts)
    )
    rows = spec.read(after, c.page_table, int(c.lengths.max()) + 3)
    before = spec.read(c.k_pages, c.page_table, rows.shape[1])
    for b, length in enumerate(c.lengths):
        nodes = np.array(path[b][: counts[b]], int)
        moved = slice(length, length + counts[b])
        np.testing.assert_array_equal(rows[b, moved], c.k[b][length + nodes])
        np.testing.assert_array_equal(rows[b, :length], before[b, :length])
        np.testing.assert_array_equal(rows[b, moved.stop :], before[b, moved.stop :])


def starts_of(num_rows: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(num_rows)])


def attend(
    implementation: Implementation,
    q: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    rows: spec.AttentionRows,
    row_starts: np.ndarray,
    max_rows: int,
) -> np.ndarray:
    """The op of a framework, over the specification's rows."""
    sees = (rows.page_table, rows.request, row_starts, rows.first, rows.until, rows.window)
    return implementation("attention").attend(q, k_pages, v_pages, *sees, max_rows=max_rows)


@each_implementation
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("lengths", [(0, 5, 33), (12,), (252, 600, 3)])
def test_attention_over_tree_matches_spec(
    page_size: int, lengths: tuple[int, ...], implementation: Implementation
) -> None:
    c = case(1, page_size, lengths)
    table = c.page_table
    rows, _ = spec.tree_rows(c.parents, c.num_nodes, c.lengths, table, c.parents.size + 2)
    args = (queries(len(rows.request)), c.k_pages, c.v_pages)
    got = attend(implementation, *args, rows, starts_of(c.num_nodes), c.parents.shape[1])
    want = spec.attend(*args, table, rows.request, rows.first, rows.until, rows.window)
    np.testing.assert_allclose(got[rows.is_real], want[rows.is_real], **TOLERANCE)


WINDOWS = (1, 2, 3, 7, 1000)


def seen_by(rows: spec.AttentionRows, row: int) -> list[int]:
    """Returns the visible KV positions of a row in text order."""
    committed = range(rows.first[row], rows.until[row])
    return [*committed, *(rows.until[row] + np.flatnonzero(rows.window[row]))]


@pytest.mark.parametrize("size", WINDOWS)
def test_sliding_window_limits_to_last_positions(size: int) -> None:
    """A tree deeper than the window attends to no committed position."""
    c = case(4, 4, (0, 5, 33), N=9)
    total = int(c.num_nodes.sum())
    trees, _ = spec.tree_rows(c.parents, c.num_nodes, c.lengths, c.page_table, total)
    starts, first = np.array([0, 3, 3, 9]), np.array([2, 0, 30])
    prompts = spec.causal_rows(starts, first, np.array([1, 0, 7]), c.page_table, 9)
    for rows in (trees, prompts):
        windowed = spec.with_sliding_window(rows, size)
        for row in range(len(rows.request)):
            assert seen_by(windowed, row) == seen_by(rows, row)[-size:]
        assert spec.with_sliding_window(rows, None) is rows


@each_implementation
@pytest.mark.parametrize("size", WINDOWS)
def test_sliding_bounds_match_spec(size: int, implementation: Implementation) -> None:
    c = case(4, 4, (0, 5, 33), N=9)
    total = int(c.num_nodes.sum()) + 2  # some padding
    rows, _ = spec.tree_rows(c.parents, c.num_nodes, c.lengths, c.page_table, total)
    sees = (rows.first, rows.until, rows.window, size)
    for got, want in zip(
        implementation("attention").sliding_bounds(*sees), spec.sliding_bounds(*sees), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@each_implementation
def test_attention_of_bfloat16_keeps_unrounded_scores(implementation: Implementation) -> None:
    c = case(7, 16, (252, 600, 3))
    rows, _ = spec.tree_rows(
        c.parents, c.num_nodes, c.lengths, c.page_table, int(c.num_nodes.sum())
    )
    # Scores of up to 50 or so, which bfloat16 has in steps of 1/4.
    given = (8 * queries(len(rows.request)), c.k_pages, c.v_pages)
    narrow = [x.astype(ml_dtypes.bfloat16) for x in given]
    got = attend(implementation, *narrow, rows, starts_of(c.num_nodes), c.parents.shape[1])
    wide = [x.astype(np.float32) for x in narrow]
    where = (c.page_table, rows.request, rows.first, rows.until, rows.window)
    # Weights and values have 8 bits; scores that had, too, would put values up to 0.03 off.
    np.testing.assert_allclose(got, spec.attend(*wide, *where), rtol=0, atol=0.02)


@each_implementation
def test_attention_over_prompt_matches_spec(
    implementation: Implementation,
) -> None:
    c = case(2, 4)
    row_starts, first = np.array([0, 3, 3, 9]), np.array([2, 0, 30])
    args = (row_starts, first, np.array([1, 0, 7]), c.page_table, 12)
    rows = spec.causal_rows(*args)
    given = (queries(12), c.k_pages, c.v_pages)
    got = attend(implementation, *given, rows, row_starts, 12)
    where = (c.page_table, rows.request, rows.first, rows.until, rows.window)
    np.testing.assert_allclose(got[:9], spec.attend(*given, *where)[:9], **TOLERANCE)


@each_implementation
def test_attention_nan_reaches_visible_rows_only(
    implementation: Implementation,
) -> None:
    c = case(3, 4)
    rows, node = spec.tree_rows(
        c.parents, c.num_nodes, c.lengths, c.page_table, int(c.num_nodes.sum())
    )
    place = c.lengths[1] + 2  # node 2 of request 1
    c.v_pages[c.page_table[1, place // 4], place % 4] = np.nan
    given = (queries(len(node)), c.k_pages, c.v_pages)
    got = attend(implementation, *given, rows, starts_of(c.num_nodes), c.parents.shape[1])
    sees = (rows.request == 1) & rows.window[:, 2]
    np.testing.assert_array_equal(np.isnan(got).any(axis=(1, 2)), sees)


@each_implementation
def test_write_and_compact_accepted_kv_match_spec(implementation: Implementation) -> None:
    ops, c = implementation("attention"), case(4, 4)
    is_real = np.array([True, False, True])
    where = (c.page_table, np.array([2, 0, 1]), np.array([3, 10**6, 9]), is_real)
    new = np.ones((3, HK, D), np.float32)
    np.testing.assert_array_equal(
        ops.write(c.k_pages, *where, new)[1:], spec.write(c.k_pages, *where, new)[1:]
    )
    path, counts = np.array([[0, 2, 5], [0, 0, 0], [0, 1, 3]]), np.array([3, 0, 2])
    args = (c.k_pages, c.page_table, c.lengths, path, counts)
    np.testing.assert_array_equal(
        ops.compact_accepted_kv(*args)[1:], spec.compact_accepted_kv(*args)[1:]
    )


def image_rows(num_rows: int) -> list[np.ndarray]:
    """Queries, keys and values of three heads of 8, and angles."""
    rng = np.random.default_rng(num_rows)
    angles = rng.uniform(-3, 3, (num_rows, 4))
    qkv = rng.standard_normal((num_rows, 3 * 24))
    return [x.astype(np.float32) for x in (qkv, np.cos(angles), np.sin(angles))]


def test_bidirectional_attention_matches_torch_and_ignores_padding() -> None:
    qkv, cos, sin = image_rows(12)
    qkv[9:, 24:48], qkv[9:, 48:] = 1e4, np.nan
    got = spec.bidirectional_attention(qkv, cos, sin, np.array([9]))
    q, k, v = qkv[:9].reshape(9, 3, 3, 8).swapaxes(0, 1)
    q, k = (apply_rotary(x, cos[:9], sin[:9]) for x in (q, k))
    given = (torch.tensor(x).transpose(0, 1) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(*given).transpose(0, 1)
    # Float32 on both sides: only the order of the sums differs.
    np.testing.assert_allclose(got[:9], want.flatten(1), rtol=1e-5, atol=1e-6)


@each_implementation
@pytest.mark.parametrize("num_rows", [40, 600])
def test_bidirectional_attention_matches_spec(
    num_rows: int, implementation: Implementation
) -> None:
    qkv, cos, sin = image_rows(num_rows)
    count = np.array([num_rows - 11])
    qkv[-11:, 24:48], qkv[-11:, 48:] = 1e4, np.nan
    got = implementation("attention").bidirectional_attention(qkv, cos, sin, count)
    want = spec.bidirectional_attention(qkv, cos, sin, count)
    # Float32 on both sides: only the order of the sums differs.
    np.testing.assert_allclose(got[:-11], want[:-11], rtol=1e-5, atol=1e-5)
