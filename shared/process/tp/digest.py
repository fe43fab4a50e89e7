"""Digest of a rank's model, weights, programs and pools, compared between ranks at the start."""

import hashlib

from shared.process.start import ValidatedStartup
from shared.process.weight_files_digest import weight_files_digest


def digest_of(start: ValidatedStartup) -> str:
    """Returns a digest that is equal on ranks with equal model, weights, programs and pools."""
    blueprint = start.memory.blueprint
    parts = (
        blueprint.config,
        blueprint.drafts,
        blueprint.capacity,
        blueprint.dtype,
        blueprint.on_gpu,
        blueprint.captured,
        sorted(blueprint.formats.items(), key=lambda each: each[0]),
        weight_files_digest(start),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()
