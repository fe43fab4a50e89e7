"""When an adaptive choice that sleeps looks at the trees that it would draft."""

from __future__ import annotations

import math
import statistics

LOOK_SHARE, LEAST_LOOK_SECONDS = 0.02, 1e-4
"""Looks at trees take this share of the time asleep, and each so long at least."""

MOST_LOOKS = 16
"""Looks for which time can be put by."""

SMOOTHING = 0.1
"""Weight of the newest look in what one takes."""


class Sleep:
    """When to look at trees while plain steps follow each other, and what these take.

    A new text, or one that was waited for, is looked at with its next step, and after a look that
    finds nothing the next one comes after twice as many steps, until looks take their share of the
    time. Where steps are short the host's time is dear: there is no look before it is paid for.
    """

    def __init__(self) -> None:
        self._look_s = LEAST_LOOK_SECONDS
        self._put_by = MOST_LOOKS * self._look_s
        self._times: dict[int, list[float]] = {}
        self._gap = self._left = 1

    def hasten(self) -> None:
        """There is a text to look at."""
        self._gap = self._left = 1

    def is_due(self, step_s: float) -> bool:
        """Whether a look follows the step that was submitted, and takes so long."""
        self._left -= 1
        self._put_by = min(self._put_by + LOOK_SHARE * step_s, MOST_LOOKS * self._look_s)
        return self._left <= 0 and self._put_by >= self._look_s

    def looked(self, took_s: float, step_s: float) -> None:
        """A look found nothing to wake for."""
        took_s = max(took_s, LEAST_LOOK_SECONDS)
        self._put_by -= took_s
        self._look_s += SMOOTHING * (took_s - self._look_s)
        most = math.ceil(self._look_s / (LOOK_SHARE * step_s))
        self._gap = self._left = min(2 * self._gap, most)

    def stepped(self, batch: int, seconds: float | None) -> None:
        """A step of a batch bucket took so long; None says nothing."""
        if seconds is not None:
            self._times.setdefault(batch, []).append(seconds)

    def take_seconds(self) -> dict[int, float]:
        """What steps took since this was asked for, by batch bucket."""
        times, self._times = self._times, {}
        return {batch: statistics.median(each) for batch, each in times.items()}
