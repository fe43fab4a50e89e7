"""Prefix-cache policy of a memory plan."""

from shared.engine.cache_policy import NO_CACHE, CachePolicy
from shared.options.flags import ConfigError
from shared.process.memory_plan import MemoryPlan


def cache_policy(memory: MemoryPlan) -> CachePolicy:
    """Returns the settings of the prefix cache.

    Raises:
      ConfigError: The state snapshot interval is invalid.
    """
    settled, drafts, capacity = memory.settled, memory.blueprint.drafts, memory.capacity
    if settled.options.engine.disable_radix_cache:
        return NO_CACHE
    sizes = drafts.sizes
    own = None if sizes is None or sizes.reads_target_kv else sizes  # of a drafter with KV
    policy = CachePolicy(
        is_on=True,
        key_lookahead=int(own is not None and own.has_draft_input),
        may_skip_draft_kv=own is not None,
        draft_reads_kv=drafts.model is not None,
        track_interval=settled.track_interval if memory.blueprint.has_state else 0,
        caches_outputs=not settled.options.engine.disable_output_caching,
    )
    try:
        policy.check(capacity, capacity.overlap)
    except ValueError as error:
        raise ConfigError(f"--mamba-track-interval does not fit: {error}") from error
    return policy
