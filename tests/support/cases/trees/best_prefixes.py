"""Cases of best prefixes: weights with ties, certain depths, few candidates, and pair lists."""

from functools import partial

import numpy as np

from tests.support.op_case import Arguments, OpCase


def grow_arguments(
    seed: int, *, B: int, S: int, K: int, N: int, P: int = 1, is_tied: bool = False
) -> Arguments:
    """Weights of each depth; the third request has a certain depth, the fourth few candidates."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(B, S, P, 8 * K)) * rng.uniform(0.3, 6, (B, S, 1, 1))
    weights = scores - np.log(np.exp(scores).sum(axis=3, keepdims=True))
    edges = -np.sort(-weights, axis=3)[..., :K].astype(np.float32)
    if is_tied:
        edges = np.round(2 * edges) / np.float32(2)
    if B > 2:
        edges[2, rng.integers(S)] = np.where(np.arange(K) == 0, 0, -np.inf)
    if B > 3:
        edges[3, :, :, max(1, K // 2) :] = -np.inf
    known = np.array([0, -0.5, -1.25, -9], np.float32)
    ids = np.broadcast_to(np.arange(8 * K, dtype=np.int32), scores.shape)
    return {
        "newest": rng.integers(0, 99, B).astype(np.int32),
        "tokens": rng.permuted(ids, axis=3)[..., :K].copy(),
        "edges": edges,
        "lists": None if P == 1 else rng.integers(0, P, (B, S, P, K)).astype(np.int32),
        "branch_calibration": rng.choice(known, (B, S + 1), p=(0.4, 0.2, 0.3, 0.1)),
        "max_drafts": np.where(np.arange(B) % 3 == 1, rng.integers(-1, N, B), N).astype(np.int32),
        "can_draft": np.arange(B) != 4,
        "nodes": N,
    }


def _case(is_large: bool, **sizes: int) -> OpCase:
    name = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return OpCase(
        op="best_prefixes",
        function="grow",
        name=name,
        make=partial(grow_arguments, **sizes),
        is_large=is_large,
    )


TABLE = [
    _case(False, B=5, S=3, K=2, N=8),
    _case(False, B=4, S=7, K=4, N=16, is_tied=True),
    _case(False, B=2, S=15, K=8, N=64),
    _case(False, B=5, S=4, K=4, N=17, P=4),
    _case(False, B=3, S=1, K=3, N=9),
    *(_case(True, B=B, S=15, K=8, N=N) for B in (1, 8) for N in (16, 32, 64)),
    _case(True, B=8, S=7, K=16, N=64, P=16),
]
