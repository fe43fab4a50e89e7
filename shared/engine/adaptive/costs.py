"""Seconds of a decode step, by batch bucket and tier: measured at the start, then followed.

A bucket has a vector: by how much each tier takes longer now than it did at the start. Most of what
moves it moves all tiers, as much (contexts grow) or in proportion (a clock falls), so a tier that
runs tells of those that do not; and each has an error of its own, of which only its own steps tell.
Steps that wait for each other share what the host does between them, of which steps that follow
each other show nothing, and which the start did not measure whole. All are random walks, and the
vector is followed by a Kalman filter: the covariance of two tiers is what they share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

OWN_ERROR = 0.1
"""Standard deviation of a tier's own error in the table, as a share of a plain step."""

SHARED_WALK, OWN_WALK = 0.007, 0.001
"""Of what moves all tiers, as much or in proportion, and of what moves one, from step to step."""

WAITING_ERROR, WAITING_WALK = 0.3, 0.01
"""Of what moves the tiers that wait, where there is one that does not."""

NOISE = 0.1
"""Of one measured step, as a share of it."""

MOST_SIGMAS = 2.5
"""A step that differs by more counts as one that differs by so much: a hiccup is no news."""

LEAST_SHARE = 0.3
"""Of its seconds at the start, the least that a step is believed to take."""


class _Bucket:
    """One batch bucket."""

    def __init__(self, seconds: Sequence[float], last_waits: bool) -> None:
        self.first = np.array(seconds)
        self._plain, count = float(seconds[0]), len(seconds)
        self._excess = np.zeros(count)
        shares, own = self.first / self._plain, np.eye(count)
        waiting = np.ones((count, count)) if not last_waits else np.zeros((count, count))
        waiting[-1], waiting[:, -1] = 0, 0
        errors = own * OWN_ERROR**2 + waiting * WAITING_ERROR**2
        shared = (1 + np.outer(shares, shares)) * SHARED_WALK**2
        walk = shared + own * OWN_WALK**2 + waiting * WAITING_WALK**2
        self._errors, self._walk = errors * self._plain**2, walk * self._plain**2
        self.seconds: list[float] = self.first.tolist()

    def observe(self, tier: int, seconds: float) -> None:
        errors = self._errors + self._walk
        column = errors[:, tier]
        variance = column[tier] + (NOISE * self.seconds[tier]) ** 2
        most = MOST_SIGMAS * variance**0.5
        news = min(max(seconds - self.seconds[tier], -most), most)
        self._excess = self._excess + column * (news / variance)
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
