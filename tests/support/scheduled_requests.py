"""A planner and requests that have slots and pages."""

from shared.boundary.backend import BackendLimits
from shared.engine.allocator import Allocator
from shared.engine.planner import Planner
from shared.engine.request import Request, SamplingParams


class House:
    """A planner and requests that have slots and pages."""

    def __init__(self, capacity: BackendLimits) -> None:
        self.capacity, self.allocator = capacity, Allocator(capacity)
        self.planner = Planner(capacity, self.allocator)

    def request(self, num_prompt: int, positions: int, **sampling) -> Request:
        request = Request(
            request_id=0,
            prompt=tuple(range(1, num_prompt + 1)),
            sampling=SamplingParams(**sampling),
        )
        self.place(request, positions)
        return request

    def place(self, request: Request, positions: int, first_position: int = 0) -> None:
        request.assign_slot(self.allocator.take_slot(), first_position)
        assert self.allocator.reserve(request.slot, positions)
        self.planner.write_request_row(request)
        request.prefill(request.prefill_length)
