"""Whose text a request drafts from on the device, in two words of a plan."""

from hashlib import blake2b

import numpy as np
from jaxtyping import Int32

from shared.boundary.texts import TextTable
from shared.engine.request import Request


def scope_of(request: Request, table: TextTable) -> Int32[np.ndarray, " 2"]:
    """64 bits of a tenant's name, or of a request's own number: no other one has the same.

    Of ten thousand tenants two are alike once in 10^11 servers; such two would share their drafts.
    """
    name = f"request {request.arrival}" if table.by_request else f"tenant {request.tenant}"
    return np.frombuffer(blake2b(name.encode(), digest_size=8).digest(), np.int32)
