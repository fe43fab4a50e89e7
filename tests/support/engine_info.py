"""Engine facts that an engine without a model reports to the HTTP server."""

from __future__ import annotations

from typing import Any

from shared.engine.checks import RequestLimits
from shared.models.sampling import SamplingDefaults
from shared.process.ipc_messages import ServerInfo


def facts_of(limits: RequestLimits, **fields: Any) -> ServerInfo:
    """Returns the facts of an engine without drafts, with some fields replaced."""
    plain: dict[str, Any] = {
        "model_name": "it",
        "model_folder": "",
        "eos_ids": (),
        "sampling_defaults": SamplingDefaults(),
        "max_open_requests": None,
        "max_draft_depth": 0,
        "host_names": None,
    }
    return ServerInfo(limits=limits, **{**plain, **fields})
