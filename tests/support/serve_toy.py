"""`python -m tests.support.serve_toy` serves the toy device over HTTP, with the real engine.

Its model folder is empty: prompts are token ids, and one with `POISON` fails.
"""

from __future__ import annotations

import argparse
import tempfile
import time

from shared.boundary.backend import StepPlan
from shared.engine.request_limits import request_limits
from shared.models.sampling import SamplingDefaults
from shared.process import loop
from shared.process.address import Listeners, bind
from shared.process.ipc_messages import ServerInfo
from shared.process.watchdog import Watchdog
from tests.support.cache_policies import policy_of
from tests.support.toy_backend import ToyBackend, ToyFuture, toy_capacity
from tests.support.toy_engine import toy_engine

NUM_PAGES, SLOTS, OVERLAP = 160, 4, 2


class Slowed(ToyBackend):
    """A toy backend with steps that take some time."""

    step_s = 0.0

    def submit(self, plan: StepPlan) -> ToyFuture:
        time.sleep(self.step_s)
        return super().submit(plan)


def main() -> int:
    """Serves until a stop signal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--depth", type=int, default=3)
    flags = parser.parse_args()
    capacity = toy_capacity(
        num_pages=NUM_PAGES, num_slots=1 + SLOTS, overlap=OVERLAP, context_length=480
    )
    backend = Slowed(capacity)
    backend.step_s = flags.step_ms / 1000
    with tempfile.TemporaryDirectory() as folder:
        facts = ServerInfo(
            model_name="toy",
            model_folder=folder,
            limits=request_limits(capacity, capacity.context_length),
            eos_ids=(),
            sampling_defaults=SamplingDefaults(),
            max_open_requests=None,
            max_draft_depth=capacity.max_depth,
            host_names=(),
        )
        engine = toy_engine(backend, flags.depth, policy_of("EAGLE3", is_hybrid=False))
        return loop.run(engine, facts, Listeners(bind("127.0.0.1", 0), []), None, Watchdog(30), 5)


if __name__ == "__main__":
    raise SystemExit(main())
