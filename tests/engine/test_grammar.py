"""Grammars of requests: tree masks, ends, and faults that end one request alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from shared.engine.checks import RequestLimits, check
from shared.engine.grammar import GrammarState
from shared.engine.request import FinishReason, InvalidRequestError, SamplingParams
from shared.text.grammar import of_lark, of_regex
from shared.text.grammar_errors import BROKEN, NO_TOKEN, TOO_MUCH, UNFOLLOWED
from tests.support.grammars import compiler, constrained
from tests.support.mutations import prover
from tests.support.tiny_models import EOS_ID

VOCAB = 272


class LimitedGrammar:
    """A grammar with matchers that fail after a number of tokens, like a limited library."""

    def __init__(
        self, limit: int, tokens: Sequence[int] = range(97, 123), fault: str = TOO_MUCH
    ) -> None:
        self.limit, self.tokens, self.fault = limit, tokens, fault

    def matcher(self) -> LimitedGrammar._Matcher:
        return self._Matcher(self)

    class _Matcher:
        is_satisfied = is_terminated = False

        def __init__(self, owner: LimitedGrammar) -> None:
            self._owner, self._depth = owner, 0
            self.fault = owner.fault

        def fill(self, bits: np.ndarray) -> bool:
            for token in self._owner.tokens:
                bits.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
            return True

        def take(self, token: int) -> bool:
            self._depth += 1
            return self._depth <= self._owner.limit

        def rollback(self) -> None:
            self._depth -= 1


def constraint_of(
    grammar: str, min_tokens: int = 0, stops: Sequence[int] = (EOS_ID,)
) -> GrammarState:
    return GrammarState(compiler(VOCAB).compile(grammar), VOCAB, stops, min_tokens)


def allowed(bits: np.ndarray) -> list[int]:
    """The allowed tokens: single bytes and the end token."""
    found = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    return found[found < 256].tolist()


def letters(text: str) -> list[int]:
    return list(text.encode())


def test_grammar_masks_cover_reachable_tree_nodes():
    """Siblings, children of a forbidden draft, and the end of the output."""
    held = constraint_of(of_regex("a[bc]{2}d"))
    assert held.take(ord("a"))
    #        root b         x (forbidden)   c    d (after bc)   e after x
    tokens = [0, ord("b"), ord("x"), ord("c"), ord("d"), ord("e")]
    masks = held.masks(tokens, [0, 0, 0, 1, 3, 2])
    assert masks is not None
    assert {node: allowed(bits) for node, bits in masks.items()} == {
        0: letters("bc"),
        1: letters("bc"),
        3: letters("d"),
    }
    again = held.masks([0], [0])
    assert again is not None
    assert allowed(again[0]) == letters("bc"), "the walk moved the matcher"


def test_eos_allowed_after_grammar_complete_and_min_tokens():
    for min_tokens, end in ((0, [EOS_ID]), (2, []), (1, [EOS_ID])):
        held = constraint_of(of_lark('start: "a"+'), min_tokens)
        first = held.masks([0, ord("a")], [0, 0])
        assert first is not None
        assert allowed(first[0]) == letters("a")
        assert allowed(first[1]) == end + letters("a")
    assert not held.is_terminated


def test_grammar_masks_end_at_drafted_stop_token():
    held = constraint_of(of_lark('start: "a"+'))
    masks = held.masks([0, ord("a"), EOS_ID, ord("a")], [0, 0, 1, 2])
    assert masks is not None
    assert masks.keys() == {0, 1}


def test_stop_token_allowed_only_as_grammar_end():
    """Inside the output it would end the request before the grammar and `min_tokens` allow."""
    stops = (EOS_ID, ord("a"))
    held = constraint_of(of_regex("[ab]{2}"), stops=stops)
    first = held.masks([0], [0])
    assert first is not None
    assert allowed(first[0]) == letters("b")
    held = constraint_of(of_regex("a"), stops=stops)
    assert held.masks([0], [0]) is None
    assert held.fault == NO_TOKEN


def test_request_stops_when_grammar_terminates():
    request = constrained(1, (2, 3), VOCAB, "regex", max_tokens=100, min_tokens=90)
    text = letters("ab aaa aaaaaaa zzz xxx ccccccc")
    assert request.append_tokens([*text, 5, 6]) == len(text)
    assert request.finish_reason is FinishReason.STOP


def test_append_tokens_outside_grammar_ends_with_error():
    request = constrained(1, (2, 3), VOCAB, "regex", max_tokens=100)
    assert request.append_tokens([*letters("ab"), ord("Z"), ord("a")]) == 2
    assert (request.finish_reason, request.fault) == (FinishReason.ERROR, BROKEN)
    assert request.output == letters("ab")


@pytest.mark.parametrize("fault", [TOO_MUCH, UNFOLLOWED])
def test_grammar_limit_drops_draft_masks_before_failing(fault):
    """The request fails with the fault of the matcher when its own tokens reach the limit."""
    held = GrammarState(LimitedGrammar(2, fault=fault), VOCAB, (EOS_ID,), 0)
    assert held.take(97)
    chain = [0, 98, 99, 100]
    assert held.masks(chain, [0, 0, 1, 2]) is None
    assert held.fault is None
    assert held.masks([0], [0]) is not None
    assert held.take(98)
    assert not held.take(99)
    assert held.fault == fault


def test_grammar_without_allowed_token_reports_fault():
    held = GrammarState(LimitedGrammar(9, tokens=()), VOCAB, (EOS_ID,), 0)
    assert held.masks([0], [0]) is None
    assert held.fault == NO_TOKEN


def test_check_rejects_unsupported_structured_output():
    limits = RequestLimits(
        context_length=99,
        max_request_tokens=99,
        vocab_size=VOCAB,
        max_stop_token_ids=1,
        max_logit_bias_entries=0,
        max_logprobs=None,
        structured_outputs=True,
    )
    asked = SamplingParams(grammar=of_regex("a"))
    check((2, 3), asked, limits)
    with pytest.raises(
        InvalidRequestError,
        match="^prompt must have at least 2 tokens when structured output is requested$",
    ):
        check((2,), asked, limits)
    without = RequestLimits(**vars(limits) | {"structured_outputs": False})
    with pytest.raises(InvalidRequestError, match="--grammar-backend llguidance"):
        check((2, 3), asked, without)


test_planted_fault_is_detected = prover("engine/test_grammar", globals())
