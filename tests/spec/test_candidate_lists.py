"""Candidate lists: the ranking of all tokens, of which only the candidates are possible."""

import numpy as np
import pytest

from shared.engine.request import SamplingParams
from shared.spec import candidate_lists as spec
from shared.spec import sampling
from shared.spec.gumbel_noise import TARGET_STREAM
from tests.support.cases.sampling.candidate_lists import TABLE
from tests.support.golden_blocks import BLOCKS, GOLDEN, TARGET, close, golden_block_head
from tests.support.golden_chains import GREEDY, LISTS, TARGET_CONFIG
from tests.support.implementations import Implementation, each_implementation

CASES = {case.name: case for case in TABLE if not case.is_large}


def ranked_over_vocabulary(arguments: dict) -> tuple[np.ndarray, np.ndarray]:
    """Ranks rows over the vocabulary, in which all other tokens are impossible."""
    logits, tokens, counts = (arguments[name] for name in ("logits", "tokens", "counts"))
    R, P, _ = logits.shape
    scores = np.full((R, P, counts.shape[1]), -np.inf, np.float32)
    at = np.broadcast_to(tokens[:, None], logits.shape)
    np.put_along_axis(scores, at, logits, axis=2)
    seen = sampling.counts_alone(counts, np.repeat(arguments["slots"], P))
    ranked = sampling.rank(
        scores,
        seen,
        arguments["positions"],
        arguments["sampling"],
        arguments["positions"],
        TARGET_STREAM,
        arguments["width"],
        False,
        None,
    )
    return ranked.ids, ranked.weights


@pytest.mark.parametrize("name", [name for name in CASES if name != "all stopped"])
@pytest.mark.parametrize("seed", range(3))
def test_candidate_lists_equal_vocabulary_ranking(seed: int, name: str) -> None:
    arguments = CASES[name].arguments(seed)
    order = np.argsort(arguments["tokens"], axis=1)  # ties go by id over the vocabulary
    arguments["tokens"] = np.take_along_axis(arguments["tokens"], order, axis=1)
    arguments["logits"] = np.take_along_axis(arguments["logits"], order[:, None], axis=2)
    ids, weights = spec.rank(**arguments)
    want, want_weights = ranked_over_vocabulary(arguments)
    is_possible = want_weights > -np.inf
    np.testing.assert_array_equal(is_possible, weights > -np.inf)
    np.testing.assert_array_equal(ids[is_possible], want[is_possible])
    np.testing.assert_allclose(weights, want_weights, rtol=1e-5, atol=1e-5)


@each_implementation
@pytest.mark.parametrize("name", CASES)
def test_candidate_lists_match_spec(name: str, implementation: Implementation) -> None:
    arguments = CASES[name].arguments(4)
    ids, weights = implementation("candidate_lists").rank(**arguments)
    want, want_weights = spec.rank(**arguments)
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_allclose(weights, want_weights, rtol=2e-5, atol=2e-5)


def test_rows_without_allowed_candidate_have_no_weight() -> None:
    arguments = CASES["all stopped"].arguments(0)
    _, weights = spec.rank(**arguments)
    assert not (weights[0] > -np.inf).any()
    assert not (weights[2] > -np.inf).any()
    assert (weights[1] > -np.inf).all()


def asked_lists(implementation: str, folder: str, how: SamplingParams) -> list[np.ndarray]:
    """Candidates of a golden head's slots, four after each token before, of two random blocks."""
    head, weights = golden_block_head(GOLDEN / folder, TARGET)
    block = BLOCKS[implementation](head, TARGET_CONFIG, weights)
    rng, S = np.random.default_rng(5), head.config.block.size - head.config.block.first_slot
    hidden = rng.standard_normal((1, S + 1, head.config.layer.hidden)).astype(np.float32)
    scored = rng.standard_normal((1, S, head.config.draft_vocab)).astype(np.float32)
    lists = LISTS[implementation](block, how)
    return [np.asarray(x) for x in lists(np.array([3], np.int32), hidden, scored, width=4)]


HEADS = ["dflash2", "dspark_vanilla", "dspark_gated"]
HOW = SamplingParams(temperature=0.9, seed32=7, top_k=9, logit_bias={30: 6.0, 31: -100.0})


@pytest.mark.parametrize("folder", HEADS)
@pytest.mark.parametrize("implementation", ["torch", pytest.param("jax", marks=pytest.mark.matrix)])
def test_block_lists_match_spec(implementation: str, folder: str) -> None:
    for how in (GREEDY, HOW):
        want, got = (asked_lists(each, folder, how) for each in ("spec", implementation))
        np.testing.assert_array_equal(got[0], want[0])
        close(got[1], want[1])
        np.testing.assert_array_equal(got[2], want[2])
