"""Page and slot allocation: conservation, and page tables without foreign pages."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.allocator import Allocator
from tests.support.toy_backend import toy_capacity

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["take", "share", "reserve", "free"]),
        st.integers(0, 7),
        st.integers(0, 60),
    ),
    max_size=60,
)


def make(num_pages: int = 20) -> Allocator:
    return Allocator(toy_capacity(num_pages=num_pages, num_slots=5, overlap=1))


@settings(max_examples=100, deadline=None)
@given(ACTIONS)
def test_allocator_conserves_pages_in_any_order(actions):
    allocator, taken = make(), []
    for action, which, positions in actions:
        if action == "take" and allocator.num_free_slots:
            taken.append(allocator.take_slot())
        elif action == "share" and taken and allocator.num_free_slots:
            other = taken[which % len(taken)]
            count = min(positions // 4, allocator.pages.num_pages[other])
            free = allocator.pages.num_free
            taken.append(allocator.take_slot(allocator.pages.page_table[other, :count]))
            assert allocator.pages.num_free == free
        elif action == "reserve" and taken:
            slot = taken[which % len(taken)]
            missing = allocator.pages.num_missing(slot, positions)
            free = allocator.pages.num_free
            assert allocator.reserve(slot, positions) == (missing <= free)
        elif action == "free" and taken:
            allocator.free(taken.pop(which % len(taken)))
        allocator.check()
    for slot in taken:
        allocator.free(slot)
    allocator.check()
    assert allocator.pages.num_free == 19


def test_reserve_is_atomic():
    allocator = make(num_pages=4)
    slot = allocator.take_slot()
    assert not allocator.reserve(slot, 13)  # 4 pages of 4 tokens; 3 are free
    assert allocator.pages.num_free == 3
    assert allocator.reserve(slot, 12)
    assert allocator.pages.num_free == 0


def test_reserve_for_growing_slot_preserves_pages():
    allocator = make()
    slot = allocator.take_slot()
    allocator.reserve(slot, 8)
    before = allocator.pages.page_table[slot, :2].copy()
    allocator.reserve(slot, 30)
    np.testing.assert_array_equal(allocator.pages.page_table[slot, :2], before)
    assert allocator.pages.num_pages[slot] == 8


def test_free_slot_twice_raises():
    allocator = make()
    slot = allocator.take_slot()
    allocator.free(slot)
    with pytest.raises(KeyError):
        allocator.free(slot)


def test_shared_prefix_pages_freed_with_last_owner():
    allocator = make()
    first = allocator.take_slot()
    allocator.reserve(first, 16)
    pages = allocator.pages.page_table[first, :4].copy()
    second = allocator.take_slot(pages[:3])
    assert allocator.pages.num_free == 19 - 4
    assert allocator.reserve(second, 20)  # two own pages after the prefix
    assert allocator.pages.page_table[second, :3].tolist() == pages[:3].tolist()
    assert not set(allocator.pages.page_table[second, 3:5].tolist()) & {0, *pages.tolist()}
    assert allocator.pages.num_owners[pages].tolist() == [2, 2, 2, 1]
    assert allocator.pages.num_free == 19 - 6
    allocator.check()
    allocator.free(first)
    assert allocator.pages.num_owners[pages].tolist() == [1, 1, 1, 0]
    assert allocator.pages.num_free == 19 - 5  # the second slot still owns the prefix
    assert allocator.pages.page_table[second, :3].tolist() == pages[:3].tolist()
    allocator.check()
    allocator.free(second)
    assert allocator.pages.num_free == 19
    allocator.check()


def test_reserve_never_returns_owned_pages():
    allocator = make(num_pages=6)
    first = allocator.take_slot()
    allocator.reserve(first, 12)
    second = allocator.take_slot(allocator.pages.page_table[first, :2])
    shared = set(allocator.pages.page_table[second, :2].tolist())
    allocator.free(first)
    third = allocator.take_slot()
    assert not allocator.reserve(third, 16)
    assert allocator.reserve(third, 12)
    assert not shared & set(allocator.pages.page_table[third, :3].tolist())


def test_take_slot_rejects_unowned_prefix_pages():
    allocator = make()
    slot = allocator.take_slot()
    allocator.reserve(slot, 8)
    pages = allocator.pages.page_table[slot, :2].copy()
    allocator.free(slot)
    with pytest.raises(ValueError, match="has no owner"):
        allocator.take_slot(pages)
    allocator.check()


@pytest.mark.parametrize("fault", ["leak", "share", "stale", "miscount"])
def test_allocator_check_detects_each_fault(fault):
    allocator = make()
    first, second = allocator.take_slot(), allocator.take_slot()
    allocator.reserve(first, 9)
    allocator.reserve(second, 9)
    if fault == "leak":
        allocator.pages.num_pages[first] -= 1
        allocator.pages.page_table[first, allocator.pages.num_pages[first]] = 0
    elif fault == "share":
        allocator.pages.page_table[first, 0] = allocator.pages.page_table[second, 0]
    elif fault == "miscount":
        allocator.pages.num_owners[allocator.pages.page_table[first, 0]] += 1
    else:
        allocator.pages.page_table[first, 7] = 1
    with pytest.raises(AssertionError):
        allocator.check()


def test_scratch_page_and_slot_never_allocated():
    allocator = make()
    slots = [allocator.take_slot() for _ in range(4)]
    assert 0 not in slots
    assert allocator.reserve(slots[0], 19 * 4)
    assert 0 not in allocator.pages.page_table[slots[0], :19]
