"""Output distribution of rejection sampling: the target's, although outputs depend on the drafts.

Same method as `tests/spec/test_output_distribution.py`: 12,000 requests of four tokens are 48,000
draws, compared with exact probabilities. Drafts are sampled from a head that disagrees, or made
without sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from shared.spec import acceptance, gumbel_noise, sampling
from shared.spec.draft_tree import TreeShape
from tests.support.known_distribution_target import (
    BOTH,
    CHAIN,
    LIMIT,
    ROWS,
    SETTINGS,
    VOCAB,
    Rule,
    Texts,
    assert_as_specified,
    counts_at,
    decode,
    deviation,
    everyone,
    exact,
    rows_for,
    rows_of,
    rule_of,
    tables,
)


def sampled_chain(rule: Rule, texts: Texts, shape: TreeShape) -> tuple[np.ndarray, np.ndarray]:
    """Drafts sampled from the head with noise of their own, and their distributions."""
    B, found, laws = len(texts.newest), [], []
    for level in range(shape.depth):
        last, seen = found[-1] if found else texts.newest, texts.seen.copy()
        for draft in found:
            seen[np.arange(B), draft] += 2
        ranked = rule.sampling.rank(
            tables()[1][last][:, None],
            **rows_of(texts, seen, np.full(B, level)),
            keys=texts.lengths.astype(np.int32),
            stream=gumbel_noise.DRAFT_STREAM + level,
            width=1,
            is_sampled=True,
            columns=None,
        )
        found.append(ranked.ids[:, 0, 0])
        laws.append(ranked.processed)
    tokens = np.stack([texts.newest, *found], axis=1)
    return tokens, rule.acceptance.draft_probs(np.stack(laws, axis=1), tokens)


def certain_chain(rule: Rule, texts: Texts, shape: TreeShape) -> tuple[np.ndarray, np.ndarray]:
    """The head's most likely drafts, without sampling."""
    found = [texts.newest]
    for _ in range(shape.depth):
        found.append(tables()[1][found[-1]].argmax(axis=1).astype(np.int32))
    tokens = np.stack(found, axis=1)
    return tokens, rule.acceptance.one_hot_q(tokens, VOCAB)


CHAINS = {"sampled": sampled_chain, "certain": certain_chain}


@dataclass(frozen=True)
class Rejecting:
    """A step by the rejection rule; `accepts` names the function, `drafts` one of `CHAINS`."""

    accepts: str
    drafts: str

    def __call__(self, rule: Rule, texts: Texts, shape: TreeShape) -> tuple[np.ndarray, np.ndarray]:
        tokens, q = CHAINS[self.drafts](rule, texts, shape)
        B, N = tokens.shape
        parents = np.maximum(np.tile(np.arange(N, dtype=np.int32), (B, 1)) - 1, 0)
        # Requests may have fewer drafts: here the number goes by the seed.
        num_nodes = (N - np.arange(B) % 5 // 4).astype(np.int32)
        logits, p, choices = tables()[0][tokens], [], []
        for n in range(N):
            rows = rows_of(texts, counts_at(rule, texts, tokens, parents, n), np.full(B, n))
            rows |= everyone(texts)
            p.append(rule.sampling.probabilities(rule.sampling.processed(logits[:, n], **rows)))
            choices.append(rule.sampling.choose(logits[:, n], **rows).ids)
        choices = getattr(rule.acceptance, self.accepts)(
            tokens,
            num_nodes,
            np.stack(choices, axis=1),
            np.stack(p, axis=1),
            q,
            texts.how,
            texts.lengths.astype(np.int32),
        )
        path, counts = rule.acceptance.accept_greedy_path(
            tokens, parents, num_nodes, choices, shape.depth
        )
        return rule.acceptance.emitted(choices, path, counts), counts


REJECTION_CASES = [
    *(
        ("specification", accepts, drafts, settings)
        for accepts in ("rejection_choices", "block_choices")
        for drafts in CHAINS
        for settings in ("nothing", "penalties and filters")
    ),
    *(
        (name, accepts, "sampled", "penalties and filters")
        for name in ("torch", "jax")
        for accepts in ("rejection_choices", "block_choices")
    ),
]


@cache
def judged(name: str, accepts: str, drafts: str, settings: str) -> tuple[np.ndarray, float]:
    by = Rejecting(accepts, drafts)
    return decode(rule_of(name), CHAIN, SETTINGS[settings], rows_for(name), by)


@pytest.mark.parametrize(("name", "accepts", "drafts", "settings"), REJECTION_CASES)
def test_rejection_rules_preserve_target_distribution(
    name: str, accepts: str, drafts: str, settings: str
) -> None:
    written, first = judged(name, accepts, drafts, settings)
    assert_as_specified(written, judged("specification", accepts, drafts, settings)[0])
    assert first > 1.4
    assert deviation(written, exact(SETTINGS[settings])) < LIMIT


def test_block_verification_accepts_more_than_rejection() -> None:
    def first(accepts: str) -> float:
        return judged("specification", accepts, "sampled", "nothing")[1]

    # Of 12,000 steps each mean is known to 0.01.
    assert first("block_choices") > first("rejection_choices") + 0.02


def _q_without_filters(_: Callable) -> Callable:
    def law(scores: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        logits = tables()[1][tokens[:, :-1]].reshape(-1, VOCAB)
        return sampling.probabilities(logits).reshape(scores.shape)

    return law


def _residual(of: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Callable], Callable]:
    """The draw after a rejection from something else, made of p and the residual."""

    def broken(was: Callable) -> Callable:
        def decided(*args: np.ndarray) -> np.ndarray:
            p, residual, *rest = args[4:]
            return was(*args[:4], p, of(p[:, :-1], residual), *rest)

        return decided

    return broken


def _drafts_share_the_residuals_stream(was: Callable) -> Callable:
    def shared(seeds: np.ndarray, positions: np.ndarray, vocab: int, stream: int) -> np.ndarray:
        is_draft = stream >= gumbel_noise.DRAFT_STREAM
        return was(seeds, positions, vocab, gumbel_noise.RESIDUAL_STREAM if is_draft else stream)

    return shared


REJECTION_FAULTS = {
    "q without filters": (acceptance, "draft_probs", _q_without_filters),
    "residual is the target distribution": (acceptance, "_decided", _residual(lambda p, _: p)),
    "residual without its sign": (acceptance, "_decided", _residual(lambda _, r: abs(r))),
    "drafts share the residual's stream": (
        sampling,
        "gumbel",
        _drafts_share_the_residuals_stream,
    ),
}


@pytest.mark.parametrize("accepts", ["rejection_choices", "block_choices"])
@pytest.mark.parametrize("fault", REJECTION_FAULTS)
def test_rejection_distribution_check_detects_planted_fault(
    fault: str, accepts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, function, broken = REJECTION_FAULTS[fault]
    monkeypatch.setattr(module, function, broken(getattr(module, function)))
    by = Rejecting(accepts, "sampled")
    rule = rule_of("specification")
    written, _ = decode(rule, CHAIN, SETTINGS[BOTH], ROWS, by)
    assert deviation(written, exact(SETTINGS[BOTH])) > LIMIT


def test_threefry_words_never_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with different start positions share none, independent of earlier drafts."""
    drawn, was = [], gumbel_noise.threefry2x32

    def noted(key: tuple, counter: tuple) -> tuple:
        words = np.broadcast_arrays(*key, *counter)
        drawn.extend(zip(*(part.reshape(-1).tolist() for part in words), strict=True))
        return was(key, counter)

    monkeypatch.setattr(gumbel_noise, "threefry2x32", noted)
    seeds = np.array([7], np.uint32)
    for place in range(6):
        where = (seeds, np.array([place], np.int32))
        gumbel_noise.gumbel(*where, VOCAB, gumbel_noise.TARGET_STREAM)
        gumbel_noise.gumbel(*where, VOCAB, gumbel_noise.RESIDUAL_STREAM)
        for level in range(4):
            gumbel_noise.gumbel(*where, VOCAB, gumbel_noise.DRAFT_STREAM + level)
        gumbel_noise.uniforms(*where, 4)
    assert len(drawn) > 6 * 6 * 4
    assert len(set(drawn)) == len(drawn)


def test_draft_probs_of_nonfinite_scores_are_valid() -> None:
    scores_of = np.zeros((1, 2, 4), np.float32)
    scores_of[0, 1, 3] = np.nan
    q = acceptance.draft_probs(scores_of, np.array([[0, 1, 3]], np.int32))
    assert q[0].tolist() == [[0.25] * 4, [0, 0, 0, 1]]
