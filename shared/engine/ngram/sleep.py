"""When an adaptive choice that sleeps looks at the trees that it would draft."""

from __future__ import annotations

import statistics

LOOK_SHARE, LEAST_LOOK_SECONDS = 0.02, 5e-5
"""Looks at trees may take this share of the time asleep, and each takes so long at least."""

GAIN_SHARE = 0.2
"""Of the seconds that drafts gain, those that pay for more looks."""

MOST_LOOKS = 32
"""Looks for which time can be put by."""

SMOOTHING = 0.1
"""Weight of the newest look in what one takes."""


class Sleep:
    """When to look at trees while plain steps follow each other, and what these take.

    There is a look as soon as it is paid for: by a small share of the time asleep, and by a larger
    one of what drafts gain, so that it is often done where it is worth doing. What drafts lose is
    taken away from it.
    """

    def __init__(self) -> None:
        self._look_s = LEAST_LOOK_SECONDS
        self._put_by = MOST_LOOKS * self._look_s
        self._times: dict[int, list[float]] = {}

    def is_due(self, step_s: float) -> bool:
        """Whether a look follows the step that was submitted, and takes so long."""
        self._put(LOOK_SHARE * step_s)
        return self._put_by >= self._look_s

    def gained(self, seconds: float) -> None:
        """What a step saved that waited, beside plain steps; negative: what it lost."""
        # Not more than there is: what a look took too long is all that is paid back.
        self._put(max(GAIN_SHARE * seconds, -max(self._put_by, 0.0)))

    def _put(self, seconds: float) -> None:
        self._put_by = min(self._put_by + seconds, MOST_LOOKS * self._look_s)

    def looked(self, took_s: float) -> None:
        """A look took so long."""
        took_s = max(took_s, LEAST_LOOK_SECONDS)
        self._put_by -= took_s
        self._look_s += SMOOTHING * (took_s - self._look_s)

    def stepped(self, batch: int, seconds: float | None) -> None:
        """A step of a batch bucket took so long; None says nothing."""
        if seconds is not None:
            self._times.setdefault(batch, []).append(seconds)

    def take_seconds(self) -> dict[int, float]:
        """What steps took since this was asked for, by batch bucket."""
        times, self._times = self._times, {}
        return {batch: statistics.median(each) for batch, each in times.items()}
