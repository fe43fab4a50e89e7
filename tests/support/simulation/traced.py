"""Changing work in simulated time, of which a trace is written."""

from pathlib import Path

from shared.engine.adaptive.controller import AdaptiveController
from shared.engine.adaptive.policy import Policy
from shared.engine.adaptive.trace import TraceWriter
from shared.engine.cache_policy import NO_CACHE
from shared.engine.engine import Engine
from tests.support.simulation.device import SimulatedBackend, simulated_capacity
from tests.support.simulation.phases import imposed, serve
from tests.support.simulation.work import SECONDS, TIERS, always, mixed

BATCHES = (1, 8)
WORK = (
    ("copying", 8, 24, 200, always(0.95)),
    ("free text", 8, 24, 150, always(0.05)),
    ("mixed", 8, 24, 150, mixed),
)


def traced(path: Path, policy: Policy) -> tuple[Engine, AdaptiveController]:
    """Serves the work with a controller that writes its trace to `path`."""
    phases, law = imposed(WORK, part=1 << 20)
    capacity = simulated_capacity(TIERS, BATCHES, overlap=1)
    backend = SimulatedBackend(capacity, SECONDS, law, noise=0.02)
    table = {batch: [SECONDS(batch, tier) for tier in TIERS] for batch in BATCHES}
    trace = TraceWriter(path, TIERS, table)
    controller = AdaptiveController(capacity, policy, table, trace, has_experts=False)
    engine = Engine(backend, controller, overlap=1, chunked_prefill_size=2048, cache=NO_CACHE)
    serve(engine, phases, lambda: backend.clock)
    return engine, controller
