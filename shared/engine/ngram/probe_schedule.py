"""Probe schedule of adaptive NGRAM: when drafting is disabled, and how often it is probed.

A probe builds and scores draft trees without verifying them. The time spent on probes is limited by
a budget.
"""

from __future__ import annotations

import statistics

MAX_DEBT_PROBES, LEAST_LOOK_SECONDS = 0.02, 5e-5
"""Fraction of the time with drafting disabled that probes may take, and the minimum assumed
duration of one."""

GAIN_SHARE = 0.2
"""Fraction of the time saved by drafts that is added to the probe budget."""

MOST_LOOKS, MOST_DEBT = 32, 4
"""Bounds of the budget, positive and negative, in probes."""

PROBE_TIME_FRACTION = 4
"""Cost of disabling and enabling drafting, in multiples of a plain step's wait: the loss on poor
trees, past and expected until the next good one, that is tolerated before drafting is disabled."""

MEMORY = 16
"""Trees over which the loss of poor ones, and the frequency of good ones after them, are
averaged."""

SMOOTHING = 0.1
"""Weight of the newest probe in the running mean of their duration."""

MEDIAN_OF = 8
"""Plain steps per median of their times, because single times are noisy."""


class ProbeSchedule:
    """Probe budget, tolerance of poor trees, and times of plain steps with drafting disabled.

    A probe follows a plain step as soon as the budget covers it. The budget grows by a small
    fraction of the time with drafting disabled, and by a larger fraction of the time that drafts
    save, so that probes are frequent where drafts pay. The time that drafting steps lose is
    subtracted.

    Disabling and enabling drafting costs waits, and the savings of the trees in between. A poor
    tree is therefore tolerated if a good one is likely to follow soon, judged by earlier poor
    trees.
    """

    def __init__(self) -> None:
        self._look_s = LEAST_LOOK_SECONDS
        self._budget_s = MOST_LOOKS * self._look_s
        self._patience, self._after_poor = 0.0, False
        self._loss, self._good_after_poor = 1.0, 0.5
        self._times: dict[int, list[float]] = {}

    def should_draft(self, saved: float, wait: float, is_asleep: bool) -> bool:
        """Returns True if drafting should be enabled now.

        Args:
          saved: Expected saving of the best drafting step, in plain steps without waiting.
          wait: Additional time of a plain step that waits, in the same unit.
          is_asleep: True if drafting is disabled.
        """
        is_good, most = saved > 0, PROBE_TIME_FRACTION * max(wait, 0.0)
        if self._after_poor:
            self._good_after_poor += (is_good - self._good_after_poor) / MEMORY
        if not is_good:
            self._loss += (-saved - self._loss) / MEMORY
        self._after_poor = not is_good
        self._patience = most if is_asleep else min(self._patience + saved, most)
        if is_asleep or is_good:
            return is_good
        return self._patience > 0 and self._loss < most * self._good_after_poor

    def is_due(self, step_s: float) -> bool:
        """Adds a plain step of `step_s` to the budget; returns True if it covers a probe now."""
        self._add(MAX_DEBT_PROBES * step_s)
        return self._budget_s >= self._look_s

    def on_gain(self, seconds: float) -> None:
        """Credits the time that a drafting step saved; negative if it was slower.

        Losses are a debt that gains repay in full, before a fraction of them counts.
        """
        repaid = min(max(-self._budget_s, 0.0), seconds)
        self._add(repaid + GAIN_SHARE * (seconds - repaid))

    def _add(self, seconds: float) -> None:
        """Changes the budget within bounds, so that a long poor output cannot prevent probes
        forever.

        The time of a probe itself is subtracted in full.
        """
        most, least = MOST_LOOKS * self._look_s, -MOST_DEBT * self._look_s
        self._budget_s = min(max(self._budget_s + seconds, min(self._budget_s, least)), most)

    def on_probe(self, took_s: float) -> None:
        """Subtracts the time of a probe from the budget."""
        took_s = max(took_s, LEAST_LOOK_SECONDS)
        self._budget_s -= took_s
        self._look_s += SMOOTHING * (took_s - self._look_s)

    def on_step(self, batch: int, seconds: float | None) -> float | None:
        """Records the time of a plain step of a batch bucket; None is ignored.

        Returns:
          The median of the last `MEDIAN_OF` steps of the bucket, after `MEDIAN_OF` new steps.
        """
        if seconds is None:
            return None
        times = self._times.setdefault(batch, [])
        times.append(seconds)
        return statistics.median(self._times.pop(batch)) if len(times) == MEDIAN_OF else None
