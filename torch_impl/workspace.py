"""Workspace of a step; see `shared.boundary.workspace`."""

from functools import partial

from kernels.latent_tiles import latent_bytes
from kernels.tiles import MOST_LANES
from shared.boundary.backend import BackendSpec
from shared.boundary.program import Program
from shared.boundary.workspace import (
    WorkspaceCosts,
    gathered_attention,
    split_attention,
    step_bytes,
)

ON_CPU = WorkspaceCosts.of_framework(gathered_attention)
ON_GPU = WorkspaceCosts.of_framework(partial(split_attention, MOST_LANES, latent_bytes))


def workspace(program: Program, blueprint: BackendSpec) -> int:
    """Returns the workspace of a step of the program: bytes beyond weights and pools."""
    return step_bytes(program, blueprint, ON_GPU if blueprint.on_gpu else ON_CPU)
