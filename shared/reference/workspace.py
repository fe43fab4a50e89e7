"""How much memory a step of the reference works on, as `shared.boundary.workspace` counts it."""

from shared.boundary.backend import Blueprint
from shared.boundary.program import Program
from shared.boundary.workspace import Costs, gathered_attention, step_bytes

COSTS = Costs(logit=64, reported=16, attention=gathered_attention)
"""Numpy computes with 8 bytes here and there."""


def workspace(program: Program, blueprint: Blueprint) -> int:
    """Bytes that a step of the program needs beyond weights and pools."""
    return step_bytes(program, blueprint, COSTS)
