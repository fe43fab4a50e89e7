"""Pages and slots: conservation, and tables that name nobody else's pages."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.allocator import Allocator
from tests.support.toy_backend import toy_limits

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "reserve", "free"]), st.integers(0, 7), st.integers(0, 60)),
    max_size=60,
)


def make(num_pages: int = 20) -> Allocator:
    return Allocator(toy_limits(num_pages=num_pages, num_slots=5, overlap=1))


@settings(max_examples=100, deadline=None)
@given(ACTIONS)
def test_nothing_is_lost_or_shared_whatever_the_order(actions):
    allocator, taken = make(), []
    for action, which, positions in actions:
        if action == "take" and allocator.num_free_slots:
            taken.append(allocator.take_slot())
        elif action == "reserve" and taken:
            slot = taken[which % len(taken)]
            missing = allocator.num_missing(slot, positions)
            free = allocator.num_free_pages
            assert allocator.reserve(slot, positions) == (missing <= free)
        elif action == "free" and taken:
            allocator.free(taken.pop(which % len(taken)))
        allocator.check()


def test_a_reservation_is_whole_or_nothing():
    allocator = make(num_pages=4)
    slot = allocator.take_slot()
    assert not allocator.reserve(slot, 13)  # 4 pages of 4 tokens; 3 are free
    assert allocator.num_free_pages == 3
    assert allocator.reserve(slot, 12)
    assert allocator.num_free_pages == 0


def test_a_growing_slot_keeps_its_pages_in_place():
    allocator = make()
    slot = allocator.take_slot()
    allocator.reserve(slot, 8)
    before = allocator.page_table[slot, :2].copy()
    allocator.reserve(slot, 30)
    np.testing.assert_array_equal(allocator.page_table[slot, :2], before)
    assert allocator.num_pages[slot] == 8


def test_a_slot_cannot_be_freed_twice():
    allocator = make()
    slot = allocator.take_slot()
    allocator.free(slot)
    with pytest.raises(KeyError):
        allocator.free(slot)


@pytest.mark.parametrize("fault", ["leak", "share", "stale"])
def test_the_check_sees_each_fault(fault):
    allocator = make()
    first, second = allocator.take_slot(), allocator.take_slot()
    allocator.reserve(first, 9)
    allocator.reserve(second, 9)
    if fault == "leak":
        allocator.num_pages[first] -= 1
        allocator.page_table[first, allocator.num_pages[first]] = 0
    elif fault == "share":
        allocator.page_table[first, 0] = allocator.page_table[second, 0]
    else:
        allocator.page_table[first, 7] = 1
    with pytest.raises(AssertionError):
        allocator.check()


def test_sinks_are_never_handed_out():
    allocator = make()
    slots = [allocator.take_slot() for _ in range(4)]
    assert 0 not in slots
    assert allocator.reserve(slots[0], 19 * 4)
    assert 0 not in allocator.page_table[slots[0], :19]
