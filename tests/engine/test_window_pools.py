"""Page pools of sliding windows in the engine, on the toy backend."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.boundary.buffers import empty_plan, plan_layout
from shared.boundary.window_pools import WindowPool, max_slot_pages, max_visible_pages
from shared.engine.allocator import Allocator
from shared.engine.page_pool import PagePool
from shared.engine.request import CacheNamespace, FinishReason
from shared.engine.rows import ScheduledRows
from shared.spec.draft_tree import TreeShape
from tests.support.cached_traffic import family, give_back_all, make, request, serve, tokens
from tests.support.run_engine import checked_step, drive
from tests.support.scheduled_requests import House
from tests.support.toy_backend import POISON, toy_capacity

WINDOWS = (1, 6, 17)
"""Windows of the kind "windows", in pages of 4 tokens."""

SHOWN = tuple(max_visible_pages(window, 4) for window in WINDOWS)


def allocator_of(*, num_pages: int = 40, window_pages: int = 20, windows=(1, 9)) -> Allocator:
    pools = tuple(WindowPool(window, window_pages) for window in windows)
    capacity = toy_capacity(num_pages=num_pages, num_slots=5, overlap=1, window_pools=pools)
    return Allocator(capacity)


def window_pages(allocator: Allocator, slot: int) -> list[list[int]]:
    """Pages of a slot in each window pool."""
    return [
        pool.page_table[slot, pool.num_freed[slot] : pool.num_pages[slot]].tolist()
        for pool in allocator.windows
    ]


@pytest.mark.parametrize("window", range(1, 23))
def test_num_visible_covers_every_visible_page(window):
    """Checked by enumeration of all lengths in pages of 4 tokens."""
    visible = max_visible_pages(window, 4)
    reach = [length // 4 - max(0, length - window + 1) // 4 for length in range(100)]
    assert visible == max(reach)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9, 64])
@pytest.mark.parametrize("written", [1, 3, 4, 9, 64])
def test_max_slot_pages_bounds_every_slot(window, written):
    held = []
    for length in range(200):
        allocator = allocator_of(num_pages=400, window_pages=400, windows=(window,))
        slot = allocator.take_slot()
        assert allocator.reserve(slot, length)
        allocator.free_outside_window(slot, length)
        assert allocator.reserve(slot, length + written)
        held.append(allocator.windows[0].num_held(slot))
    assert max(held) == max_slot_pages(window, 4, written)


@pytest.mark.parametrize("windows", [(9, 1), (9, 9), (0, 4)])
def test_backend_limits_reject_unordered_windows(windows):
    with pytest.raises(ValueError, match="ascending windows"):
        allocator_of(windows=windows)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["take", "share", "reserve", "free_outside_window", "free"]),
        st.integers(0, 7),
        st.integers(0, 90),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(ACTIONS)
def test_allocator_conserves_pages_of_all_pools(actions):
    allocator, lengths = allocator_of(), {}
    for action, which, positions in actions:
        slots = list(lengths)
        slot = slots[which % len(slots)] if slots else 0
        if action == "take" and allocator.num_free_slots:
            lengths[allocator.take_slot()] = 0
        elif action == "share" and slot and allocator.num_free_slots:
            share_prefix(allocator, lengths, slot)
        elif action == "reserve" and slot:
            fits = all(p.num_missing(slot, positions) <= p.num_free for p in allocator.pools)
            before = [pool.num_free for pool in allocator.pools]
            assert allocator.reserve(slot, positions) == fits
            assert fits or before == [pool.num_free for pool in allocator.pools]
        elif action == "free_outside_window" and slot:
            end = 4 * allocator.pages.num_pages.item(slot)
            lengths[slot] = max(lengths[slot], min(positions, end))
            allocator.free_outside_window(slot, lengths[slot])
            assert_visible(allocator, slot, lengths[slot])
        elif action == "free" and slot:
            del lengths[slot]
            allocator.free(slot)
        allocator.check()
    for slot in lengths:
        allocator.free(slot)
    allocator.check()
    assert all(pool.num_free == pool.size for pool in allocator.pools)


def share_prefix(allocator: Allocator, lengths: dict[int, int], slot: int) -> None:
    """Starts another slot with the full pages of a slot."""
    count = lengths[slot] // 4
    pages = [pool.page_table[slot, :count] for pool in allocator.windows]
    kept = [
        table[count - pool.num_restored(count) :]
        for pool, table in zip(allocator.windows, pages, strict=True)
    ]
    free = [pool.num_free for pool in allocator.pools]
    lengths[allocator.take_slot(allocator.pages.page_table[slot, :count], kept)] = 4 * count
    assert free == [pool.num_free for pool in allocator.pools]


def assert_visible(allocator: Allocator, slot: int, length: int) -> None:
    """All pages visible to a row at `length` or later are of the slot, and few others."""
    for pool, window in zip(allocator.windows, (1, 9), strict=True):
        first = max(0, length - window + 1) // 4
        assert pool.page_table[slot, first : pool.num_pages[slot]].all()
        assert pool.num_freed[slot] >= max(0, length // 4 - pool.num_visible - 1)


def test_reserve_is_atomic_over_all_pools():
    allocator = allocator_of(num_pages=40, window_pages=4)
    slot = allocator.take_slot()
    assert not allocator.reserve(slot, 13)
    assert [pool.num_free for pool in allocator.pools] == [39, 3, 3]
    assert allocator.reserve(slot, 12)
    assert [pool.num_free for pool in allocator.pools] == [36, 0, 0]


def test_free_outside_window_leaves_pages_of_full_attention():
    allocator = allocator_of()
    slot = allocator.take_slot()
    allocator.reserve(slot, 70)
    before = allocator.pages.page_table[slot].copy()
    allocator.free_outside_window(slot, 70)
    np.testing.assert_array_equal(allocator.pages.page_table[slot], before)
    # 70 is in page 17; window 1 keeps pages 16 and 17, window 9 keeps 14 to 17.
    assert [len(pages) for pages in window_pages(allocator, slot)] == [2, 4]


def test_take_slot_rejects_prefix_without_window_pages():
    allocator = allocator_of()
    slot = allocator.take_slot()
    allocator.reserve(slot, 40)
    with pytest.raises(ValueError, match="a prefix of 10 pages has only 0"):
        allocator.take_slot(allocator.pages.page_table[slot, :10])


@pytest.mark.parametrize("overlap", [0, 2])
def test_long_request_holds_one_window_of_pages(overlap):
    """500 positions take 125 pages, of which each window pool has few at any time."""
    engine = make("windows", overlap=overlap)
    one, most = request(tokens(1, 200), max_tokens=290, stop_token_ids=()), [0] * len(WINDOWS)
    engine.add(one)
    while engine.busy:
        checked_step(engine)
        if one.slot and one.output:
            held = [pool.num_held(one.slot) for pool in engine.allocator.windows]
            most = list(map(max, most, held))
    assert len(one.output) == 290
    # Beside the visible pages: one more, and those of steps in flight with 4 tokens each.
    bounds = [max_slot_pages(pool.window, 4, 1 + 4 * overlap + 4) for pool in limits(engine)]
    assert most <= bounds


def limits(engine) -> tuple[WindowPool, ...]:
    return engine.allocator.capacity.window_pools


def test_pool_of_one_request_serves_any_request():
    """The smallest pool that the scheduler accepts; a page less is an error."""
    least = max(max_slot_pages(window, 4, 128) for window in WINDOWS)
    with pytest.raises(ValueError, match=f"sliding window 17 requires {least} pages"):
        make("windows", window_pages=least)
    engine = make("windows", window_pages=least + 1, overlap=2)
    serve(engine, *[request(tokens(n, 300), max_tokens=60) for n in range(4)])
    give_back_all(engine.cache)


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("any_shape", [False, True])
def test_few_window_pages_leave_output_unchanged(any_shape, overlap):
    """Only the window pools are short of pages."""
    engine = make("windows", window_pages=45, overlap=overlap, any_shape=any_shape)
    for seed in range(3):
        serve(engine, *family(seed, 30))
    assert engine.scheduler.num_preemptions or engine.cache.tree.windows[2].num_changes > 500
    give_back_all(engine.cache)


def test_cached_prefix_reused_while_window_pages_stay():
    engine, prompt = make("windows"), tokens(2, 200)
    first, again = request(prompt, max_tokens=4), request(prompt, max_tokens=4)
    serve(engine, first)
    serve(engine, again)
    assert (first.cached_tokens, again.cached_tokens) == (0, 196)
    (held,) = [engine.cache.tree.path(CacheNamespace(""), np.array(prompt, np.int32))]
    engine.cache.tree.windows[1].evict(1000)  # window 6
    later = request(prompt, max_tokens=4)
    serve(engine, later)
    assert later.cached_tokens == 0, "the pages are cached, but not those of one window"
    assert [node.page for node in held] == [
        node.page for node in engine.cache.tree.path(CacheNamespace(""), np.array(prompt, np.int32))
    ]


def test_recomputed_window_pages_return_to_tree():
    """Otherwise no request could use the prefix again until its other pages are evicted."""
    engine, prompt = make("windows"), tokens(2, 200)
    serve(engine, request(prompt, max_tokens=4))
    for cached in engine.cache.tree.windows:
        cached.evict(1000)
    one, two = request(prompt, max_tokens=40, stop_token_ids=()), request(prompt, max_tokens=4)
    engine.add(one)
    while not one.output:
        checked_step(engine)
    engine.add(two)
    while engine.busy:
        checked_step(engine)
    assert (one.cached_tokens, two.cached_tokens) == (0, 196)


@pytest.mark.parametrize("kept", range(1, 50))
def test_prefix_hit_requires_last_window_only(kept):
    """Pages of window 17 before page `kept` are evicted; a request needs the last 4."""
    engine, prompt = make("windows"), tokens(2, 201)
    serve(engine, request(prompt, max_tokens=1))
    pages = engine.cache.tree.windows[2]
    pages.evict(kept)
    for parting in (60, 120, 200):
        other = request([*prompt[:parting], *tokens(9, 30)], max_tokens=1)
        found = engine.cache.find(other)
        count = found.length // 4
        whole = (parting - 1) // 4
        assert count == (whole if whole - SHOWN[2] >= kept else 0)


@pytest.mark.parametrize("cut", range(9))
def test_truncated_output_leaves_reusable_window_pages(cut):
    """The last two full pages of an output are ends of prefixes."""
    engine = make("windows", overlap=2)
    one = request(tokens(9, 100), max_tokens=200, stop_token_ids=())
    engine.add(one)
    while len(one.output) < 100:
        checked_step(engine)
    whole = (one.length - 1) // 4
    engine.finish(one.request_id, len(one.output) - cut)
    while engine.busy:
        checked_step(engine)
    later = request([*one.prompt, *one.output, *tokens(10, 10)])
    serve(engine, later)
    same = (len(one.prompt) + len(one.output) - 1) // 4  # keys contain the next token
    assert later.cached_tokens == 4 * same if same >= whole - 1 else later.cached_tokens <= 100


def test_window_pages_evicted_in_lru_order():
    engine = make("windows")
    prompts = [tokens(20 + n, 61) for n in range(3)]
    for prompt in prompts:
        serve(engine, request(prompt, max_tokens=1))
    serve(engine, request(prompts[0], max_tokens=1))  # its last window is used again
    windows = engine.cache.tree.windows[2]
    windows.evict(15 - SHOWN[2] + 15)  # the start of the first prompt, and all of the second
    found = [engine.cache.find(request(prompt, max_tokens=1)).length for prompt in prompts]
    assert found == [60, 0, 60]


def test_failed_request_caches_no_window_pages():
    engine, begin = make("windows"), tokens(4, 129)
    serve(engine, request(begin, max_tokens=1))
    before = [each.check([*engine.cache.tree.nodes()]) for each in engine.cache.tree.windows]
    failing = request([*begin, *tokens(5, 30), POISON, *tokens(6, 10)])
    outcome = drive(engine, [failing])[failing.request_id]
    assert outcome.finish_reason is FinishReason.ERROR
    after = [each.check([*engine.cache.tree.nodes()]) for each in engine.cache.tree.windows]
    assert before == after


def test_pages_of_running_request_not_evicted():
    engine = make("windows", overlap=0)
    serve(engine, request(tokens(3, 100), max_tokens=1))
    one = request(tokens(3, 100), max_tokens=30, stop_token_ids=())
    engine.add(one)
    while len(one.output) < 2:
        checked_step(engine)
    held = window_pages(engine.allocator, one.slot)
    for cached in engine.cache.tree.windows:
        cached.evict(1000)
        assert cached.num_evictable == 0
    engine.cache.check(engine.scheduler.running)
    assert held == window_pages(engine.allocator, one.slot)
    while engine.busy:
        checked_step(engine)


def test_plan_contains_page_table_of_each_pool():
    """A plan with the rows of the plan before has the tables of its own time."""
    pools = tuple(WindowPool(window, 60) for window in WINDOWS)
    house = House(toy_capacity(num_pages=90, num_slots=5, overlap=1, window_pools=pools))
    asked, shape = [house.request(40, 44) for _ in range(2)], TreeShape.chain(3, 2)
    for length in (0, 40, 44):
        for each in asked:
            house.allocator.free_outside_window(each.slot, length)
        plan = house.planner.plan(ScheduledRows.decode(asked, shape))
        assert plan.window_page_tables.shape == (3, *plan.page_table.shape)
        assert np.shares_memory(plan.window_page_tables, plan.buffer)
        for pool, table in zip(house.allocator.pools, plan.page_tables, strict=True):
            rows = pool.page_table[plan.slots, : table.shape[1]]
            np.testing.assert_array_equal(table, rows)


def test_plan_without_window_pools_has_no_tables():
    engine = make("head")
    program = engine.allocator.capacity.programs[0]
    assert "window_page_tables" not in plan_layout(program, engine.allocator.capacity).fields
    plan = empty_plan(program, engine.allocator.capacity)
    assert plan.window_page_tables is None
    assert plan.page_tables == [plan.page_table]


def test_model_without_windows_frees_no_page(monkeypatch):
    def never(*_):
        raise AssertionError("a model without windows has no window pool")

    monkeypatch.setattr(PagePool, "free_outside_window", never)
    serve(make("head"), request(tokens(1, 150), max_tokens=40))


def test_window_pages_of_positions_are_consecutive():
    """Each pool has a page for each visible position, in the column of `page_table`."""
    engine = make("windows", overlap=0)
    one = request(tokens(1, 300), max_tokens=30, stop_token_ids=())
    engine.add(one)
    while engine.busy:
        checked_step(engine)
        for pool in engine.allocator.windows if one.slot else ():
            columns = np.flatnonzero(pool.page_table[one.slot])
            assert all(after == before + 1 for before, after in pairwise(columns.tolist()))
            assert columns.size == pool.num_held(one.slot)
