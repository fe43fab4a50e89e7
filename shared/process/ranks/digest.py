"""A short word for what a start will serve, to be compared between ranks."""

import hashlib

from shared.process.memory_plan import MemoryPlan


def digest_of(memory: MemoryPlan) -> str:
    """The same where model, programs and pools are the same, whatever the process."""
    blueprint = memory.blueprint
    said = (
        blueprint.config,
        blueprint.drafts,
        blueprint.capacity,
        blueprint.dtype,
        blueprint.on_gpu,
        blueprint.captured,
        sorted(blueprint.in_words),
        sorted(blueprint.in_codes),
    )
    return hashlib.sha256(repr(said).encode()).hexdigest()
