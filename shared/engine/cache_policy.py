"""Prefix-cache settings that depend on the model and the drafter."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.boundary.backend import BackendLimits
from shared.spec.gated_delta import CHUNK


def track_unit(page_size: int) -> int:
    """Returns the unit of positions for state snapshots: ends of pages and of prefill chunks."""
    return math.lcm(CHUNK, page_size)


@dataclass(frozen=True, kw_only=True)
class CachePolicy:
    """Prefix-cache settings for a model and its drafter.

    Attributes:
      is_on: True if the prefix cache is enabled.
      key_lookahead: Lookahead of cache keys: tokens after a page that its draft KV depends on; 1
        for EAGLE-like heads, else 0.
      may_skip_draft_kv: True if the drafter has KV, in which plain steps leave gaps.
      draft_reads_kv: True if the drafter's KV depends on earlier KV, so that all KV after a gap is
        incomplete.
      track_interval: Positions between two state snapshots of an output; 0 for a model without
        recurrent states.
      caches_outputs: False if only prefilled positions are cached. Decoding computes KV and states
        in another order of sums than prefill, so in bfloat16 they have other bits.
    """

    is_on: bool
    key_lookahead: int
    may_skip_draft_kv: bool
    draft_reads_kv: bool
    track_interval: int
    caches_outputs: bool = True

    def check(self, capacity: BackendLimits, overlap: int) -> None:
        """Checks the track interval against the page size and the steps in flight.

        Raises:
          ValueError: It is not a multiple of `track_unit`, or so short that steps in flight may
            pass two tracked positions.
        """
        unit, least = track_unit(capacity.page_size), (overlap + 1) * (capacity.max_depth + 1)
        if self.track_interval % unit:
            raise ValueError(
                f"the track interval must be a multiple of {unit}, got {self.track_interval}"
            )
        if 0 < self.track_interval < least:
            raise ValueError(
                f"the track interval must be at least {least} (tokens that steps in flight may "
                f"add), got {self.track_interval}"
            )


NO_CACHE = CachePolicy(
    is_on=False, key_lookahead=0, may_skip_draft_kv=False, draft_reads_kv=False, track_interval=0
)
