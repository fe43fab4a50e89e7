"""Cases of `gated_delta.step` and `gated_delta.verify`: states with decays below 0, and trees."""

from functools import partial

import numpy as np

from tests.support.op_case import Arguments, OpCase


def _inputs(rng: np.random.Generator, rows: tuple[int, ...], H: int, K: int, V: int) -> Arguments:
    q, k = rng.standard_normal((2, *rows, H, K), np.float32)
    return {
        "q": q * np.float32(K**-0.5),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.standard_normal((*rows, H, V), np.float32),
        "log_decay": -rng.uniform(0, 1, (*rows, H)).astype(np.float32),
        "beta": rng.uniform(0, 1, (*rows, H)).astype(np.float32),
    }


def step_arguments(seed: int, *, B: int, H: int, K: int, V: int) -> Arguments:
    """One token for each of B states."""
    rng = np.random.default_rng(seed)
    state = rng.standard_normal((B, H, K, V), np.float32)
    return {"state": state, **_inputs(rng, (B,), H, K, V)}


def verify_arguments(seed: int, *, B: int, N: int, H: int, K: int, V: int) -> Arguments:
    """A random tree of N nodes for each of B states."""
    rng = np.random.default_rng(seed)
    state = rng.standard_normal((B, H, K, V), np.float32)
    parents = np.array([[0] + [rng.integers(n) for n in range(1, N)] for _ in range(B)], np.int32)
    return {"state": state, **_inputs(rng, (B, N), H, K, V), "parents": parents}


# Heads of Qwen3.5-0.8B.
_MODEL = {"H": 16, "K": 128, "V": 128}
_STEPS = {
    "three states": (False, {"B": 3, "H": 2, "K": 16, "V": 8}),
    "1 state": (True, {"B": 1, **_MODEL}),
    "32 states": (True, {"B": 32, **_MODEL}),
}
_TREES = {
    "three trees": (False, {"B": 3, "N": 6, "H": 2, "K": 16, "V": 8}),
    "32 trees of 16": (True, {"B": 32, "N": 16, **_MODEL}),
}
TABLE = [
    OpCase(
        op="gated_delta",
        function=function,
        name=name,
        make=partial(make, **sizes),
        is_large=is_large,
    )
    for function, make, cases in (
        ("step", step_arguments, _STEPS),
        ("verify", verify_arguments, _TREES),
    )
    for name, (is_large, sizes) in cases.items()
]
