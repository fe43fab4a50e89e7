"""Exponential backoff: pauses drafting while it does not pay, and retries it."""

from __future__ import annotations

SHORTEST, LONGEST = 16, 256
"""Plain steps of the shortest and the longest pause; each consecutive pause is twice as long."""

PAID_STEPS = 64
"""Steps with profitable drafts after which the next pause is the shortest again."""


class Backoff:
    """Counter of plain steps.

    Without drafting, nothing shows whether draft tokens would be accepted. Drafting is therefore
    retried when a pause ends, less often the longer it has not paid, so that a trial of some steps
    takes a small fraction of the time.

    Attributes:
      left: Plain steps until the next trial; 0 while drafting.
    """

    def __init__(self) -> None:
        self.left = 0
        self._next, self._paid = SHORTEST, 0

    def begin(self) -> None:
        """Starts a pause after drafting did not pay."""
        self.left, self._next = self._next, min(2 * self._next, LONGEST)
        self._paid = 0

    def on_plain_step(self) -> bool:
        """Counts a plain step; returns True if it is the last of the pause."""
        self.left -= 1
        return self.left == 0

    def on_success(self) -> None:
        """Counts a step whose drafts are expected to pay; ends a pause."""
        self.left, self._paid = 0, self._paid + 1
        if self._paid >= PAID_STEPS:
            self._next = SHORTEST
