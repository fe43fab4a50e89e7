"""Random draft trees."""

import numpy as np


def random_trees(rng: np.random.Generator, B: int, N: int) -> tuple[np.ndarray, ...]:
    """Tokens, parents, node counts; siblings carry different tokens."""
    parents, tokens = np.zeros((B, N), np.int32), np.zeros((B, N), np.int32)
    for b in range(B):
        born = np.zeros(N, int)
        for node in range(1, N):
            parents[b, node] = parent = rng.integers(0, node)
            tokens[b, node] = born[parent]
            born[parent] += 1
    return tokens, parents, rng.integers(1, N + 1, B).astype(np.int32)
