"""Cases of `layers.rms_norm`: odd sizes, and rows of Qwen3-8B."""

from functools import partial

import numpy as np

from tests.support.op_case import Arguments, OpCase


def norm_arguments(seed: int, *, R: int, size: int) -> Arguments:
    """Rows, and the scale of their norm."""
    rng = np.random.default_rng(seed)
    weight = 1 + rng.standard_normal(size, np.float32) / 4
    return {"x": rng.standard_normal((R, size), np.float32), "weight": weight, "eps": 1e-6}


TABLE = [
    OpCase(
        op="layers",
        function="rms_norm",
        name=name,
        make=partial(norm_arguments, R=R, size=size),
        dtype=dtype,
        is_large=dtype == "bfloat16",
    )
    for name, R, size, dtype in (
        ("three rows", 3, 96, "float32"),
        ("1 row", 1, 4096, "bfloat16"),
        ("1 row of 2560", 1, 2560, "bfloat16"),
        ("128 rows", 128, 4096, "bfloat16"),
    )
]
