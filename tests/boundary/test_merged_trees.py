"""Merged draft trees on every backend: n-gram drafts and model drafts give plain outputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shared.boundary.backend import StepResult
from shared.engine.request import Request
from shared.engine.rows import ScheduledRows
from shared.spec.merge_drafts import NgramTrees
from tests.support.contract_host import (
    BATCH,
    CHAIN,
    JOINED,
    PLAIN,
    SAMPLED,
    Host,
    either_sampling,
    emitted,
    prompt,
)

M = JOINED.copied


def copies_of(*paths: list[int], at: list[int], edge: float = -0.01) -> NgramTrees:
    """A chain of n-gram tokens for each row, after the token at its position."""
    B = len(paths)
    tokens, place = np.zeros((B, M), np.int32), np.arange(M)
    for row, path in enumerate(paths):
        tokens[row, 1 : 1 + len(path)] = path[: M - 1]
    return NgramTrees(
        tokens=tokens,
        parents=np.tile(np.maximum(place - 1, 0).astype(np.int32), (B, 1)),
        num_nodes=np.array([1 + min(len(path), M - 1) for path in paths], np.int32),
        weights=np.tile((edge * place).astype(np.float32), (B, 1)),
        at=np.array(at, np.int32),
    )


def step(host: Host, rows: list[Request], copies: NgramTrees) -> StepResult:
    return host.run(host.planner.plan(ScheduledRows.decode(rows, JOINED, copies=copies)))


@either_sampling
def test_ngram_drafts_do_not_change_output(host, how):
    """N-gram trees are up to two tokens old, as with steps in flight."""
    prompts = [prompt(30 + n, 10 + 7 * n) for n in range(3)]
    hows = [how, {**how, "seed32": 5}, {**how, "max_draft_tokens": 2}]
    rows = [host.request(p, **h) for p, h in zip(prompts, hows, strict=True)]
    want = [host.alone(p, 24, **h) for p, h in zip(prompts, hows, strict=True)]
    result = host.prefill(*rows)
    texts, accepted, by_copies = [emitted(result, row) for row in range(3)], set(), 0
    for number in range(3):
        paths, at = [], []
        for row, text in enumerate(texts):
            known = max(len(text) - (number + row) % 3, 1)
            path = want[row][known : known + M - 1]
            if (number + row) % 4 == 3:
                path = [*path[:4], *[20] * len(path[4:])]
            paths.append(path)
            at.append(len(prompts[row]) + known - 1)
        result = step(host, rows, copies_of(*paths, at=at))
        for row, text in enumerate(texts):
            count = int(result.counts[row])
            assert count >= 1
            text += emitted(result, row)
            accepted.add(count - 1)
            by_copies += int((result.origins.copied[row] > 0).sum())
    assert max(accepted) > CHAIN.depth
    assert by_copies > 9
    for text, plain in zip(texts, want, strict=True):
        assert text == plain[: len(text)]


def test_merged_step_without_ngrams_equals_chain(host):
    rows, twins = ([host.request(prompt(40 + n, 12)) for n in range(BATCH)] for _ in range(2))
    host.prefill(*rows)
    host.prefill(*twins)
    none = copies_of(*[[]] * BATCH, at=[11] * BATCH)
    joined, chain = step(host, rows, none), host.decode(*twins, shape=CHAIN)
    N = CHAIN.nodes
    for name in ("drafts", "parents"):
        of_both, alone = getattr(joined, name), getattr(chain, name)
        np.testing.assert_array_equal(of_both[:, :N], alone)
        assert not of_both[:, N:].any()
    np.testing.assert_array_equal(joined.num_nodes, chain.num_nodes)
    assert joined.origins.drafted[:, 1:N].all()
    assert not joined.origins.copied.any()


def test_cold_row_verifies_only_ngram_drafts(host):
    tokens = prompt(50, 12)
    want = host.alone(tokens, 12)
    row = host.request(tokens)
    text = emitted(host.prefill(row), 0)
    text += emitted(host.decode(row, shape=PLAIN), 0)
    result = step(host, [row], copies_of(want[2:8], at=[len(tokens) + 1]))
    assert result.counts[0] == 1 + JOINED.depth
    assert not result.origins.drafted.any()
    assert text + emitted(result, 0) == want[:8]
    result = step(host, [row], copies_of([], at=[0]))
    assert result.origins.drafted[0].sum() == CHAIN.depth, (
        "the accepted n-gram nodes extend the drafter"
    )


def test_max_draft_tokens_zero_verifies_no_ngrams(host):
    tokens = prompt(51, 12)
    want = host.alone(tokens, 12)
    row = host.request(tokens, max_draft_tokens=0)
    text = emitted(host.prefill(row), 0)
    result = step(host, [row], copies_of(want[1:8], at=[len(tokens)]))
    assert (result.num_nodes[0], result.counts[0]) == (1, 1)
    assert text + emitted(result, 0) == want[:2]


def test_merged_trees_of_backends_bitwise_equal(host, recorded):
    """N-grams are correct up to one token, in a batch with a padding row."""
    rows = [host.request(prompt(60 + n, 15), **{**SAMPLED, "seed32": n}) for n in range(3)]
    texts = [emitted(host.prefill(*rows), row) for row in range(3)]
    want = [host.alone(prompt(60 + n, 15), 24, **{**SAMPLED, "seed32": n}) for n in range(3)]
    for number in range(4):
        ends = [len(text) for text in texts]
        paths = [
            [*plain[end : end + 1 + row + number], 20, *plain[end + 2 + row + number :]]
            for row, (plain, end) in enumerate(zip(want, ends, strict=True))
        ]
        result = step(host, rows, copies_of(*paths, at=[14 + end for end in ends], edge=-0.5))
        for row, text in enumerate(texts):
            text += emitted(result, row)
        fields = (result.tokens, result.counts, result.drafts, result.parents, result.num_nodes)
        recorded(number, [each[:3] for each in (*fields, *result.origins)])


@pytest.fixture(scope="module")
def known() -> dict[int, list[np.ndarray]]:
    """Result fields of the first backend by step."""
    return {}


@pytest.fixture
def recorded(known) -> Callable[[int, list[np.ndarray]], None]:
    """Compares the fields of a step with those of the first backend."""

    def compare(number: int, fields: list[np.ndarray]) -> None:
        for mine, theirs in zip(fields, known.setdefault(number, fields), strict=True):
            np.testing.assert_array_equal(mine, theirs)

    return compare
