"""Limits of the kernels, checked at startup; see `shared.boundary.kernel_coverage`."""

from kernels.kernel_limits import (
    DELTA_SIZES,
    EXPERTS_UNIT,
    HEAD_SIZES,
    LATENT_COLUMNS,
    MAMBA2_STATE_SIZES,
    MOST_NODES,
)
from shared.boundary.kernel_coverage import KernelLimits

KERNEL_LIMITS = KernelLimits(
    head_sizes=HEAD_SIZES,
    latent_columns=LATENT_COLUMNS,
    delta_sizes=DELTA_SIZES,
    mamba2_state_sizes=MAMBA2_STATE_SIZES,
    max_nodes=MOST_NODES,
    product_dtype="bfloat16",
    experts_unit=EXPERTS_UNIT,
)
