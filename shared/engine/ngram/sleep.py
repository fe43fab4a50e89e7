"""When an NGRAM controller falls asleep, and how often it then sees whether to draft again.

Making trees and weighing them without drafting is a *look*. Looks take time, so they have a budget.
"""

from __future__ import annotations

import statistics

LOOK_SHARE, LEAST_LOOK_SECONDS = 0.02, 5e-5
"""The share of the time asleep that looks may take, and the least that one is taken to last."""

GAIN_SHARE = 0.2
"""The share of the time saved by drafts that goes to more looks."""

MOST_LOOKS, MOST_DEBT = 32, 4
"""The budget never holds more than this many looks, nor owes more."""

PATIENCE = 4
"""What to fall asleep and wake again costs, in times that a plain step waits: so much may be lost
on poor trees, and be expected to be lost until a good one, before it falls asleep."""

MEMORY = 16
"""Trees over which it is learnt what a poor one loses, and how soon a good one follows."""

SMOOTHING = 0.1
"""Weight of the newest look in the running mean of what one takes."""

MEDIAN_OF = 8
"""Steps asleep of whose times the median is taken: a single one says little."""


class Sleep:
    """The budget of looks, the patience with poor trees, and what steps asleep take.

    A look follows a step asleep as soon as the budget covers it. The budget grows by a small share
    of the time asleep and by a larger share of the time that drafts save, so that looks are
    frequent where drafts pay. The time that drafting steps lose is taken from it.

    To fall asleep and wake again costs waits, and what the trees in between would have saved. So a
    poor tree is borne where the next good one is near, as it was after those before.
    """

    def __init__(self) -> None:
        self._look_s = LEAST_LOOK_SECONDS
        self._budget_s = MOST_LOOKS * self._look_s
        self._patience, self._after_poor = 0.0, False
        self._loss, self._good_after_poor = 1.0, 0.5
        self._times: dict[int, list[float]] = {}

    def pays(self, saved: float, wait: float, is_asleep: bool) -> bool:
        """Whether to draft now.

        Args:
          saved: What the step that drafts best is expected to save, in plain steps asleep.
          wait: By how much a plain step that waits takes longer, in the same.
        """
        is_good, most = saved > 0, PATIENCE * max(wait, 0.0)
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
        """Adds a step asleep of `step_s` to the budget; whether that now covers a look."""
        self._add(LOOK_SHARE * step_s)
        return self._budget_s >= self._look_s

    def gained(self, seconds: float) -> None:
        """Credits the time that a drafting step saved; negative if it was slower.

        What drafts lose is a debt that their gains repay in full, before a share of them counts.
        """
        repaid = min(max(-self._budget_s, 0.0), seconds)
        self._add(repaid + GAIN_SHARE * (seconds - repaid))

    def _add(self, seconds: float) -> None:
        """Within bounds; a long poor text may not keep it from ever looking again.

        What a look itself took is owed in full, however much that was.
        """
        most, least = MOST_LOOKS * self._look_s, -MOST_DEBT * self._look_s
        self._budget_s = min(max(self._budget_s + seconds, min(self._budget_s, least)), most)

    def looked(self, took_s: float) -> None:
        """Takes a look of so long from the budget."""
        took_s = max(took_s, LEAST_LOOK_SECONDS)
        self._budget_s -= took_s
        self._look_s += SMOOTHING * (took_s - self._look_s)

    def stepped(self, batch: int, seconds: float | None) -> float | None:
        """Notes what a step asleep of a batch bucket took; None is ignored.

        Returns:
          The median of the last ones of the bucket, once there are `MEDIAN_OF` new ones.
        """
        if seconds is None:
            return None
        times = self._times.setdefault(batch, [])
        times.append(seconds)
        return statistics.median(self._times.pop(batch)) if len(times) == MEDIAN_OF else None
