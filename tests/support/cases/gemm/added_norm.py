"""Cases of `added_norm`: odd sizes, and the rows of Gemma 4."""

from functools import partial

import numpy as np

from shared.spec.linear import NormedStream
from tests.support.op_case import Arguments, OpCase

EPS = 1e-6
SIZES = {"26B": 2816, "31B": 5376}


def added_norm_arguments(seed: int, *, R: int, size: int, is_last: bool) -> Arguments:
    """Rows, the stream that they are added to, and the scales of both norms; with `is_last` the
    layer scalar.
    """
    rng = np.random.default_rng(seed)
    end_norm, norm = 1 + rng.standard_normal((2, size), np.float32) / 4
    return {
        "x": 3 * rng.standard_normal((R, size), np.float32),
        "end_norm": end_norm,
        "eps": EPS,
        "stream": NormedStream(rng.standard_normal((R, size), np.float32)),
        "scalar": np.full(1, 0.7, np.float32) if is_last else None,
        "norm": norm,
    }


TABLE = [
    OpCase(
        op="added_norm",
        function="added_norm",
        name=f"{name}{', layer scalar' * is_last}, {R} rows",
        make=partial(added_norm_arguments, R=R, size=size, is_last=is_last),
        dtype=dtype,
        wide=("end_norm", "scalar", "norm"),
        is_large=dtype == "bfloat16",
    )
    for name, size, R, dtype in (
        ("small", 96, 3, "float32"),
        *((name, size, R, "bfloat16") for name, size in SIZES.items() for R in (1, 32)),
    )
    for is_last in (False, True)
]
