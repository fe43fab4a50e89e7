"""State changes of a request: output, slot and end."""

import pytest

from shared.engine.request import FinishReason, Request, SamplingParams


def request(num_prompt: int = 5, output: tuple[int, ...] = (), **sampling) -> Request:
    return Request(
        request_id=3,
        prompt=tuple(range(1, num_prompt + 1)),
        sampling=SamplingParams(**sampling),
        output=list(output),
    )


def test_truncate_returns_removed_tokens():
    one = request(output=(7, 8, 9))
    assert one.truncate(1) == [8, 9]
    assert one.output == [7]
    assert one.truncate(1) == []


def test_request_finishes_once():
    one = request(max_tokens=2)
    assert one.append_tokens([4, 5, 6]) == 2
    assert one.finish_reason is FinishReason.LENGTH
    with pytest.raises(AssertionError, match="request 3 ended"):
        one.finish(FinishReason.ABORT)
    assert one.finish_reason is FinishReason.LENGTH


def test_assign_slot_sets_first_position():
    one = request(num_prompt=70)
    one.assign_slot(2, first_position=64)
    assert (one.slot, one.first_position, one.prefilled, one.decodes) == (2, 64, 64, False)
    one.prefill(70)
    assert one.decodes
    one.preempt()
    one.assign_slot(1)
    assert (one.slot, one.first_position, one.prefilled) == (1, 0, 0)


@pytest.mark.parametrize(("output", "first"), [((), 5), ((9,), 5), ((9, 9), 6), ((), -1)])
def test_assign_slot_rejects_invalid_first_position(output, first):
    with pytest.raises(ValueError, match="first_position must be in 0"):
        request(output=output).assign_slot(1, first_position=first)
