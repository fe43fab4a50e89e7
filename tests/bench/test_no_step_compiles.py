"""Controllers compile nothing in a step: all their functions are compiled at startup."""

import subprocess
import sys

import pytest

COMMON = """
import sys
from tests.support.simulation.imposed import (
    VOCAB, rated_runs, rated_work, written_runs, written_work,
)
from tests.support.simulation.device import simulated_capacity, with_host_drafts
from shared.engine.adaptive.policy import ExpectedValuePolicy
from shared.engine.adaptive.controller import AdaptiveController
from shared.engine.adaptive.tiers import Tier
from shared.engine.jit import CompiledLoop
from shared.engine.ngram_controllers.adaptive import AdaptiveNgramController
from shared.engine.ngram.index import NgramIndex
from shared.options.ngram import NgramConfig

def compiled():
    found = {}
    for module in tuple(sys.modules.values()):
        if module.__name__.startswith("shared."):
            for name, loop in vars(module).items():
                if isinstance(loop, CompiledLoop):
                    found[f"{module.__name__}.{name}"] = list(loop.dispatcher.signatures)
    return found

tiers, table = [Tier(1, 0, 0), Tier(4, 3, 1)], {1: [0.005, 0.006, 0.004], 4: [0.006, 0.008, 0.005]}
capacity = simulated_capacity(tiers, [1, 4], overlap=1)
"""

WORK = {
    "heads": """
AdaptiveController(capacity, ExpectedValuePolicy(), {}, has_experts=False)
before = compiled()
costs = {batch: seconds[:2] for batch, seconds in table.items()}
rated_runs(tiers, costs, rated_work([1, 4], 12, 5), 1)
""",
    "ngram": """
index = NgramIndex(NgramConfig(), nodes=4, depth=3, vocab=VOCAB, chain=False)
index.warm_up()
AdaptiveNgramController(with_host_drafts(capacity, VOCAB), index, {})
before = compiled()
written_runs(tiers, table, written_work([1, 4], 12, 5), 1)
""",
}

CHECK = """
late = {name: found for name, found in compiled().items() if found != before.get(name, [])}
assert before and not late, late
"""


@pytest.mark.parametrize("kind", WORK)
def test_started_controller_compiles_nothing_in_steps(kind: str) -> None:
    """The test has a process of its own: compilations of other tests would hide a failure."""
    script = COMMON + WORK[kind] + CHECK
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
