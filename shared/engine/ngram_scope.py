"""N-gram scopes: 64-bit names of tenants or requests for the device's n-gram table."""

from hashlib import blake2b

import numpy as np
from jaxtyping import Int32

from shared.boundary.ngram_table import NgramTableSpec
from shared.engine.request import Request


def scope_of(request: Request, table: NgramTableSpec) -> Int32[np.ndarray, " 2"]:
    """Returns a 64-bit hash of a tenant's name or a request's number, as two int32.

    For 10,000 tenants the probability of any collision is about 10^-11; colliding tenants would
    share drafts.
    """
    name = f"request {request.arrival}" if table.by_request else f"tenant {request.tenant}"
    return np.frombuffer(blake2b(name.encode(), digest_size=8).digest(), np.int32)
