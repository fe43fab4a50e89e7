"""Cases of `convolution`: odd sizes, and the blocks of a DFlash2 head of Qwen3-8B."""

from functools import partial

import numpy as np

from tests.support.op_case import Arguments, OpCase


def before_arguments(
    seed: int, *, R: int, size: int, hidden: int, taps: int, group: int
) -> Arguments:
    """Rows of blocks, and the coefficients of both convolutions of a part."""
    rng = np.random.default_rng(seed)
    return {
        "normed": rng.standard_normal((R, hidden), np.float32),
        "base": rng.standard_normal((2, taps, hidden), np.float32),
        "moved": rng.standard_normal((R, 2, taps, hidden // group), np.float32) / 4,
        "size": size,
    }


def behind_arguments(seed: int, *, R: int, hidden: int, **sizes: int) -> Arguments:
    """The same with what a part gives, the stream, and the scale of its next norm."""
    made = before_arguments(seed, R=R, hidden=hidden, **sizes)
    rng = np.random.default_rng(seed + 1)
    return {
        "given": made.pop("normed"),
        **made,
        "x": 3 * rng.standard_normal((R, hidden), np.float32),
        "norm": 1 + rng.standard_normal(hidden, np.float32) / 4,
        "eps": 1e-6,
    }


ODD = {"R": 10, "size": 5, "hidden": 168, "taps": 3, "group": 24}
LARGE = {"size": 8, "hidden": 4096, "taps": 2, "group": 16}
MADE = {"before": before_arguments, "behind": behind_arguments}
TABLE = [
    OpCase(
        op="convolution",
        function=function,
        name=name,
        make=partial(make, **sizes),
        dtype=dtype,
        wide=("norm",),
        is_large=dtype == "bfloat16",
    )
    for name, sizes, dtype in (
        ("two blocks of odd sizes", ODD, "float32"),
        *((f"{B} x 8 rows", LARGE | {"R": 8 * B}, "bfloat16") for B in (1, 8, 32)),
    )
    for function, make in MADE.items()
]
