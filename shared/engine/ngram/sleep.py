"""How often an NGRAM controller that is asleep makes trees, to see whether to draft again.

Making trees and weighing them without drafting is a *look*. Looks take time, so they have a budget.
"""

from __future__ import annotations

import statistics

LOOK_SHARE, LEAST_LOOK_SECONDS = 0.02, 5e-5
"""The share of the time asleep that looks may take, and the least that one is taken to last."""

GAIN_SHARE = 0.2
"""The share of the time saved by drafts that goes to more looks."""

MOST_LOOKS = 32
"""The budget never holds more than this many looks."""

SMOOTHING = 0.1
"""Weight of the newest look in the running mean of what one takes."""


class Sleep:
    """The budget of looks, and what steps asleep take.

    A look follows a step asleep as soon as the budget covers it. The budget grows by a small share
    of the time asleep and by a larger share of the time that drafts save, so that looks are
    frequent where drafts pay. Steps in which drafts cost time shrink it.
    """

    def __init__(self) -> None:
        self._look_s = LEAST_LOOK_SECONDS
        self._budget_s = MOST_LOOKS * self._look_s
        self._times: dict[int, list[float]] = {}

    def is_due(self, step_s: float) -> bool:
        """Adds a step asleep of `step_s` to the budget; whether that now covers a look."""
        self._add(LOOK_SHARE * step_s)
        return self._budget_s >= self._look_s

    def gained(self, seconds: float) -> None:
        """Credits the time that a drafting step saved; negative if it was slower."""
        # A loss may empty the budget but not put it into debt; only an over-long look does that.
        self._add(max(GAIN_SHARE * seconds, -max(self._budget_s, 0.0)))

    def _add(self, seconds: float) -> None:
        self._budget_s = min(self._budget_s + seconds, MOST_LOOKS * self._look_s)

    def looked(self, took_s: float) -> None:
        """Takes a look of so long from the budget."""
        took_s = max(took_s, LEAST_LOOK_SECONDS)
        self._budget_s -= took_s
        self._look_s += SMOOTHING * (took_s - self._look_s)

    def stepped(self, batch: int, seconds: float | None) -> None:
        """Notes what a step asleep of a batch bucket took; None is ignored."""
        if seconds is not None:
            self._times.setdefault(batch, []).append(seconds)

    def take_seconds(self) -> dict[int, float]:
        """The median step asleep since the last call, by batch bucket."""
        times, self._times = self._times, {}
        return {batch: statistics.median(each) for batch, each in times.items()}
