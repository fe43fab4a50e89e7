"""Waiting queue: requests without a slot, in the order in which they receive one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from shared.engine.request import Request

MOST_OVERTAKEN = 8
"""Requests of higher priority that may overtake the head of a priority level; then it is next. The
first request of a level therefore waits for at most 8 slots, plus one for each other waiting level,
if there are at most 8 of these; a request after n others waits for at most n + 1 times that number.
"""


class WaitingQueue:
    """Queue by priority, then by arrival, without starvation.

    Lower numbers are higher priorities, as in vLLM.
    """

    def __init__(self) -> None:
        self._levels: dict[int, deque[Request]] = {}
        self._overtaken: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __iter__(self) -> Iterator[Request]:
        """Yields all requests by priority."""
        for priority in sorted(self._levels):
            yield from self._levels[priority]

    def append(self, request: Request) -> None:
        """Appends a new request to its priority level."""
        self._level(request).append(request)

    def return_to_front(self, request: Request) -> None:
        """Puts a preempted request first in its priority level, because it is the oldest there."""
        self._level(request).appendleft(request)

    def head(self) -> Request | None:
        """Returns the next request; None if the queue is empty."""
        return next(self.in_turn(), None)

    def in_turn(self) -> Iterator[Request]:
        """Yields all requests in the order in which they are next."""
        due = [x for x in sorted(self._levels) if self._overtaken[x] >= MOST_OVERTAKEN]
        for priority in (*due, *(x for x in sorted(self._levels) if x not in due)):
            yield from self._levels[priority]

    def take(self, request: Request) -> None:
        """Removes a request that receives a slot, and counts it as overtaking lower priorities.

        A request that is next because it was overtaken gets the highest priority from then on;
        otherwise it would be the first to be preempted by those that overtook it.
        """
        priority, best = request.priority, min(self._levels)
        for worse in self._levels:
            self._overtaken[worse] += worse > priority
        if request is self._levels[priority][0]:
            self._overtaken[priority] = 0
        self.remove(request)
        request.priority = best

    def remove(self, request: Request) -> None:
        """Removes a request that will not receive a slot."""
        self._levels[request.priority].remove(request)
        self._drop_empty(request.priority)

    def _level(self, request: Request) -> deque[Request]:
        self._overtaken.setdefault(request.priority, 0)
        return self._levels.setdefault(request.priority, deque())

    def _drop_empty(self, priority: int) -> None:
        if not self._levels[priority]:
            del self._levels[priority], self._overtaken[priority]
