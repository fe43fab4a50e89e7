"""Cases of `acceptance.follow`: trees whose choices are often drafts, and what fails among them."""

from functools import partial

import numpy as np

from shared.spec.acceptance import follow
from shared.spec.draft_tree import flat_rows
from tests.support.op_case import Arguments, OpCase


def follow_arguments(seed: int, *, B: int, N: int, depth: int, is_chain: bool) -> Arguments:
    """Trees of few ids with siblings of different ones; the last row is padding."""
    rng = np.random.default_rng(seed)
    parents, tokens = np.zeros((2, B, N), np.int32)
    for b in range(B):
        taken: set[tuple[int, int]] = set()
        for node in range(1, N):
            parent = node - 1 if is_chain else int(rng.integers(node))
            free = [t for t in range(N + 2) if (parent, t) not in taken]
            token = int(rng.choice(free[: max(2, len(free) // 2)]))
            parents[b, node], tokens[b, node] = parent, token
            taken.add((parent, token))
    # Mostly the draft below a node, if it has one.
    choices = rng.integers(0, N + 2, (B, N)).astype(np.int32)
    for b, node in np.ndindex(B, N):
        below = np.flatnonzero((parents[b] == node) & (np.arange(N) > 0))
        if len(below) and rng.random() < 0.8:
            choices[b, node] = tokens[b, rng.choice(below)]
    num_nodes = rng.integers(1, N + 1, B).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(num_nodes)])
    return {
        "tokens": tokens,
        "parents": parents,
        "num_nodes": num_nodes,
        "choices": choices,
        "row_of": flat_rows(starts, num_nodes, N).astype(np.int32),
        "is_finite": rng.random(B * N) < 0.95,
        "is_row": np.arange(B) < max(1, B - 1),
        "depth": depth,
        "is_chain": is_chain,
    }


def _followed(arguments: Arguments, chosen: np.ndarray) -> list[np.ndarray]:
    given = {name: value for name, value in arguments.items() if name != "is_chain"}
    return [field[chosen] for field in vars(follow(**given)).values()]


def _bytes(arguments: Arguments, item_bytes: int) -> int:
    """The trees, their choices and rows, and the ways down."""
    return 4 * (4 * arguments["tokens"].size + 3 * len(arguments["tokens"]) * arguments["depth"])


TABLE = [
    OpCase(
        op="acceptance",
        function="follow",
        name=f"{B} x {N} nodes{' of a chain' * is_chain}, {depth} deep",
        make=partial(follow_arguments, B=B, N=N, depth=depth, is_chain=is_chain),
        is_large=is_large,
        real_rows=lambda arguments: np.arange(len(arguments["tokens"])),
        specify=_followed,
        num_bytes=_bytes,
    )
    for B, N, depth, is_chain, is_large in (
        *((3, 1, 0, True, False), (5, 4, 3, True, False), (6, 9, 5, False, False)),
        *((1, 1, 0, True, True), (32, 4, 3, True, True), (32, 16, 5, False, True)),
    )
]
