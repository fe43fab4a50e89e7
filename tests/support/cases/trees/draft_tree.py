"""Cases of draft trees: masks, growth by level, and the choice of nodes."""

from functools import partial

import numpy as np

from shared.spec.draft_tree import Level
from tests.support.op_case import Arguments, OpCase


def parents_of(seed: int, *, B: int, N: int) -> Arguments:
    """Trees of random form, the first a chain; the last nodes are padding."""
    rng = np.random.default_rng(seed)
    parents = np.array([[0, *(rng.integers(n) for n in range(1, N))] for _ in range(B)])
    parents[0] = np.maximum(np.arange(N) - 1, 0)
    parents[-1, N // 2 :] = 0
    return {"parents": parents.astype(np.int32)}


def level_arguments(seed: int, *, B: int, k: int, s: int, depth: int, root_rows: int) -> Arguments:
    """A level of nodes with children of few weights, so that many are equal."""
    rng = np.random.default_rng(seed)
    level = Level(
        tokens=_ints(rng, 99, B, k),
        weights=-_ints(rng, 3, B, k).astype(np.float32),
        parents=_ints(rng, B * k, B, k),
        numbers=_ints(rng, 40, B, k),
        paths=_ints(rng, 99, B, k, s + 1),
        sees=rng.random((B, k, root_rows + k * (depth - 1))) < 0.5,
    )
    return {
        "level": level,
        "tokens": _ints(rng, 99, B, k, k),
        "edges": _edges(rng, B, k, k),
        "s": s,
        "root_rows": root_rows,
    }


def keep_arguments(seed: int, *, B: int, C: int, N: int) -> Arguments:
    """Candidates; parents have lower numbers and no lower weights; many weights are equal."""
    rng = np.random.default_rng(seed)
    parents = np.array([[rng.integers(c + 1) for c in range(C)] for _ in range(B)])
    weights = np.zeros((B, C + 1), np.float32)  # by number, the root's first
    for c in range(C):
        above = weights[np.arange(B), parents[:, c]]
        weights[:, c + 1] = above + _edges(rng, B)
    weights[0, 1:][parents[0] > 0] = -np.inf
    return {
        "newest": _ints(rng, 99, B),
        "tokens": _ints(rng, 99, B, C),
        "weights": weights[:, 1:].copy(),
        "parents": parents.astype(np.int32),
        "max_drafts": rng.integers(-1, N + 2, B).astype(np.int32),
        "has_relay": np.arange(B) != 1,
        "nodes": N,
    }


def chains_arguments(seed: int, *, B: int, S: int) -> Arguments:
    """Drafts of requests that may have some, more than there are, or none."""
    rng = np.random.default_rng(seed)
    return {
        "drafts": _ints(rng, 99, B, S),
        "newest": _ints(rng, 99, B),
        "max_drafts": rng.integers(-1, S + 2, B).astype(np.int32),
        "can_draft": np.arange(B) != 1,
    }


def _ints(rng: np.random.Generator, end: int, *shape: int) -> np.ndarray:
    return rng.integers(0, end, shape).astype(np.int32)


def _edges(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.choice(np.array([0, -0.0, -1, -1.5], np.float32), shape)


def _case(function: str, make: object, is_large: bool, **sizes: int) -> OpCase:
    name = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return OpCase(
        op="draft_tree",
        function=function,
        name=name,
        make=partial(make, **sizes),
        is_large=is_large,
    )


TABLE = [
    _case("ancestors", parents_of, is_large, B=B, N=N)
    for B, N, is_large in ((3, 1, False), (4, 9, False), (32, 16, True), (32, 64, True))
]
TABLE += [
    _case("next_level", level_arguments, B > 4, B=B, k=k, s=s, depth=depth, root_rows=root_rows)
    for B, k, s, depth, root_rows in (
        *((3, 3, 1, 4, 0), (2, 4, 2, 3, 1), (2, 5, 3, 4, 0)),
        *((32, 4, 2, 5, 0), (32, 8, 4, 6, 0), (8, 16, 14, 16, 0)),
    )
]
TABLE += [
    _case("keep_best", keep_arguments, B > 4, B=B, C=C, N=N)
    for B, C, N in (
        (3, 2, 3),
        (4, 21, 9),
        (2, 40, 17),
        (4, 600, 33),
        (32, 68, 16),
        (32, 328, 64),
        (8, 3856, 64),
    )
]
TABLE += [_case("chains", chains_arguments, B > 5, B=B, S=S) for B, S in ((2, 1), (5, 3), (32, 7))]
