"""LoRA adapters of an engine: their host copies, and the adapter slots of the device.

A running request holds the slot of its adapter. An adapter without a slot takes a free one, or the
least recently used one that no request holds. It is written by load steps before the first prefill
of the request. Steps take effect in the order of submission, so those in flight still read the
previous adapter.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from shared.boundary.adapter_pool import LoadAdapter
from shared.boundary.backend import BackendLimits, StepPlan
from shared.boundary.buffers import empty_plan
from shared.engine.request import AdapterVersion, InvalidRequestError, Request

MOST_OVERTAKEN = 8
"""Requests that may overtake one that waits for an adapter slot; then a slot is reserved for it."""


@dataclass(frozen=True)
class HostAdapter:
    """A LoRA adapter in host memory.

    Attributes:
      adapter: Its name and version.
      folder: Folder of its files.
      words: Words of each load step; see `AdapterPoolSpec.pack`.
      notes: Sentences on tensors that do not affect the text.
    """

    adapter: AdapterVersion
    folder: str
    words: tuple[Int32[np.ndarray, " words"], ...]
    notes: tuple[str, ...] = ()


@dataclass(eq=False)
class Slot:
    """An adapter slot of the device.

    Attributes:
      number: Its number, at least 1.
      held: The adapter in it; None for a free slot.
      num_users: Requests that hold it.
      steps: Load steps to submit.
      reserved_for: Request of another adapter that receives it next; None for none.
    """

    number: int
    held: HostAdapter | None = None
    num_users: int = 0
    steps: deque[int] = field(default_factory=deque)
    reserved_for: Request | None = None


class AdapterSlots:
    """Named LoRA adapters, and the adapter slots.

    Args:
      capacity: Limits of the backend.
      adapters: The adapters at the start.
    """

    def __init__(self, capacity: BackendLimits, adapters: Iterable[HostAdapter] = ()) -> None:
        pool = capacity.adapters
        self._capacity, self._programs = capacity, () if pool is None else pool.programs
        self._slots = [Slot(1 + i) for i in range(0 if pool is None else pool.num_slots)]
        self._adapters = {each.adapter.name: each for each in adapters}
        self._leaving: dict[str, HostAdapter] = {}
        self._num_requests = Counter[str]()
        self.num_loads = 0

    @property
    def has_slots(self) -> bool:
        """True if requests may have adapters."""
        return bool(self._slots)

    @property
    def num_held(self) -> int:
        """Holders of slots: running requests with an adapter."""
        return sum(slot.num_users for slot in self._slots)

    @property
    def folders(self) -> Mapping[str, str]:
        """Folder of each adapter by its name."""
        return {name: each.folder for name, each in self._adapters.items()}

    def find(self, name: str) -> AdapterVersion:
        """Returns an adapter.

        Raises:
          InvalidRequestError: There is none of this name.
        """
        if name not in self._adapters:
            raise InvalidRequestError("model", f"adapter {name!r:.200} is not loaded")
        return self._adapters[name].adapter

    def is_loaded(self, adapter: AdapterVersion) -> bool:
        """Returns True if new requests may use an adapter."""
        held = self._adapters.get(adapter.name)
        return held is not None and held.adapter == adapter

    def add(self, adapter: HostAdapter) -> None:
        """Adds an adapter; does nothing if it is there.

        Raises:
          InvalidRequestError: Another adapter has the name, or one of the name is being removed.
        """
        name = adapter.adapter.name
        if name in self._leaving:
            raise InvalidRequestError(
                "lora_name", f"adapter {name!r:.200} is being unloaded; try again later"
            )
        held = self._adapters.setdefault(name, adapter)
        if held.adapter != adapter.adapter:
            raise InvalidRequestError(
                "lora_name", f"adapter {name!r:.200} is loaded with other files; unload it first"
            )

    def remove(self, name: str) -> None:
        """Removes an adapter once its requests have ended; further ones are rejected.

        Raises:
          InvalidRequestError: There is none of this name.
        """
        if name not in self._adapters:
            raise InvalidRequestError("lora_name", f"adapter {name!r:.200} is not loaded")
        self._leaving[name] = self._adapters.pop(name)
        self._end_removal(name)

    def is_removed(self, name: str) -> bool:
        """Returns True once the removal of an adapter has ended."""
        return name not in self._leaving

    def join(self, request: Request) -> None:
        """Records a new request."""
        if request.adapter is not None:
            self._num_requests[request.adapter.name] += 1

    def leave(self, request: Request) -> None:
        """Records the end of a request that joined and holds no slot."""
        if request.adapter is None:
            return
        for slot in self._slots:
            if slot.reserved_for is request:
                slot.reserved_for = None
        self._num_requests[request.adapter.name] -= 1
        self._end_removal(request.adapter.name)

    def has_room_for(self, request: Request) -> bool:
        """Returns True if a request can hold a slot with its adapter now."""
        return request.adapter is None or self._slot_for(request) is not None

    def acquire(self, request: Request) -> None:
        """Makes a request hold a slot with its adapter; it must have room."""
        if request.adapter is None:
            return
        slot = self._slot_for(request)
        assert slot is not None, "the caller has checked that there is room"
        if slot.held is None or slot.held.adapter != request.adapter:
            slot.held = self.host_copy(request.adapter)
            slot.steps = deque(range(len(self._programs)))
            self.num_loads += 1
        slot.num_users += 1
        request.adapter_slot, request.num_overtaken = slot.number, 0
        for each in self._slots:
            if each.reserved_for is request:
                each.reserved_for = None
        self._touch(slot)

    def release(self, request: Request) -> None:
        """Makes a request hold its slot no longer; the adapter stays until the slot is needed."""
        if not request.adapter_slot:
            return
        slot = next(each for each in self._slots if each.number == request.adapter_slot)
        request.adapter_slot = 0
        slot.num_users -= 1
        if slot.steps and not slot.num_users:
            slot.held, slot.steps = None, deque()
        self._touch(slot)

    def is_ready(self, request: Request) -> bool:
        """Returns True if all load steps of a request's adapter are submitted."""
        return not any(x.steps for x in self._slots if x.number == request.adapter_slot)

    def overtake(self, request: Request) -> None:
        """Records that another request overtook one that has no room.

        After `MOST_OVERTAKEN` times the least recently used slot is reserved for it: its adapter
        gets no further requests, so that those that hold it end.
        """
        request.num_overtaken += 1
        is_reserved = any(slot.reserved_for is request for slot in self._slots)
        if request.num_overtaken < MOST_OVERTAKEN or is_reserved:
            return
        slot = next((slot for slot in self._slots if slot.reserved_for is None), None)
        if slot is not None:
            slot.reserved_for = request

    def next_step(self) -> StepPlan | None:
        """Returns the next load step to submit; None if there is none."""
        slot = next((slot for slot in self._slots if slot.steps), None)
        if slot is None:
            return None
        assert slot.held is not None
        number = slot.steps.popleft()
        plan = empty_plan(self._programs[number], self._capacity)
        assert isinstance(plan.work, LoadAdapter)
        assert plan.adapters is not None
        plan.work.words[:] = slot.held.words[number]
        plan.adapters[0] = slot.number
        return plan

    def _slot_for(self, request: Request) -> Slot | None:
        """Returns the slot of a request's adapter, or one that it may take."""
        for slot in self._slots:
            if slot.held is not None and slot.held.adapter == request.adapter:
                return slot if slot.reserved_for is None else None
        unused = (slot for slot in self._slots if not slot.num_users)
        return next((slot for slot in unused if slot.reserved_for in (None, request)), None)

    def host_copy(self, adapter: AdapterVersion) -> HostAdapter:
        """Returns the host copy of an adapter of a request."""
        return self._adapters.get(adapter.name) or self._leaving[adapter.name]

    def _touch(self, slot: Slot) -> None:
        """Makes a slot the most recently used; free ones come first."""
        self._slots.remove(slot)
        self._slots.insert(0 if slot.held is None else len(self._slots), slot)

    def _end_removal(self, name: str) -> None:
        if name not in self._leaving or self._num_requests[name]:
            return
        for slot in tuple(self._slots):
            if slot.held is self._leaving[name]:
                assert not slot.num_users
                slot.held = None
                self._touch(slot)
        del self._leaving[name], self._num_requests[name]
