"""Logprobs of the raw logits, for the rows that report them."""

from collections.abc import Callable
from importlib import import_module

import numpy as np
import pytest

from shared.spec import logprobs as spec
from tests.support.implementations import Implementation, each_implementation

K = 3
EXACT = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # a logarithm of a sum of 30 terms


def test_chosen_and_top_use_raw_logits() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], np.float32))
    chosen = spec.chosen(logits, np.array([1, 2], np.int32))
    np.testing.assert_allclose(np.exp(chosen), [0.25, 0.7], rtol=1e-6)  # a rounding of exp and log
    ids, values = spec.top(logits, 2)
    assert ids.tolist() == [[0, 1], [2, 1]]
    np.testing.assert_allclose(np.exp(values), [[0.5, 0.25], [0.7, 0.2]], rtol=1e-6)


def step(*reports: bool) -> tuple[np.ndarray, ...]:
    """Three requests that emit one, none and two tokens, chosen from some of seven rows."""
    rng = np.random.default_rng(3)
    logits = rng.integers(-3, 4, (7, 30)).astype(np.float32)  # many ties
    row_of = np.array([[4, 0], [2, 2], [6, 1]], np.int32)
    tokens = rng.integers(0, 30, (3, 2)).astype(np.int32)
    return logits, row_of, tokens, np.array([1, 0, 2], np.int32), np.array(reports)


def test_output_logprobs_reports_emitted_tokens_of_requesting_rows() -> None:
    logits, row_of, tokens, counts, reports = step(False, True, True)
    chosen, ids, values = spec.output_logprobs(logits, row_of, tokens, counts, reports, K)
    own, best = logits[row_of[2]], spec.top(logits[row_of[2]], K)
    np.testing.assert_array_equal(chosen[2], spec.chosen(own, tokens[2]))
    np.testing.assert_array_equal(ids[2], best[0])
    np.testing.assert_array_equal(values[2], best[1])
    for part in (chosen, ids, values):
        assert not part[:2].any(), "one asks for nothing, the other emits nothing"
    chosen, *_ = spec.output_logprobs(logits, row_of, tokens, counts, ~reports, K)
    assert chosen[0, 0] == spec.chosen(logits[4:5], tokens[0, :1])[0]
    assert not chosen[0, 1], "nothing is reported past the count"


def test_prompt_logprobs_rank_equals_place_in_order() -> None:
    logits, _, tokens, *_ = step(True)
    ids = np.resize(tokens, len(logits)).astype(np.int32)
    found = spec.PromptLogprobs(*spec.prompt_logprobs(logits, ids, K))
    everything, _ = spec.top(logits, logits.shape[1])
    for row, (token, rank) in enumerate(zip(ids, found.ranks, strict=True)):
        assert everything[row, rank - 1] == token, "equal ones stand by their ids, as in the top"
    np.testing.assert_array_equal(found.chosen, spec.chosen(logits, ids))
    np.testing.assert_array_equal(found.top_ids, everything[:, :K])
    np.testing.assert_array_equal(found.top_values, spec.top(logits, K)[1])


@each_implementation
def test_prompt_logprobs_match_spec(implementation: Implementation) -> None:
    logits, _, tokens, *_ = step(True)
    ids = np.resize(tokens, len(logits)).astype(np.int32)
    want, got = (
        spec.prompt_logprobs(logits, ids, K),
        implementation("logprobs").prompt_logprobs(logits, ids, K),
    )
    for name, mine, theirs in zip(spec.PromptLogprobs._fields, got, want, strict=True):
        assert mine.dtype == theirs.dtype, name
        np.testing.assert_allclose(mine, theirs, **CLOSE if mine.dtype == np.float32 else EXACT)


@each_implementation
def test_output_logprobs_match_spec(implementation: Implementation) -> None:
    ops = implementation("logprobs")
    logits, _, tokens, *_ = step(True)
    ids, values = spec.top(logits, K)
    got_ids, got_values = ops.top(logits, K)
    np.testing.assert_array_equal(got_ids, ids)
    np.testing.assert_allclose(got_values, values, **CLOSE)
    np.testing.assert_allclose(
        ops.chosen(logits, ids[:, 0]), spec.chosen(logits, ids[:, 0]), **CLOSE
    )
    for reports in ([True, True, True], [False, True, True], [True, False, False], [False] * 3):
        asked = step(*reports)
        (chosen, ids, values), got = spec.output_logprobs(*asked, K), ops.output_logprobs(*asked, K)
        np.testing.assert_array_equal(got[1], ids)
        np.testing.assert_allclose(got[0], chosen, **CLOSE)
        np.testing.assert_allclose(got[2], values, **CLOSE)
        assert [part.dtype for part in got] == [np.float32, np.int32, np.float32]


def counted(framework: str, top: Callable, calls: list[int]) -> Callable:
    """`top`, which leaves a mark whenever it runs; in JAX that is when its program does."""

    def marked(*args):
        if framework == "jax":
            import_module("jax").debug.callback(lambda: calls.append(1))
        else:
            calls.append(1)
        return top(*args)

    return marked


@each_implementation
def test_cpu_logprobs_skipped_without_reporting_row(
    implementation: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, calls = import_module(f"{implementation}_impl.ops.sampling.logprobs"), []
    monkeypatch.setattr(module, "top", counted(str(implementation), module.top, calls))
    for row, runs in ((None, 0), (1, 0), (0, 1)):  # row 1 emits nothing
        calls.clear()
        asked = step(*(row == place for place in range(3)))
        implementation("logprobs").output_logprobs(
            *asked, 1
        )  # no other test has this program, marked
        if str(implementation) == "jax":
            import_module("jax").effects_barrier()
        assert len(calls) == runs
