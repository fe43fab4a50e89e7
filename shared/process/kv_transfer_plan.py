"""Programs and fingerprint of KV transfer, planned for servers with a disaggregation mode."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from shared.boundary.backend import BackendLimits, BackendSpec
from shared.boundary.transfer_spec import TransferSpec
from shared.drafts.drafter_spec import DrafterSpec
from shared.models.config import ModelConfig
from shared.options.disaggregation import DisaggregationMode
from shared.options.flags import ConfigError
from shared.options.options import Options
from shared.process.resolved_config import ResolvedConfig

EXPORTED_STATES_OF_A_REQUEST = 2
"""Further state snapshots per running request of a server that other servers fetch from. An export
pins the snapshot of its prompt, while the next prompt saves another one."""


def with_transfer(
    capacity: BackendLimits, settled: ResolvedConfig, model: ModelConfig, drafts: DrafterSpec
) -> BackendLimits:
    """Adds the entries and programs of KV transfer, if the server's mode requires them.

    Raises:
      ConfigError: Entries of the model cannot be transferred.
    """
    if settled.options.disaggregation.mode is DisaggregationMode.NONE:
        return capacity
    windows = [pool.window for pool in capacity.window_pools]
    try:
        spec = TransferSpec.of(model, drafts, settled.dtype, capacity.page_size, windows)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return replace(capacity, transfer=spec, programs=(*capacity.programs, *spec.programs()))


def num_exported_states(options: Options) -> int:
    """Returns the further state snapshots per running request."""
    return EXPORTED_STATES_OF_A_REQUEST * options.disaggregation.mode.serves


def fingerprint_of(blueprint: BackendSpec, weights: str) -> str:
    """Returns the digest of everything that two servers need in common to exchange records.

    It does not depend on the backend, the device and the number of ranks.

    Args:
      blueprint: Specification of the backend.
      weights: Digest of the weight files (`shared.process.weight_files_digest`).
    """
    sizes = blueprint.drafts.sizes
    parts = (
        blueprint.config,
        blueprint.drafts,
        blueprint.dtype,
        blueprint.capacity.page_size,
        sorted(blueprint.formats.items(), key=lambda each: each[0]),
        sizes is not None and sizes.has_draft_input,
        weights,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()
