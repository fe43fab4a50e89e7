"""Adapter slots: eviction, waiting requests, loads and removals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shared.boundary.adapter_pool import AdapterPoolSpec
from shared.engine.adapter_slots import MOST_OVERTAKEN, AdapterSlots, HostAdapter
from shared.engine.request import AdapterVersion, InvalidRequestError, Request, SamplingParams
from shared.models.lora_shapes import AdapterShapes
from shared.models.parameter import CheckpointTensor, Parameter
from tests.support.toy_backend import toy_capacity

TENSOR = CheckpointTensor("x.weight", (4, 6))
PARAMETER = Parameter("mlp.down", (2, 4, 6), ((TENSOR,), (TENSOR,)), stacked=True)


def slots_of(num_slots: int, *names: str) -> AdapterSlots:
    """Slots of a pool with two load steps per adapter."""
    pool = AdapterPoolSpec(num_slots, (AdapterShapes(PARAMETER, 16),), "float32", step_bytes=1)
    capacity = replace(toy_capacity(num_pages=9, num_slots=5, overlap=0), adapters=pool)
    return AdapterSlots(capacity, [adapter(name, pool) for name in names])


def adapter(name: str, pool: AdapterPoolSpec, version: str = "1") -> HostAdapter:
    value = sum(name.encode())
    words = [np.full(pool.num_words(program), value, np.int32) for program in pool.programs]
    return HostAdapter(AdapterVersion(name, version), f"/{name}", tuple(words))


def request(slots: AdapterSlots, number: int, name: str) -> Request:
    made = Request(request_id=number, prompt=(1,), sampling=SamplingParams(lora=name))
    made.adapter = slots.find(name) if name else None
    slots.join(made)
    return made


def acquire(slots: AdapterSlots, each: Request) -> list[tuple[int, int]]:
    """Acquires a slot; returns the slot and the value of each load step."""
    assert slots.has_room_for(each)
    slots.acquire(each)
    was_ready, loads = slots.is_ready(each), submitted(slots)
    assert was_ready is not bool(loads)
    return loads


def submitted(slots: AdapterSlots) -> list[tuple[int, int]]:
    found = []
    while (plan := slots.next_step()) is not None:
        assert (plan.work.words == plan.work.words[0]).all()
        found.append((int(plan.adapters[0]), int(plan.work.words[0])))
    return found


def end(slots: AdapterSlots, each: Request) -> None:
    slots.release(each)
    slots.leave(each)


def test_slot_is_written_once_and_shared() -> None:
    slots = slots_of(2, "a", "b")
    first, second, base = (request(slots, i, name) for i, name in enumerate(("a", "a", "")))
    slots.acquire(first)
    assert not slots.is_ready(first)
    assert submitted(slots) == [(1, ord("a"))] * 2
    assert slots.is_ready(first)
    assert acquire(slots, second) == acquire(slots, base) == []
    assert (first.adapter_slot, second.adapter_slot, base.adapter_slot) == (1, 1, 0)


def test_least_recently_used_slot_is_evicted() -> None:
    slots = slots_of(2, "a", "b", "c")
    a, b = request(slots, 0, "a"), request(slots, 1, "b")
    slots.acquire(a), slots.acquire(b), submitted(slots)
    c = request(slots, 2, "c")
    assert not slots.has_room_for(c)
    end(slots, b), end(slots, a)
    slots.acquire(c)
    assert submitted(slots) == [(2, ord("c"))] * 2
    again = request(slots, 3, "a")
    slots.acquire(again)
    assert submitted(slots) == []
    assert not slots.has_room_for(request(slots, 4, "b"))


def test_overtaken_request_gets_reserved_slot() -> None:
    slots = slots_of(1, "a", "b")
    running = request(slots, 0, "a")
    slots.acquire(running), submitted(slots)
    waits = request(slots, 1, "b")
    for number in range(MOST_OVERTAKEN):
        later = request(slots, 2 + number, "a")
        assert slots.has_room_for(later)
        slots.acquire(later)
        slots.overtake(waits)
        end(slots, later)
    assert not slots.has_room_for(request(slots, 90, "a"))
    assert not slots.has_room_for(waits)
    end(slots, running)
    assert not slots.has_room_for(request(slots, 91, "a"))
    slots.acquire(waits)
    assert submitted(slots) == [(1, ord("b"))] * 2


def test_aborted_waiting_request_frees_reservation() -> None:
    slots = slots_of(1, "a", "b")
    running, waits = request(slots, 0, "a"), request(slots, 1, "b")
    slots.acquire(running), submitted(slots)
    for _ in range(MOST_OVERTAKEN):
        slots.overtake(waits)
    assert not slots.has_room_for(request(slots, 2, "a"))
    slots.leave(waits)
    assert slots.has_room_for(request(slots, 3, "a"))


def test_unfinished_load_of_aborted_request_is_dropped() -> None:
    slots = slots_of(1, "a")
    first = request(slots, 0, "a")
    slots.acquire(first)
    assert slots.next_step() is not None
    end(slots, first)
    assert slots.next_step() is None
    slots.acquire(request(slots, 1, "a"))
    assert len(submitted(slots)) == 2


def test_adapter_name_with_other_files_raises() -> None:
    slots = slots_of(1, "a")
    pool = AdapterPoolSpec(1, (AdapterShapes(PARAMETER, 16),), "float32")
    slots.add(adapter("a", pool))
    with pytest.raises(InvalidRequestError, match="loaded with other files; unload it first"):
        slots.add(adapter("a", pool, "2"))
    slots.remove("a")
    slots.add(adapter("a", pool, "2"))
    assert slots.find("a").version == "2"
    with pytest.raises(InvalidRequestError, match="'b' is not loaded"):
        slots.remove("b")


def test_removal_waits_for_requests() -> None:
    slots = slots_of(1, "a", "b")
    runs, waits = request(slots, 0, "a"), request(slots, 1, "a")
    slots.acquire(runs), submitted(slots)
    slots.remove("a")
    assert not slots.is_removed("a")
    assert "a" not in slots.folders
    with pytest.raises(InvalidRequestError, match="'a' is not loaded"):
        slots.find("a")
    pool = AdapterPoolSpec(1, (AdapterShapes(PARAMETER, 16),), "float32")
    with pytest.raises(InvalidRequestError, match="is being unloaded"):
        slots.add(adapter("a", pool))
    end(slots, runs)
    assert not slots.is_removed("a")
    assert acquire(slots, waits) == []
    end(slots, waits)
    assert slots.is_removed("a")
    slots.acquire(request(slots, 2, "b"))
    assert submitted(slots) == [(1, ord("b"))] * 2
