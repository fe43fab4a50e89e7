"""Cases of `candidate_lists.rank`: rows with all options, few candidates, and none allowed."""

from functools import partial

import numpy as np

from tests.support.cases.sampling.sampling import asked, f32, i32, mixed_sampling
from tests.support.op_case import Arguments, OpCase

VOCAB = 301
ROWS = 8


def mixed_arguments(seed: int, *, P: int, C: int, width: int) -> Arguments:
    """Eight rows with different options; tokens with a bias, a stop and a tie are candidates."""
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(VOCAB)[:C] for _ in range(ROWS)]).astype(np.int32)
    for row in tokens:
        others = row[~np.isin(row, (2, 4, 7))]
        row[:] = rng.permutation(np.concatenate([[4, 7, 2][: C - 1], others])[:C])
    logits = 3 * rng.standard_normal((ROWS, P, C), np.float32)
    logits[1, :, 1] = logits[1, :, 0]
    logits[:, 0, C - 1] = logits[:, 0, 0]
    logits[ROWS - 1, 0] = 5  # top-p leaves the first of them
    return {
        "logits": logits,
        "tokens": tokens,
        "counts": rng.integers(0, 6, (5, VOCAB)).astype(np.int32),
        "slots": rng.integers(0, 5, ROWS).astype(np.int32),
        "positions": np.arange(5, 5 + ROWS, dtype=np.int32),
        "sampling": mixed_sampling(VOCAB),
        "width": width,
    }


def stopped_arguments(seed: int) -> Arguments:
    """Rows of stop tokens alone, most of which may stop."""
    made = mixed_arguments(seed, P=2, C=2, width=2)
    sampling = asked(
        ROWS,
        VOCAB,
        temperature=f32(0, 0, 1, 1, 1, 1, 1, 1),
        stop_ids=np.tile(i32(4, 7, 7), (ROWS, 1)),
        min_length=i32(9, 0, 9, 0, 9, 0, 0, 0),
    )
    return made | {"tokens": np.tile(i32(4, 7), (ROWS, 1)), "sampling": sampling}


def large_arguments(seed: int, *, B: int, S: int, temperature: float) -> Arguments:
    """The slots of B blocks over a language model's vocabulary, after 16 tokens each."""
    rng, R, vocab = np.random.default_rng(seed), B * S, 151_936
    tokens = np.stack([rng.choice(vocab, 16, replace=False) for _ in range(R)])
    how = asked(
        R,
        vocab,
        temperature=np.full(R, temperature, np.float32),
        top_p=np.full(R, 0.95 if temperature else 1, np.float32),
    )
    return {
        "logits": 6 * rng.standard_normal((R, 16, 16), np.float32),
        "tokens": tokens.astype(np.int32),
        "counts": np.zeros((B, vocab), np.int32),
        "slots": np.repeat(np.arange(B, dtype=np.int32), S),
        "positions": np.tile(np.arange(100, 100 + S, dtype=np.int32), B),
        "sampling": how,
        "width": 8,
    }


def _bytes(arguments: Arguments, item_bytes: int) -> int:
    """The logits, once."""
    return arguments["logits"].size * item_bytes


_SMALL = {
    "16 of 16": partial(mixed_arguments, P=3, C=16, width=16),
    "4 of 16": partial(mixed_arguments, P=5, C=16, width=4),
    "2 of 3": partial(mixed_arguments, P=2, C=3, width=2),
    "all stopped": stopped_arguments,
}
_OP = {"op": "candidate_lists", "function": "rank", "tiled": "sampling", "num_bytes": _bytes}
TABLE = [
    *(OpCase(name=name, make=make, **_OP) for name, make in _SMALL.items()),
    *(
        OpCase(
            name=f"{B} blocks of 15, temperature {temperature}",
            make=partial(large_arguments, B=B, S=15, temperature=temperature),
            is_large=True,
            **_OP,
        )
        for B in (1, 8)
        for temperature in (0.0, 0.8)
    ),
]
