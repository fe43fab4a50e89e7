"""Workspace of a step of the reference backend, computed by `shared.boundary.workspace`."""

from shared.boundary.backend import BackendSpec
from shared.boundary.program import Program
from shared.boundary.workspace import WorkspaceCosts, gathered_attention, step_bytes

COSTS = WorkspaceCosts(logit=64, reported=16, attention=gathered_attention)
"""Costs that allow for numpy's float64 temporaries."""


def workspace(program: Program, blueprint: BackendSpec) -> int:
    """Returns the bytes that a step of the program needs beyond weights and pools."""
    return step_bytes(program, blueprint, COSTS)
