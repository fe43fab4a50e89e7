"""Cases of the verify budget: random trees, many of them with equal weights."""

from functools import partial

import numpy as np

from shared.spec import verify_budget
from tests.support.op_case import Arguments, OpCase


def batch_arguments(seed: int, *, B: int, N: int) -> Arguments:
    """Trees with path weights, and the calibration of the requests."""
    rng = np.random.default_rng(seed)
    parents = np.array([[0, *(rng.integers(n) for n in range(1, N))] for _ in range(B)])
    parents[0] = np.maximum(np.arange(N) - 1, 0)
    num_nodes = rng.integers(1, N + 1, B).astype(np.int32)
    parents[np.arange(N) >= num_nodes[:, None]] = 0
    weights = np.zeros((B, N), np.float32)
    for node in range(1, N):
        edges = rng.choice(np.array([0, -0.0, -1, -1.5], np.float32), B)
        weights[:, node] = weights[np.arange(B), parents[:, node]] + edges
    known = rng.choice(np.array([0, -0.5, -1, -9], np.float32), (B, N), p=(0.5, 0.2, 0.2, 0.1))
    return {
        "tokens": rng.integers(1, 99, (B, N)).astype(np.int32),
        "parents": parents.astype(np.int32),
        "num_nodes": num_nodes,
        "weights": weights,
        "calibration": known,
    }


def rank_arguments(seed: int, *, B: int, N: int) -> Arguments:
    made = batch_arguments(seed, B=B, N=N)
    return {name: made[name] for name in ("parents", "weights", "calibration")}


def share_arguments(seed: int, *, B: int, N: int, rows: int) -> Arguments:
    made = batch_arguments(seed, B=B, N=N)
    ranked = verify_budget.log_acceptance(made["parents"], made["weights"], made["calibration"])
    trees = {name: made[name] for name in ("tokens", "parents", "num_nodes")}
    return trees | {"rank_weights": ranked, "rows": rows}


def _case(function: str, make: object, is_large: bool, **sizes: int) -> OpCase:
    name = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return OpCase(
        op="verify_budget",
        function=function,
        name=name,
        make=partial(make, **sizes),
        is_large=is_large,
    )


TABLE = [
    _case("log_acceptance", rank_arguments, B > 5, B=B, N=N)
    for B, N in ((2, 2), (4, 9), (5, 16), (32, 16), (32, 64))
]
TABLE += [
    _case("prune_to_budget", share_arguments, B > 5, B=B, N=N, rows=rows)
    for B, N, rows in ((2, 2, 3), (4, 9, 4), (5, 16, 40), (32, 16, 128), (32, 64, 256))
]
