"""Workspace of a step; see `shared.boundary.workspace`."""

from functools import partial

from jax_impl.ops.attention.attention import BLOCK
from kernels.latent_tiles import latent_bytes
from kernels.tiles import MOST_LANES
from shared.boundary.backend import BackendLimits, BackendSpec
from shared.boundary.program import Program
from shared.boundary.workspace import WorkspaceCosts, split_attention, step_bytes
from shared.models.mixers import SelfAttentionConfig


def blocked_attention(
    program: Program, attention: SelfAttentionConfig, capacity: BackendLimits, item: int
) -> int:
    """Returns the bytes of reference attention: keys, values, scores of a block, and outputs."""
    queries = program.tokens or program.shape.nodes  # a row is padded to the longest
    keys = min(program.pages * capacity.page_size, max(BLOCK, capacity.page_size))
    gathered = 2 * program.batch * keys * attention.key_size * item
    rows = program.batch * attention.num_heads * queries
    return gathered + 2 * rows * (keys + attention.head_size + 2) * 4


ON_CPU = WorkspaceCosts.of_framework(blocked_attention)
_LATENT = partial(latent_bytes, copies_lanes=True)
ON_GPU = WorkspaceCosts.of_framework(partial(split_attention, MOST_LANES, _LATENT))


def workspace(program: Program, blueprint: BackendSpec) -> int:
    """Returns the workspace of a step of the program: bytes beyond weights and pools."""
    return step_bytes(program, blueprint, ON_GPU if blueprint.on_gpu else ON_CPU)
