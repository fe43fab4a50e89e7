"""What the prefix cache keeps, as a memory plan says it."""

from shared.drafts.drafter_spec import MODEL
from shared.engine.cache_policy import NO_CACHE, CachePolicy
from shared.options.flags import ConfigError
from shared.process.memory_plan import MemoryPlan


def cache_policy(memory: MemoryPlan) -> CachePolicy:
    """What is kept of texts.

    Raises:
      ConfigError: States cannot be tracked as the flags say.
    """
    settled, drafts, capacity = memory.settled, memory.blueprint.drafts, memory.capacity
    if settled.told.engine.disable_radix_cache:
        return NO_CACHE
    sizes = drafts.sizes
    layers = memory.blueprint.config.num_gated_delta_layers
    layers += 0 if sizes is None else sizes.num_gated_delta_layers
    policy = CachePolicy(
        is_on=True,
        key_reach=int(sizes is not None and sizes.has_relay),
        leaves_holes=drafts.on_device,
        reads_past=drafts.kind == MODEL,
        track_interval=settled.track_interval if layers else 0,
    )
    try:
        policy.check(capacity, capacity.overlap)
    except ValueError as error:
        raise ConfigError(f"--mamba-track-interval does not fit: {error}") from error
    return policy
