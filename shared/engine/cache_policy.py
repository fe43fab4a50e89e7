"""What the prefix cache must know of a model, and of what drafts for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.boundary.backend import Capacity
from shared.spec.gated_delta import CHUNK


def track_unit(page_size: int) -> int:
    """Where states may stand: at a page's end, and where a prefill cuts its chunks."""
    return math.lcm(CHUNK, page_size)


@dataclass(frozen=True, kw_only=True)
class CachePolicy:
    """What the prefix cache must know of the model and of what drafts.

    Attributes:
      is_on: Whether anything is kept.
      key_reach: Tokens behind a page that its draft KV depends on: 1 of EAGLE-kind heads, else 0.
      leaves_holes: Whether a drafter has KV, in which plain steps leave holes.
      reads_past: Whether the drafter's KV depends on that before it: nothing after a hole is whole.
      track_interval: Positions between two tracked states of an output; 0: the model has none.
    """

    is_on: bool
    key_reach: int
    leaves_holes: bool
    reads_past: bool
    track_interval: int

    def check(self, capacity: Capacity, overlap: int) -> None:
        """Holds the interval against pages and steps.

        Raises:
          ValueError: It is no multiple of `track_unit`, or so short that steps in flight may pass
            two tracked positions.
        """
        unit, least = track_unit(capacity.page_size), (overlap + 1) * (capacity.max_depth + 1)
        if self.track_interval % unit:
            raise ValueError(
                f"the track interval must be a multiple of {unit}, got {self.track_interval}"
            )
        if 0 < self.track_interval < least:
            raise ValueError(
                f"the track interval must be at least {least}, which steps in flight may add, got "
                f"{self.track_interval}"
            )


NO_CACHE = CachePolicy(
    is_on=False, key_reach=0, leaves_holes=False, reads_past=False, track_interval=0
)
