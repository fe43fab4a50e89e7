"""Seconds of a decode step, by batch bucket and tier: measured at the start, then followed.

For each bucket a Kalman filter follows by how much each tier takes longer than at the start. Most
changes move all tiers: by the same time, as contexts grow, or by the same share, as a clock falls.
So a tier that runs also tells of those that do not. Each tier has an error of its own too, which
only its own steps show. Steps that wait for each other share the host's time between them; plain
steps that do not wait show nothing of it, and the start did not measure all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

OWN_ERROR = 0.1
"""Standard deviation of a tier's own error in the table, as a share of a plain step."""

SHARED_WALK, OWN_WALK = 0.007, 0.001
"""Standard deviation of a step's change: of all tiers, by time and by share, and of one."""

WAITING_ERROR, WAITING_WALK = 0.3, 0.01
"""The same of the tiers that wait together, at the start and by step, where one does not."""

NOISE = 0.1
"""Standard deviation of one measured step, as a share of it."""

MOST_SIGMAS = 2.5
"""A step that differs by more counts as one that differs by so much: one slow step says little."""

LEAST_SHARE = 0.3
"""A step is never believed to take less than this share of its seconds at the start."""


class _Bucket:
    """One batch bucket."""

    def __init__(self, seconds: Sequence[float], last_waits: bool) -> None:
        self.first = np.array(seconds)
        self._plain, count = float(seconds[0]), len(seconds)
        self._excess = np.zeros(count)
        shares, each = self.first / self._plain, np.eye(count)
        waiting = np.ones((count, count)) if not last_waits else np.zeros((count, count))
        waiting[-1], waiting[:, -1] = 0, 0
        errors = each * OWN_ERROR**2 + waiting * WAITING_ERROR**2
        shared = (1 + np.outer(shares, shares)) * SHARED_WALK**2
        walk = shared + each * OWN_WALK**2 + waiting * WAITING_WALK**2
        self._errors, self._walk = errors * self._plain**2, walk * self._plain**2
        self.seconds: list[float] = self.first.tolist()

    def observe(self, tier: int, seconds: float) -> None:
        errors = self._errors + self._walk
        column = errors[:, tier]
        variance = column[tier] + (NOISE * self.seconds[tier]) ** 2
        most = MOST_SIGMAS * variance**0.5
        error = min(max(seconds - self.seconds[tier], -most), most)
        self._excess = self._excess + column * (error / variance)
        self._errors = errors - column[:, None] * (column / variance)
        now = np.maximum(self.first + self._excess, LEAST_SHARE * self.first)
        self.seconds = now.tolist()


class Costs:
    """What a step costs.

    Args:
      table: Seconds at the start for each batch bucket, by tier; empty where nothing was measured.
      last_waits: Whether the last of them waits for the step before as the others do. Where nothing
        waits for the host, all do alike.
    """

    def __init__(self, table: Mapping[int, Sequence[float]], *, last_waits: bool) -> None:
        self._buckets = {batch: _Bucket(seconds, last_waits) for batch, seconds in table.items()}

    @property
    def table(self) -> Mapping[int, Sequence[float]]:
        """Seconds as they are believed now, for each batch bucket, by tier."""
        return {batch: bucket.seconds for batch, bucket in self._buckets.items()}

    def of(self, batch: int) -> list[float] | None:
        """Seconds of each tier in a batch bucket; None where they are not known."""
        bucket = self._buckets.get(batch)
        return None if bucket is None else bucket.seconds

    def observe(self, batch: int, tier: int, seconds: float | None) -> None:
        """A step took so long; None says nothing."""
        bucket = self._buckets.get(batch)
        if bucket is not None and seconds is not None and seconds > 0:
            bucket.observe(tier, seconds)
