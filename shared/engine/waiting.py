"""The requests that have no slot, in the order in which they will get one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from shared.engine.request import Request

MOST_OVERTAKEN = 8
"""Requests of better priority that get a slot while one waits at the head of its own; then it is
its turn. So the first of a priority waits for at most 8 slots and one for each other priority that
waits, where these are 8 or fewer, and one behind n others for at most n + 1 times as many."""


class WaitingQueue:
    """Better priorities first, and the order of arrival within one; none starves.

    A priority is a number, and lower ones are better, as vLLM has it.
    """

    def __init__(self) -> None:
        self._levels: dict[int, deque[Request]] = {}
        self._overtaken: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __iter__(self) -> Iterator[Request]:
        """All of them, by priority."""
        for priority in sorted(self._levels):
            yield from self._levels[priority]

    def append(self, request: Request) -> None:
        """Puts a new request behind all of its priority."""
        self._level(request).append(request)

    def return_to_front(self, request: Request) -> None:
        """A request comes back that had a slot: it is older than all that wait in its priority."""
        self._level(request).appendleft(request)

    def head(self) -> Request | None:
        """Whose turn it is; None where nobody waits."""
        if not self._levels:
            return None
        return self._levels[self._next_priority()][0]

    def pop(self) -> Request:
        """Takes out the head, which gets a slot; worse priorities were overtaken by it.

        One whose turn it is because it was overtaken is of the best priority from then on, or it
        would be the first to give way to those that overtook it.
        """
        priority, best = self._next_priority(), min(self._levels)
        for worse in self._levels:
            self._overtaken[worse] += worse > priority
        self._overtaken[priority] = 0
        request = self._levels[priority].popleft()
        self._drop_empty(priority)
        request.priority = best
        return request

    def remove(self, request: Request) -> None:
        """Takes out a request that will not get a slot."""
        self._levels[request.priority].remove(request)
        self._drop_empty(request.priority)

    def _next_priority(self) -> int:
        due = [level for level in self._levels if self._overtaken[level] >= MOST_OVERTAKEN]
        return min(due or self._levels)

    def _level(self, request: Request) -> deque[Request]:
        self._overtaken.setdefault(request.priority, 0)
        return self._levels.setdefault(request.priority, deque())

    def _drop_empty(self, priority: int) -> None:
        if not self._levels[priority]:
            del self._levels[priority], self._overtaken[priority]
