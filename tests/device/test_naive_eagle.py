"""Observable behaviour of drafting, with the smallest tree (S 1, k 1, N 2) and a real one.

Every text is the plain one of the same request, whatever ends it and whoever is served beside it.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from shared.engine.request import FinishReason, Request
from shared.spec import logprobs
from tests.support.backends import FRAMEWORKS
from tests.support.closing_fixture import closing_fixture
from tests.support.run_engine import Outcome, checked_step
from tests.support.tree_subjects import DRAFTED, NAIVE, TREE, Served, Server, name_of, request

GREEDY: dict = {"temperature": 0.0}
SAMPLED: dict = {"temperature": 1.0}
PENALISED: dict = {
    "presence_penalty": 0.9,
    "frequency_penalty": 1.1,
    "repetition_penalty": 1.4,
    "logit_bias": {20: 2.0, 31: -2.0},
    "top_k": 80,
    "min_p": 0.01,
}

either_sampling = pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


served = closing_fixture(Served)


# Of JAX, test_cross_backend.py compares longer chains, and test_cross_backend_trees.py trees; there
# and in test_draft_heads.py trees of the numpy backend are compared with torch's.
USUAL = {"torch": (NAIVE, TREE), "reference": (NAIVE,)}
SUBJECTS = [
    pytest.param(
        (framework, drafted, shape),
        id=f"{framework}-{drafted}-{name_of(shape)}",
        marks=() if shape in USUAL.get(framework, ()) else pytest.mark.matrix,
    )
    for framework, drafted, shape in product(FRAMEWORKS, DRAFTED, (NAIVE, TREE))
]


@pytest.fixture(params=SUBJECTS)
def server(request: pytest.FixtureRequest, served: Served) -> Server:
    framework, drafted, shape = request.param
    return Server(served, framework, drafted, shape)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(2, 250, length).tolist())


def requests(count: int, **more) -> list[Request]:
    """Greedy and sampled in turn, with prompts and texts of several lengths."""
    return [
        request(
            n,
            prompt(n, 5 + 9 * n),
            **{"temperature": float(n % 2), "max_tokens": 14 + 5 * (n % 3), **more},
        )
        for n in range(count)
    ]


def assert_plain(server: Server, asked: list[Request], outcomes: dict[int, Outcome]) -> None:
    for each in asked:
        outcome, plain = outcomes[each.request_id], server.plain(each)
        assert outcome.tokens == plain.tokens
        assert outcome.finish_reason is plain.finish_reason


def test_batch_output_matches_plain(server):
    """More requests than rows, so they also come and go."""
    asked = requests(6)
    outcomes = server.serve(asked, overlap=1)
    assert_plain(server, asked, outcomes)
    accepted = [count for outcome in outcomes.values() for count in outcome.accepted]
    assert set(accepted) >= {0, 1, server.shape.depth}, "too little happened to prove anything"


def test_repeated_and_packed_requests_have_equal_results(server):
    first, second = (server.serve(requests(4, logprobs=2), overlap=1) for _ in range(2))
    for asked in requests(4, logprobs=2):
        packed, again = first[asked.request_id], second[asked.request_id]
        for other in (again, server.alone(asked)):
            assert other.tokens == packed.tokens
            assert other.accepted == packed.accepted
            assert_same_logprobs(other, packed)


def assert_same_logprobs(one: Outcome, other: Outcome) -> None:
    """Float32 on both sides, rows in another order of sums: logits move by 6e-5 at most.

    Ids of the best tokens are left out: two that are that close may change places.
    """
    for (chosen, top), (want, want_top) in zip(one.logprobs, other.logprobs, strict=True):
        np.testing.assert_allclose(chosen, want, atol=2e-4)
        values, want_values = ([value for _, value in pairs] for pairs in (top, want_top))
        np.testing.assert_allclose(values, want_values, atol=2e-4)


def inside_a_run(outcome: Outcome) -> int:
    """A place in the text with an accepted token that is no step's last and new to the text."""
    end = 1  # the prefill's token
    for accepted in outcome.accepted:
        for place in range(end, min(end + accepted, len(outcome.tokens))):
            if outcome.tokens[place] not in outcome.tokens[:place]:
                return place
        end += accepted + 1
    raise AssertionError("no step accepted a new token")


@pytest.mark.parametrize(("how", "overlap"), [(GREEDY, 0), (SAMPLED, 2)], ids=["greedy", "sampled"])
def test_stop_token_inside_accepted_run_ends_output(server, how, overlap):
    """Traps: tokens accepted after the end of the output are emitted, or counted as usage."""
    whole = server.alone(request(3, prompt(3, 30), **how))
    place = inside_a_run(whole)
    stop = {"stop_token_ids": (whole.tokens[place],), "logprobs": 1}
    asked = [request(3, prompt(3, 30), **how, **stop), request(4, prompt(4, 12), **how)]
    outcomes = server.serve(asked, overlap=overlap)
    ended = outcomes[3]
    assert ended.tokens == whole.tokens[: place + 1]
    assert ended.finish_reason is FinishReason.STOP
    assert len(ended.logprobs) == place + 1
    assert ended.accepted == whole.accepted[: len(ended.accepted)]
    assert place + 1 < 1 + sum(count + 1 for count in ended.accepted), "nothing was trimmed"
    assert_plain(server, asked, outcomes)


@either_sampling
def test_max_tokens_inside_accepted_run_ends_output(server, how):
    whole = server.alone(request(3, prompt(3, 30), **how))
    place = inside_a_run(whole)
    ended = server.alone(request(3, prompt(3, 30), **how, max_tokens=place + 1))
    assert ended.tokens == whole.tokens[: place + 1]
    assert ended.finish_reason is FinishReason.LENGTH


def test_single_token_request_takes_no_decode_step(server):
    asked = [request(0, prompt(0, 9), max_tokens=1, logprobs=1), *requests(3)[1:]]
    outcomes = server.serve(asked, overlap=1)
    assert outcomes[0].accepted == []
    assert len(outcomes[0].tokens) == len(outcomes[0].logprobs) == 1
    assert outcomes[0].finish_reason is FinishReason.LENGTH
    assert_plain(server, asked, outcomes)


def test_aborted_request_preserves_other_outputs(server):
    """Its steps are in flight when it ends, and its slot and pages go to another request."""
    engine = server.engine(overlap=2)
    first, heirs = requests(4, max_tokens=30), requests(6, max_tokens=20)[4:]
    outcomes = {each.request_id: Outcome() for each in (*first, *heirs)}
    for each in first:
        engine.add(each)
    aborted = {0, 2}
    for step in range(200):
        if step == 7:
            for number in aborted:
                assert 0 < len(outcomes[number].tokens) < 30
                engine.abort(number)
            for each in heirs:
                engine.add(each)
        for event in checked_step(engine):
            assert step < 7 or event.request_id not in aborted, "an event after the end"
            outcomes[event.request_id].take(event)
        if not engine.busy:
            break
    assert_plain(server, [first[1], first[3], *heirs], outcomes)
    for number in aborted:
        text = outcomes[number].tokens
        assert text == server.plain(first[number]).tokens[: len(text)]


@either_sampling
def test_logprobs_equal_log_softmax_of_target_logits(server, how):
    """Traps: they were the drafter's, or those after penalties and temperature."""
    asked = request(2, prompt(2, 17), **{**PENALISED, **how}, logprobs=3)
    outcome = server.alone(asked)
    assert outcome.tokens == server.plain(asked).tokens
    assert sum(outcome.accepted) > 0
    text = np.array([*asked.prompt, *outcome.tokens], np.int32)
    logits = server.oracle().logits(text[:-1])[len(asked.prompt) - 1 :]
    chosen = logprobs.chosen(logits, np.array(outcome.tokens, np.int32))
    _, best = logprobs.top(logits, 3)
    # Float32 on both sides, sums in another order: logits move by 6e-5 at most.
    np.testing.assert_allclose([value for value, _ in outcome.logprobs], chosen, atol=2e-4)
    values = [[value for _, value in top] for _, top in outcome.logprobs]
    np.testing.assert_allclose(values, best, atol=2e-4)
    named = np.array([[token for token, _ in top] for _, top in outcome.logprobs], np.int32)
    for column in range(3):
        found = logprobs.chosen(logits, named[:, column])
        np.testing.assert_allclose(found, best[:, column], atol=2e-4)


def test_penalties_and_filters_count_accepted_tokens(server):
    asked = requests(4, **PENALISED, max_tokens=24)
    outcomes = server.serve(asked, overlap=1)
    assert_plain(server, asked, outcomes)
    assert sum(sum(outcome.accepted) for outcome in outcomes.values()) > 0
    for each in requests(4, max_tokens=24):
        assert outcomes[each.request_id].tokens != server.plain(each).tokens, "nothing was tested"


def test_output_and_acceptance_independent_of_overlap(server):
    """`--disable-overlap-schedule` sets overlap 0."""
    served = [server.serve(requests(5), overlap=overlap) for overlap in (0, 1, 2)]
    assert_plain(server, requests(5), served[0])
    for outcomes in served[1:]:
        for number, outcome in outcomes.items():
            assert outcome.tokens == served[0][number].tokens
            assert outcome.accepted == served[0][number].accepted


@either_sampling
def test_max_draft_tokens_zero_preserves_plain_output(server, how):
    """They run in the drafted program, together with requests that draft."""
    asked = [
        request(n, prompt(n, 11 + n), **how, max_draft_tokens=None if n else 0) for n in range(2)
    ]
    outcomes = server.serve(asked, overlap=1)
    assert_plain(server, asked, outcomes)
    assert sum(outcomes[0].accepted) == 0
    assert sum(outcomes[1].accepted) > 0
