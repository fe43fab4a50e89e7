"""An engine over the toy device, with chains of three drafts."""

from __future__ import annotations

from shared.engine.cache_policy import NO_CACHE, CachePolicy
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from tests.support.toy_backend import ToyBackend

CHUNK = 64


def toy_engine(backend: ToyBackend, depth: int = 3, cache: CachePolicy = NO_CACHE) -> Engine:
    """Returns an engine with the maximum number of steps in flight; `depth` 0 decodes plainly."""
    sizes = {"nodes": depth + 1, "depth": depth, "width": min(depth, 1)}
    controller = StaticController(backend.capacity, **sizes)
    overlap = backend.capacity.overlap
    return Engine(backend, controller, overlap=overlap, chunked_prefill_size=CHUNK, cache=cache)
