"""Step costs: time of a decode step by number of requests and tier, measured at startup and
tracked.

In a dense model a program takes the same time for requests and padding rows. In an MoE model
padding reads no experts and each further request reads more. A bucket is therefore also measured
with its fewest requests, and times between two measurements are interpolated linearly.

For each bucket a Kalman filter tracks the change of each tier's time since startup. Most changes
affect all tiers: by the same time, as contexts grow, or by the same fraction, as a clock rate
falls. A tier that runs therefore also updates the others. Each tier has its own error too, which
only its own steps show. Tiers that wait for the previous step share the host's time, which plain
steps with overlap do not show and the startup measures only in part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float64

from shared.engine.jit import compiled

OWN_ERROR = 0.1
"""Standard deviation of a tier's own error in the table, as a fraction of a plain step."""

SHARED_WALK, OWN_WALK = 0.007, 0.001
"""Standard deviation of the change per step: of all tiers, by time and by fraction, and of one
tier."""

WAITING_ERROR, WAITING_WALK = 0.3, 0.01
"""The same for tiers that wait for the previous step, at startup and per step, if one does not
wait."""

NOISE = 0.1
"""Standard deviation of one measured step, as a fraction of its time."""

MOST_SIGMAS = 2.5
"""Maximum deviation in standard deviations; larger ones are clipped, because single slow steps are
outliers."""

LEAST_SHARE = 0.3
"""Lower bound of the estimated time of a step, as a fraction of its time at startup."""


class _Bucket:
    """Costs of one batch bucket.

    Args:
      table: Seconds at startup by tier, for each measured number of requests, ascending; the last
        fills the bucket.
      last_waits: See `Costs`.

    Attributes:
      sizes: The measured numbers of requests.
    """

    def __init__(self, table: Mapping[int, Sequence[float]], last_waits: bool) -> None:
        self.sizes, self._first = list(table), np.array(list(table.values()))  # [sizes, tiers]
        full = self._first[-1]
        self._plain, count = float(full[0]), len(full)
        self._excess = np.zeros(count)
        self._known: dict[int, list[float]] = {}  # results of `seconds` since the last step
        shares, each = full / self._plain, np.eye(count)
        waiting = np.ones((count, count)) if not last_waits else np.zeros((count, count))
        waiting[-1], waiting[:, -1] = 0, 0
        errors = each * OWN_ERROR**2 + waiting * WAITING_ERROR**2
        shared = (1 + np.outer(shares, shares)) * SHARED_WALK**2
        walk = shared + each * OWN_WALK**2 + waiting * WAITING_WALK**2
        self._errors, self._walk = errors * self._plain**2, walk * self._plain**2

    def seconds(self, num_rows: int) -> list[float]:
        if num_rows not in self._known:
            first = self._at_startup(num_rows)
            estimate = np.maximum(first + self._excess, LEAST_SHARE * first)
            self._known[num_rows] = estimate.tolist()
        return self._known[num_rows]

    def _at_startup(self, num_rows: int) -> Float64[np.ndarray, " tiers"]:
        if num_rows < self.sizes[-1] and len(self.sizes) > 1:
            return np.array([np.interp(num_rows, self.sizes, each) for each in self._first.T])
        return self._first[-1]

    def observe(self, num_rows: int, tier: int, seconds: float) -> None:
        believed = self.seconds(num_rows)[tier]
        _observe(tier, seconds, believed, self._walk, self._errors, self._excess)
        self._known.clear()


@compiled
def _observe(
    tier: int,
    seconds: float,
    believed: float,
    walk: Float64[np.ndarray, "tiers tiers"],
    errors: Float64[np.ndarray, "tiers tiers"],
    excess: Float64[np.ndarray, " tiers"],
) -> None:
    """Updates the change of each tier's time since startup from a step, and its covariance.

    Args:
      tier, seconds, believed: Tier of the step, its measured time and its estimate.
      walk: Covariance of the change in one step.
      errors, excess: The covariance and the estimate; updated.
    """
    errors += walk
    column = errors[:, tier].copy()
    variance = column[tier] + (NOISE * believed) ** 2
    most = MOST_SIGMAS * variance**0.5
    error = min(max(seconds - believed, -most), most)
    for t in range(len(excess)):
        excess[t] += column[t] * error / variance
        for other in range(len(excess)):
            errors[t, other] -= column[t] * column[other] / variance


class Costs:
    """Costs of steps.

    Args:
      table: Seconds at startup for each batch bucket, by tier; empty if not measured. It may
        contain other numbers of requests too, which belong to the bucket that holds them.
      batches: The buckets, ascending.
      last_waits: True if the last tier waits for the previous step like the others. If no tier
        waits for the host, all are alike.
    """

    def __init__(
        self, table: Mapping[int, Sequence[float]], batches: Sequence[int], *, last_waits: bool
    ) -> None:
        _observe(0, 1.0, 1.0, np.eye(1), np.eye(1), np.zeros(1))  # compiles it in advance
        self._buckets: dict[int, _Bucket] = {}
        for before, batch in zip((0, *batches), batches, strict=False):
            own = {count: table[count] for count in sorted(table) if before < count <= batch}
            if own:
                self._buckets[batch] = _Bucket(own, last_waits)

    @property
    def table(self) -> Mapping[int, Sequence[float]]:
        """Current estimate of the seconds for each measured number of requests, by tier."""
        return {n: each.seconds(n) for each in self._buckets.values() for n in each.sizes}

    def of(self, batch: int, num_rows: int) -> list[float] | None:
        """Returns the seconds of each tier for a number of requests in a bucket; None if
        unknown.
        """
        bucket = self._buckets.get(batch)
        return None if bucket is None else bucket.seconds(num_rows)

    def observe(self, batch: int, num_rows: int, tier: int, seconds: float | None) -> None:
        """Updates the costs from the time of a step; None is ignored."""
        bucket = self._buckets.get(batch)
        if bucket is not None and seconds is not None and seconds > 0:
            bucket.observe(num_rows, tier, seconds)
