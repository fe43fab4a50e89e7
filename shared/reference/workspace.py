"""Workspace of a step of the reference backend, computed by `shared.boundary.workspace`."""

from shared.boundary.backend import Blueprint
from shared.boundary.program import Program
from shared.boundary.workspace import Costs, gathered_attention, step_bytes

COSTS = Costs(logit=64, reported=16, attention=gathered_attention)
"""Costs that allow for numpy's float64 temporaries."""


def workspace(program: Program, blueprint: Blueprint) -> int:
    """Returns the bytes that a step of the program needs beyond weights and pools."""
    return step_bytes(program, blueprint, COSTS)
