"""Cases of `acceptance.follow` and `acceptance.rejection_sample`.

Trees whose choices are often drafts, and what fails among them; chains sampled from a drafter that
is near the target.
"""

from functools import partial

import numpy as np

from shared.spec.acceptance import follow
from shared.spec.draft_tree import flat_rows
from shared.spec.sampling import TokenCounts, add_gumbel_noise
from tests.support.cases.sampling.sampling import asked
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


def judge_arguments(
    seed: int, *, B: int, S: int, vocab: int, rule: str, is_large: bool, last_drafts: int
) -> Arguments:
    """Chains drafted from near the target: one row is greedy, the last may have few drafts.

    Where `S` is 3 or more, the drafter of one level is the target itself, one is not finite and one
    excludes tokens of the target's.
    """
    rng, N = np.random.default_rng(seed), S + 1
    num_nodes = np.full(B, N, np.int32)
    num_nodes[-1] = last_drafts + 1
    starts = np.concatenate([[0], np.cumsum(num_nodes)])
    row_of = flat_rows(starts, num_nodes, N).astype(np.int32)
    logits = 2 * rng.standard_normal((B * N, vocab), np.float32)
    drafted = logits[row_of[:, :S]] + 0.7 * rng.standard_normal((B, S, vocab), np.float32)
    if S >= 3 and not is_large:
        drafted[0, 0] = logits[row_of[0, 0]]
        drafted[0, 1, 3] = np.nan
        drafted[0, 2, ::2] = -np.inf
    temperature = np.ones(B, np.float32)
    temperature[B // 2] = 0 if B > 1 else 1
    seeds = rng.integers(0, 2**32, B, dtype=np.uint32)
    how, lengths = asked(B, vocab, temperature=temperature, seed=seeds), np.arange(9, 9 + B)
    tokens = rng.integers(0, vocab, (B, N)).astype(np.int32)
    if not is_large:
        flat, everyone = drafted.reshape(B * S, vocab), np.repeat(np.arange(B), S)
        noisy = add_gumbel_noise(flat, how, everyone, lengths[everyone], 7 + seed)
        tokens[:, 1:] = noisy.argmax(axis=1).reshape(B, S)
    request = np.repeat(np.arange(B), num_nodes)
    request = np.pad(request, (0, B * N - len(request))).astype(np.int32)
    node = np.arange(B * N) - starts[request]
    nothing = np.zeros((B * N, 0), np.int32)
    return {
        "logits": logits,
        "seen": TokenCounts(
            np.zeros((2, vocab), np.int32), np.ones_like(request), nothing, nothing > 0
        ),
        "positions": (lengths[request] + np.clip(node, 0, S) + 1).astype(np.int32),
        "sampling": how,
        "request": request,
        "row_of": row_of,
        "tokens": tokens,
        "num_nodes": num_nodes,
        "lengths": lengths.astype(np.int32),
        "drafted": drafted,
        "allowed": None,
        "rule": rule,
    }


def _judge_bytes(arguments: Arguments, item_bytes: int) -> int:
    """The target's logits and the drafter's scores, once."""
    return 4 * (arguments["logits"].size + arguments["drafted"].size)


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
] + [
    OpCase(
        op="acceptance",
        function="rejection_sample",
        name=f"{B} chains of {S} drafts, {rule}",
        # What follows the nodes of a chain means nothing, and is not the same on all sides.
        make=partial(
            judge_arguments,
            B=B,
            S=S,
            vocab=vocab,
            rule=rule,
            is_large=is_large,
            last_drafts=S,
        ),
        is_large=is_large,
        num_bytes=_judge_bytes,
    )
    for B, S, vocab, is_large in (
        *((5, 4, 301, False), (1, 1, 301, False)),
        *((1, 15, 151_936, True), (8, 3, 151_936, True)),
    )
    for rule in ("rejection", "block")
]
