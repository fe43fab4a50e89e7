"""Vocab-parallel sampling: partial results of any partition equal those of the whole row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shared.models.sharded_range import vocab_section
from shared.spec import sampling as spec
from shared.spec import vocab_parallel
from shared.spec.gumbel_noise import TARGET_STREAM
from tests.support.implementations import Implementation, each_implementation
from tests.support.sampling_rows import f32, neutral
from tests.support.vocab_shards import alone_and_on_ranks

VOCAB = 300
FILTERS = {
    "top_k": np.array([1, 7, VOCAB, VOCAB, 40, VOCAB], np.int32),
    "top_p": f32(1, 1, 0.9, 0.4, 0.7, 1),
    "min_p": f32(0, 0, 0, 0, 0.05, 0.3),
}


def rows() -> np.ndarray:
    """Scores with ties within groups and across parts, and tokens that are excluded."""
    rng = np.random.default_rng(3)
    scores = (2 * rng.standard_normal((6, VOCAB))).astype(np.float32)
    scores[1] = np.round(scores[1])
    scores[:, 270] = scores[:, 5] = scores.max(axis=1)
    scores[2, 40:200] = -np.inf
    return scores


def cut(scores: np.ndarray, count: int) -> list[np.ndarray]:
    runs = [vocab_section(VOCAB).run(rank, count) for rank in range(count)]
    return [scores[:, first:end] for first, end in runs if first < end]


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_vocab_parallel_parts_equal_whole_row(count: int) -> None:
    scores = rows()
    parts = cut(scores, count)
    share = vocab_section(VOCAB).share(count)
    left = [vocab_parallel.best(part, rank * share, 6) for rank, part in enumerate(parts)]
    values, ids = vocab_parallel.joined_best(left, 6)
    np.testing.assert_array_equal(ids, spec.top_candidates(scores, 6))
    np.testing.assert_array_equal(values, np.take_along_axis(scores, ids, axis=1))
    norm = vocab_parallel.norm([vocab_parallel.groups(part) for part in parts])
    want = vocab_parallel.norm([vocab_parallel.groups(scores)])
    np.testing.assert_array_equal(norm, want)
    # A mass is rounded to 2^-24 of the best token of its group.
    logs = vocab_parallel.log_probabilities(scores, norm)
    np.testing.assert_allclose(logs, spec.log_softmax(scores), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_vocab_parallel_support_equals_whole_row(count: int) -> None:
    scores = rows()
    kept = np.concatenate(vocab_parallel.support(cut(scores, count), **FILTERS), axis=1)
    is_finite = np.isfinite(scores)
    np.testing.assert_array_equal(kept & is_finite, spec.support(scores, **FILTERS) & is_finite)


@each_implementation
def test_vocab_parallel_support_matches_spec(implementation: Implementation) -> None:
    """On rows with many equal scores, both zeros and tokens that are excluded."""
    rng, R = np.random.default_rng(8), 64
    scores = rng.integers(-6, 7, (R, VOCAB)).astype(np.float32)
    scores[::3] += rng.standard_normal((len(scores[::3]), VOCAB)).astype(np.float32)
    scores[:, 5] = -0.0
    scores[1::4, 50:] = -np.inf
    top_k = rng.choice([1, 2, 7, 60, VOCAB - 1, VOCAB, 2 * VOCAB], R).astype(np.int32)
    top_p = rng.choice([1e-9, 0.3, 0.77, 0.99, 1], R).astype(np.float32)
    min_p = rng.choice([0, 0, 0.01, 0.5, 1], R).astype(np.float32)
    found = implementation("vocab_parallel").support(scores, top_k, top_p, min_p)
    want = spec.support(scores, top_k, top_p, min_p) & np.isfinite(scores)
    np.testing.assert_array_equal(found & np.isfinite(scores), want)
    assert len(set(want.sum(axis=1))) > 10  # the cases differ


ROWS, NODES = 6, 4


def params(vocab: int) -> spec.Sampling:
    """Greedy rows and rows with noise, filters, penalties, biases and stops of their own."""
    return neutral(
        ROWS,
        vocab,
        temperature=f32(0, 0.7, 1, 1.3, 0.5, 1),
        top_p=f32(1, 0.9, 1, 0.5, 0.99, 1),
        top_k=np.array([vocab, vocab, 3, vocab, 20, 1], np.int32),
        min_p=f32(0, 0, 0.01, 0, 0.02, 0),
        presence=f32(0.5, 0, 0, 1, 0, 0),
        repetition=f32(1, 1.2, 1, 0.8, 1, 1),
        min_length=np.array([99, 0, 99, 0, 0, 0], np.int32),
        stop_ids=np.tile(np.array([[4, 130]], np.int32), (ROWS, 1)),
        bias_ids=np.tile(np.array([[2, 255]], np.int32), (ROWS, 1)),
        bias_values=np.tile(f32(1.5, -2), (ROWS, 1)),
    )


def given(rng: np.random.Generator) -> dict:
    seen = rng.integers(0, 6, (ROWS, VOCAB)).astype(np.int32)
    request = np.arange(ROWS, dtype=np.int32)
    return {
        "seen": spec.counts_alone(seen, request),
        "of_nodes": spec.counts_alone(seen, np.repeat(request, NODES)),
        "positions": request + 5,
        "sampling": params(VOCAB),
        "request": request,
        "of_node": np.repeat(request, NODES),
        "allowed": rng.random((ROWS, VOCAB)) < 0.8,
        "columns": np.sort(rng.permutation(VOCAB)[:150]).astype(np.int32),
        "ids": rng.integers(0, VOCAB, ROWS).astype(np.int32),
        "reports": request % 2 == 0,
    }


def kept(ops: Any, vocabulary: Any, parts: list, has: dict) -> Any:
    """Counts the ranks that keep each finite token."""
    tokens, filters = ops("vocab_parallel"), has["sampling"]
    rows = tokens.spread(parts[0], vocabulary)
    keep = tokens.support(rows, filters.top_k, filters.top_p, filters.min_p, vocabulary)
    return tokens.added((keep & (rows > -float("inf"))) + 0, vocabulary)


def chosen(ops: Any, vocabulary: Any, parts: list, has: dict) -> Any:
    """The target's choice, with a grammar."""
    alone = (has["seen"], has["positions"], has["sampling"], has["request"], has["allowed"])
    return ops("sampling").choose(parts[0], *alone, vocabulary)


def reported(ops: Any, vocabulary: Any, parts: list, has: dict) -> Any:
    """Logprobs of emitted tokens, and of a prompt's."""
    logprobs, once = ops("logprobs"), has["request"][:, None]
    emitted = (has["ids"][:, None], 0 * has["ids"] + 1, has["reports"])
    told = logprobs.output_logprobs(parts[0], once, *emitted, 5, vocabulary)
    return told, logprobs.prompt_logprobs(parts[0], has["ids"], 5, vocabulary)


def drafted(ops: Any, vocabulary: Any, parts: list, has: dict, rule: str | None) -> Any:
    """Children of nodes, and the accept rule's result for chains of them."""
    rank, columns = ops("sampling").rank, has["columns"]
    if parts[1].shape[-1] * vocabulary.group.count >= VOCAB:
        columns = None
    size = VOCAB if columns is None else len(columns)
    heads = type(vocabulary)(size, vocabulary.group)
    how = (has["of_nodes"], has["positions"], has["sampling"], has["positions"], TARGET_STREAM)
    ranked = rank(parts[1], *how, 4, rule is not None, columns, heads)
    if rule is None:
        return ranked.ids, ranked.weights
    tokens = ranked.ids[:, :, 0]
    return ops("acceptance").rejection_sample(
        logits=parts[0],
        seen=has["of_nodes"],
        positions=has["positions"][has["of_node"]],
        sampling=has["sampling"],
        request=has["of_node"],
        row_of=has["of_node"].reshape(ROWS, NODES) * NODES + has["request"][None, :NODES],
        tokens=tokens,
        num_nodes=0 * has["request"] + NODES,
        lengths=has["positions"],
        drafted=ranked.processed.reshape(ROWS, NODES, VOCAB)[:, : NODES - 1],
        allowed=None,
        rule=rule,
        vocabulary=vocabulary,
    )


SLOW = pytest.param("jax", VOCAB, "rejection", marks=pytest.mark.matrix)  # to compile


@pytest.mark.parametrize(
    ("framework", "own", "rule"),
    [("torch", 150, "rejection"), ("torch", VOCAB, "block"), ("jax", 150, "block"), SLOW],
)
def test_vocab_parallel_ranks_bitwise_equal(framework: str, own: int, rule: str) -> None:
    """The shards of three ranks are unequal; the last one is smaller."""
    rng = np.random.default_rng(9)
    target = (3 * rng.standard_normal((ROWS * NODES, VOCAB))).astype(np.float32)
    drafts = (3 * rng.standard_normal((ROWS, NODES, own))).astype(np.float32)
    target[:, [20, 100, 200, 290]] = 9  # ties across parts, also at a border
    target[5, 7] = np.nan

    def work(ops: Any, vocabulary: Any, parts: list, has: dict) -> Any:
        rows = [parts[0][:ROWS]]
        return (
            kept(ops, vocabulary, rows, has),
            chosen(ops, vocabulary, rows, has),
            reported(ops, vocabulary, rows, has),
            [drafted(ops, vocabulary, parts, has, each) for each in (None, rule)],
        )

    alone, ranks = alone_and_on_ranks(framework, 3, work, VOCAB, [target, drafts], given(rng))
    for rank in ranks:
        for got, want in zip(rank, alone, strict=True):
            np.testing.assert_array_equal(got.view(np.int8), want.view(np.int8))
