"""How long nothing is drafted where drafts do not pay, before they are tried again."""

from __future__ import annotations

SHORTEST, LONGEST = 16, 256
"""Plain steps of a pause: each that follows upon another is twice as long."""

PAID_STEPS = 64
"""After so many steps with drafts that paid, the next pause is the shortest again."""


class Pause:
    """Counts plain steps.

    Nothing that is not drafted shows whether it would be accepted. So drafts are tried again when a
    pause ends, and the longer they have not paid the more seldom: a trial of some steps then costs
    little of the time.

    Attributes:
      left: Plain steps until the next trial; 0 where drafts are made.
    """

    def __init__(self) -> None:
        self.left = 0
        self._next, self._paid = SHORTEST, 0

    def begin(self) -> None:
        """Drafts have just not paid."""
        self.left, self._next = self._next, min(2 * self._next, LONGEST)
        self._paid = 0

    def passed(self) -> bool:
        """Counts a plain step; whether it is the last of the pause."""
        self.left -= 1
        return self.left == 0

    def paid(self) -> None:
        """Counts a step whose drafts are expected to pay, which ends a pause."""
        self.left, self._paid = 0, self._paid + 1
        if self._paid >= PAID_STEPS:
            self._next = SHORTEST
