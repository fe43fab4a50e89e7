"""Output distribution: drafts, trees, penalties and filters preserve the target distribution.

The logits of a target of nine tokens are a table, so the probability of every text of four tokens
is computed exactly. 12,000 requests that differ in their seed only give 48,000 sampled tokens, in
which every planted fault shows. The whole rule decodes them: a draft tree from a head that
disagrees, the target's choice at each node, the walk, and all steps. Whole texts are counted, so
dependence between positions shows as well as a wrong distribution at one of them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from shared.spec import acceptance, gumbel_noise, sampling
from tests.support import acceptance_model
from tests.support.known_distribution_target import (
    BOTH,
    LIMIT,
    NOTHING,
    PLAIN,
    ROWS,
    SETTINGS,
    SHAPES,
    TREE,
    VOCAB,
    assert_as_specified,
    decode,
    deviation,
    exact,
    rows_for,
    rule_of,
)


@cache
def plain_texts(name: str, settings: str) -> np.ndarray:
    return decode(rule_of(name), PLAIN, SETTINGS[settings], rows_for(name))[0]


IN_EACH_OTHER = ("penalties", "filters")
"""Settings of the matrix: those that have both show a fault of either."""

CASES = [
    *(
        pytest.param(
            "specification", each, marks=pytest.mark.matrix if each in IN_EACH_OTHER else ()
        )
        for each in SETTINGS
    ),
    *((name, BOTH) for name in ("torch", "jax")),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_speculation_preserves_distribution_and_output(
    name: str, settings: str, shape: str
) -> None:
    written, first = decode(rule_of(name), SHAPES[shape], SETTINGS[settings], rows_for(name))
    assert first > 1.5  # drafts were accepted, so the walk is part of what is tested
    assert deviation(written, exact(SETTINGS[settings])) < LIMIT
    np.testing.assert_array_equal(written, plain_texts(name, settings))
    assert_as_specified(written, plain_texts("specification", settings))


def _one_noise_for_all_positions(was: Callable) -> Callable:
    return lambda seeds, positions, *rest: was(seeds, np.zeros_like(positions), *rest)


def _one_noise_for_two_positions(was: Callable) -> Callable:
    return lambda seeds, positions, *rest: was(seeds, positions // 2, *rest)


def _noise_without_bound(_: Callable) -> Callable:
    """A uniform of six bits that rounds to 1; one of 24 bits shows in real vocabularies only."""

    def noise(words: np.ndarray) -> np.ndarray:
        uniform = np.maximum(words >> 26, 1).astype(np.float32) / np.float32(63)
        return -np.log(np.maximum(-np.log(uniform), np.float32(1e-30)))

    return noise


def _only_the_last_token_counts(was: Callable) -> Callable:
    def seen(*trees: np.ndarray) -> sampling.TokenCounts:
        found, node = was(*trees), trees[-1][:, None]
        return replace(found, on_path=(np.arange(trees[2].shape[1]) == node) & (node > 0))

    return seen


def _siblings_count(was: Callable) -> Callable:
    def seen(counts: Any, slots: Any, tokens: Any, parents: np.ndarray, *rows: Any) -> Any:
        chains = np.maximum(np.arange(parents.shape[1]) - 1, 0) + 0 * parents
        return was(counts, slots, tokens, chains, *rows)

    return seen


def _filters_one_after_another(was: Callable) -> Callable:
    def support(logits: np.ndarray, top_k: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        off = [np.zeros_like(rest[1]), np.full_like(top_k, VOCAB)]
        first = was(logits, top_k, np.ones_like(rest[0]), off[0])
        return first & was(np.where(first, logits, np.float32(-np.inf)), off[1], *rest)

    return support


def _every_draft_is_accepted(_: Callable) -> Callable:
    def walk(tokens: np.ndarray, parents: np.ndarray, *rest: Any) -> tuple[np.ndarray, np.ndarray]:
        path = np.zeros((len(tokens), rest[-1] + 1), np.int32)
        for place in range(1, path.shape[1]):
            is_child = (parents == path[:, place - 1 : place]) & (np.arange(tokens.shape[1]) > 0)
            path[:, place] = np.where(is_child.any(axis=1), is_child.argmax(axis=1), path[:, place])
        return path, 1 + (path > 0).sum(axis=1).astype(np.int32)

    return walk


FAULTS = {
    "one noise for all positions": (sampling, "gumbel", _one_noise_for_all_positions, BOTH),
    "one noise for two positions": (sampling, "gumbel", _one_noise_for_two_positions, BOTH),
    "noise without bound": (gumbel_noise, "noise_of_words", _noise_without_bound, NOTHING),
    "only the last token counts": (sampling, "counts_in_trees", _only_the_last_token_counts, BOTH),
    "siblings count": (sampling, "counts_in_trees", _siblings_count, BOTH),
    "filters one after another": (sampling, "support", _filters_one_after_another, BOTH),
    "every draft is accepted": (acceptance, "accept_greedy_path", _every_draft_is_accepted, BOTH),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_distribution_check_detects_planted_fault(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, function, broken, settings = FAULTS[fault]
    monkeypatch.setattr(module, function, broken(getattr(module, function)))
    written, _ = decode(rule_of("specification"), TREE, SETTINGS[settings], ROWS)
    assert deviation(written, exact(SETTINGS[settings])) > LIMIT


def test_shared_noise_raises_acceptance_above_bound() -> None:
    lines = acceptance_model.measure(0.4, vocab=96, rows=400, steps=6)
    chain, tree = lines["perturbed chain"], lines["perturbed tree"]
    # 2,400 steps: the first share is known to 0.01, and is 0.1 above its bound.
    assert chain.agreement[0] > chain.bound
    assert tree.tokens_per_step > 1.25 * chain.tokens_per_step
    assert lines["greedy chain"].tokens_per_step < chain.tokens_per_step
