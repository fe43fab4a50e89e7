"""Prefix-cache policies of tests, by drafter and kind of model."""

from __future__ import annotations

from shared.engine.cache_policy import CachePolicy
from shared.spec.gated_delta import CHUNK


def policy_of(drafter: str, *, is_hybrid: bool) -> CachePolicy:
    """Returns the policy of a server with this drafter and the most frequent state snapshots."""
    return CachePolicy(
        is_on=True,
        key_lookahead=int(drafter in ("NEXTN", "EAGLE", "EAGLE3")),
        may_skip_draft_kv=drafter not in ("none", "NGRAM", "ASSISTANT"),
        draft_reads_kv=drafter == "STANDALONE",
        track_interval=CHUNK if is_hybrid else 0,
    )
