"""Seconds of a decode step, by its requests and tier: measured at the start, then followed.

A program's rows take as long in a dense model whether they are requests or padding. In a mixture of
experts padding reads no experts, and each request that comes in reads some more: there a bucket is
measured with its fewest requests too, and between two such numbers seconds lie on a line.

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
    """One batch bucket.

    Args:
      table: Seconds at the start by tier, for each number of requests that was measured, ascending;
        the last fills the bucket.

    Attributes:
      sizes: These numbers.
    """

    def __init__(self, table: Mapping[int, Sequence[float]], last_waits: bool) -> None:
        self.sizes, self._first = list(table), np.array(list(table.values()))  # [sizes, tiers]
        full = self._first[-1]
        self._plain, count = float(full[0]), len(full)
        self._excess = np.zeros(count)
        shares, each = full / self._plain, np.eye(count)
        waiting = np.ones((count, count)) if not last_waits else np.zeros((count, count))
        waiting[-1], waiting[:, -1] = 0, 0
        errors = each * OWN_ERROR**2 + waiting * WAITING_ERROR**2
        shared = (1 + np.outer(shares, shares)) * SHARED_WALK**2
        walk = shared + each * OWN_WALK**2 + waiting * WAITING_WALK**2
        self._errors, self._walk = errors * self._plain**2, walk * self._plain**2

    def seconds(self, num_rows: int) -> list[float]:
        first = self._first[-1]
        if num_rows < self.sizes[-1] and len(self.sizes) > 1:
            first = np.array([np.interp(num_rows, self.sizes, each) for each in self._first.T])
        return np.maximum(first + self._excess, LEAST_SHARE * first).tolist()

    def observe(self, num_rows: int, tier: int, seconds: float) -> None:
        errors, believed = self._errors + self._walk, self.seconds(num_rows)[tier]
        column = errors[:, tier]
        variance = column[tier] + (NOISE * believed) ** 2
        most = MOST_SIGMAS * variance**0.5
        error = min(max(seconds - believed, -most), most)
        self._excess = self._excess + column * (error / variance)
        self._errors = errors - column[:, None] * (column / variance)


class Costs:
    """What a step costs.

    Args:
      table: Seconds at the start for each batch bucket, by tier; empty where nothing was measured.
        Other numbers of requests may stand beside them, and tell of the bucket that holds them.
      batches: The buckets, ascending.
      last_waits: Whether the last of them waits for the step before as the others do. Where nothing
        waits for the host, all do alike.
    """

    def __init__(
        self, table: Mapping[int, Sequence[float]], batches: Sequence[int], *, last_waits: bool
    ) -> None:
        self._buckets: dict[int, _Bucket] = {}
        for before, batch in zip((0, *batches), batches, strict=False):
            own = {count: table[count] for count in sorted(table) if before < count <= batch}
            if own:
                self._buckets[batch] = _Bucket(own, last_waits)

    @property
    def table(self) -> Mapping[int, Sequence[float]]:
        """Seconds as they are believed now, for each number of requests measured, by tier."""
        return {n: each.seconds(n) for each in self._buckets.values() for n in each.sizes}

    def of(self, batch: int, num_rows: int) -> list[float] | None:
        """Seconds of each tier with so many requests in a batch bucket; None: not known."""
        bucket = self._buckets.get(batch)
        return None if bucket is None else bucket.seconds(num_rows)

    def observe(self, batch: int, num_rows: int, tier: int, seconds: float | None) -> None:
        """A step of so many requests took so long; None says nothing."""
        bucket = self._buckets.get(batch)
        if bucket is not None and seconds is not None and seconds > 0:
            bucket.observe(num_rows, tier, seconds)
