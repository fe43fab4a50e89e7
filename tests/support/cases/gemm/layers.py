"""Cases of `layers`: odd sizes, rows of Qwen3-8B, patches of Qwen3.5-9B's vision encoder, and value
heads of Gemma 4.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from shared.spec.attention_layer import Heads
from tests.support.op_case import Arguments, OpCase


def norm_arguments(seed: int, *, R: int, size: int) -> Arguments:
    """Rows, and the scale of their norm."""
    rng = np.random.default_rng(seed)
    weight = 1 + rng.standard_normal(size, np.float32) / 4
    return {"x": rng.standard_normal((R, size), np.float32), "weight": weight, "eps": 1e-6}


def layer_norm_arguments(seed: int, *, R: int, size: int) -> Arguments:
    """Same as `norm_arguments`, for rows with a mean, and with the bias of the norm."""
    found = norm_arguments(seed, R=R, size=size)
    bias = np.random.default_rng(seed + 1).standard_normal(size, np.float32)
    return found | {"x": found["x"] + 2, "bias": bias}


def gelu_arguments(seed: int, *, R: int, size: int) -> Arguments:
    """Numbers on both sides of 0, some of them far off."""
    return {"x": 3 * np.random.default_rng(seed).standard_normal((R, size), np.float32)}


def blend_arguments(seed: int, *, R: int, size: int, side: int = 48) -> Arguments:
    """Rows interpolated between those of a table with `side` positions per side."""
    rng = np.random.default_rng(seed)
    return {
        "table": rng.standard_normal((side**2, size), np.float32),
        "corners": rng.integers(0, side**2, (R, 4), dtype=np.int32),
        "shares": rng.dirichlet(np.ones(4), R).astype(np.float32),
    }


def values_arguments(
    seed: int, *, R: int, counts: tuple[int, int], head_size: int, are_keys: bool
) -> Arguments:
    """A projection with some query heads and some key heads, without values if they are keys."""
    queries, keys = counts
    columns = (queries + (1 if are_keys else 2) * keys) * head_size
    heads = Heads(keys, head_size, gated=False, scale=1.0, has_kv=True)
    qkv = 3 * np.random.default_rng(seed).standard_normal((R, columns), np.float32)
    return {"qkv": qkv, "heads": heads, "eps": 1e-6, "are_keys": are_keys}


def _case(function: str, name: str, dtype: str, make: Callable[[int], Arguments]) -> OpCase:
    return OpCase(
        op="layers",
        function=function,
        name=name,
        make=make,
        dtype=dtype,
        wide=("weight", "bias", "shares") if function != "rms_norm" else (),
        is_large=dtype == "bfloat16",
    )


NORMS = [
    _case("rms_norm", name, dtype, partial(norm_arguments, R=R, size=size))
    for name, R, size, dtype in (
        ("three rows", 3, 96, "float32"),
        ("1 row", 1, 4096, "bfloat16"),
        ("1 row of 2560", 1, 2560, "bfloat16"),
        ("128 rows", 128, 4096, "bfloat16"),
    )
]
OF_TOWERS = [
    _case(function, name, dtype, partial(make, R=R, size=size))
    for name, R, dtype in (("three rows", 3, "float32"), ("4096 patches", 4096, "bfloat16"))
    for function, make, size in (
        ("layer_norm", layer_norm_arguments, 1152),
        ("gelu", gelu_arguments, 4304),
        ("gelu_tanh", gelu_arguments, 4304),
        ("bilinear_pos_embed", blend_arguments, 1152),
    )
]
OF_VALUES = [
    OpCase(
        op="attention_layer",
        function="norm_values",
        name=name,
        make=partial(values_arguments, R=R, counts=counts, head_size=head_size, are_keys=are_keys),
        dtype=dtype,
        is_large=dtype == "bfloat16",
    )
    for name, R, counts, head_size, are_keys, dtype in (
        ("three rows", 3, (4, 2), 48, False, "float32"),
        ("K = V, three rows", 3, (4, 2), 48, True, "float32"),
        ("31B, 1 row", 1, (32, 16), 256, False, "bfloat16"),
        ("31B, K = V, 1 row", 1, (32, 4), 512, True, "bfloat16"),
        ("31B, 32 rows", 32, (32, 16), 256, False, "bfloat16"),
    )
]
TABLE = [*NORMS, *OF_TOWERS, *OF_VALUES]
