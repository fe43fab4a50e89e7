"""N-gram table: stored n-grams, and the draft trees that follow from them."""

from dataclasses import fields

import numpy as np
import pytest

from shared.spec import ngram as spec
from tests.support.cases.trees.ngram import TABLE, texts
from tests.support.implementations import Implementation, each_implementation
from tests.support.op_case import OpCase, arrays_of, as_list

GROUPS = 1 << 12
# Two tokens may hash to one entry of a group, the later stays: 30, 40, 52 and 61 do not collide.


def seen(text: list[int], scope: int = 0, table: spec.NgramTable | None = None) -> spec.NgramTable:
    """A table that has seen a text."""
    tokens = np.array([text], np.int32)
    contexts = spec.windows(np.full((1, spec.WINDOW), -1, np.int32), tokens)[0]
    everyone = np.full((len(text), 2), scope, np.int32), np.ones(len(text), bool)
    return spec.insert(table or spec.NgramTable.empty(GROUPS), contexts, tokens[0], *everyone)


def drafted(
    table: spec.NgramTable,
    text: list[int],
    *,
    scope: int = 0,
    nodes: int = 6,
    width: int = 5,
    **bounds: int,
) -> spec.BuiltTrees:
    tail = np.array([([-1] * spec.WINDOW + text)[-spec.WINDOW :]], np.int32)
    most = np.array([bounds.get("most", 99)], np.int32)
    depth = bounds.get("depth", nodes - 1)
    return spec.draft(table, tail, np.full((1, 2), scope, np.int32), most, nodes, depth, width)


def tree(grown: spec.BuiltTrees) -> list[tuple[int, int]]:
    """Token and parent of each draft."""
    return list(zip(grown.tokens[0].tolist(), grown.parents[0].tolist(), strict=True))[
        1 : grown.num_nodes[0]
    ]


def test_ngram_draft_repeats_earlier_continuation():
    table = seen([5, 6, 7, 8, 9, 10, 11])
    assert tree(drafted(table, [1, 5, 6], nodes=5)) == [(7, 0), (8, 1), (9, 2), (10, 3)]


def test_ngram_draft_prefers_longer_then_newer_match():
    table = seen([1, 2, 30, 9, 2, 40, 8, 2, 52])
    got = drafted(table, [1, 2], nodes=4, width=3, depth=1)
    assert tree(got) == [(30, 0), (52, 0), (40, 0)]
    assert np.all(np.diff(got.weights[0]) < 0)


def test_ngram_repeated_token_newest_and_unique():
    table = seen([2, 40, 9, 2, 52, 9, 2, 40])
    assert tree(drafted(table, [7, 2], depth=1)) == [(40, 0), (52, 0)]


def test_ngram_draft_grows_max_likely_node():
    table = seen([1, 2, 3, 4, 5, 6])
    table = seen([2, 9], table=table)
    # After [1, 2], 3 is the longer match's; its child is likelier than 9, a text's newest.
    assert tree(drafted(table, [1, 2], nodes=4)) == [(3, 0), (4, 1), (5, 2)]


def test_ngram_scope_isolates_drafts():
    table = seen([5, 6, 7, 8], scope=1)
    assert not tree(drafted(table, [5, 6], scope=2))
    assert tree(drafted(table, [5, 6], scope=1, nodes=2)) == [(7, 0)]


@pytest.mark.parametrize(
    ("bounds", "size"), [({"most": 2}, 3), ({"depth": 1}, 2), ({"most": 0}, 1)]
)
def test_ngram_draft_respects_bounds(bounds: dict[str, int], size: int):
    table = seen([5, 6, 7, 8, 9, 10])
    assert drafted(table, [5], **bounds).num_nodes[0] == size


def test_ngram_insert_skips_positions_before_start():
    table = seen([7, 8])
    held = [table.tokens[place].any() for place in range(len(spec.LENGTHS))]
    assert held == [True] + [False] * (len(spec.LENGTHS) - 1)


def test_ngram_insert_overwrites_older_entries():
    table = spec.NgramTable.empty(1)
    for token in range(100):
        table = seen([token, 1], table=table)
    assert not tree(drafted(table, [0]))
    assert tree(drafted(table, [99])) == [(1, 0)]


def test_ngram_clock_wraparound_preserves_recency():
    table = spec.NgramTable.empty(GROUPS)
    table.clocks[:] = spec.LATEST - 4
    table = seen([2, 40, 9, 2, 52], table=table)
    table = seen([9, 2, 61], table=table)
    assert (table.clocks < 10).all()
    assert tree(drafted(table, [7, 2], depth=1)) == [(61, 0), (52, 0), (40, 0)]


def test_update_tails_keeps_last_window():
    rng = np.random.default_rng(0)
    tails, tokens = rng.integers(0, 99, (3, spec.WINDOW)), rng.integers(0, 99, (3, 5))
    counts = np.array([0, 3, 5])
    before = spec.windows(tails, tokens)
    after = spec.update_tails(tails, tokens, counts)
    np.testing.assert_array_equal(before[:, 0], tails)
    np.testing.assert_array_equal(after[0], tails[0])
    np.testing.assert_array_equal(after[1], before[1, 3])
    np.testing.assert_array_equal(after[2], np.append(before[2, 4][1:], tokens[2, 4]))


@each_implementation
@pytest.mark.parametrize("case", [case for case in TABLE if not case.is_large], ids=str)
def test_ngram_operations_match_spec(case: OpCase, implementation: Implementation):
    arguments = case.arguments(0)
    wanted = case.specified(arguments, None)
    got, (table,) = implementation("ngram").leaving((0,), case.function, *arguments.values())
    found = as_list(table if got is None else got)
    assert len(found) == len(wanted) == len(fields(spec.NgramTable))
    for one, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, want)


@each_implementation
def test_ngram_windows_and_tails_match_spec(implementation: Implementation):
    ops, rng = implementation("ngram"), np.random.default_rng(1)
    tails, tokens = texts(rng, 4, 9)["contexts"], rng.integers(0, 9, (4, 3)).astype(np.int32)
    counts = np.array([0, 1, 2, 3], np.int32)
    np.testing.assert_array_equal(ops.windows(tails, tokens), spec.windows(tails, tokens))
    wanted = spec.update_tails(tails, tokens, counts)
    np.testing.assert_array_equal(ops.update_tails(tails, tokens, counts), wanted)


def test_ngram_cases_cover_collisions_wraparound_and_branches():
    """Hash collisions, clock wraparound, branches and full trees."""
    learnt = next(case for case in TABLE if case.function == "insert" and "150" in case.name)
    arguments = learnt.arguments(0)
    written = spec.insert(**arguments)
    is_real = arguments["is_real"] & (arguments["contexts"][:, -1] >= 0)
    assert (written.stamps[0] != arguments["table"].stamps[0]).sum() < is_real.sum() / 2
    assert (arguments["table"].clocks < 200).all()
    trees = next(case for case in TABLE if case.function == "draft" and "B 9" in case.name)
    grown = spec.draft(**trees.arguments(0))
    assert {1, 8} < {*grown.num_nodes.tolist()}
    assert any((np.bincount(row[1:]) > 1).any() for row in grown.parents)
    assert len(arrays_of(grown)) == 4
