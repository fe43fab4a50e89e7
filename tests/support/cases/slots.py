"""Cases of `slots.commit`: few slots of a small vocabulary, and a batch of a real one."""

from functools import partial

import numpy as np

from shared.spec.slots import commit
from tests.support.op_case import Arguments, OpCase


def commit_arguments(
    seed: int, *, B: int, W: int, vocab: int, is_fed: bool, padding: int = 1
) -> Arguments:
    """Rows that emit up to W tokens of a few ids, of prompts that end about there; then padding."""
    rng = np.random.default_rng(seed)
    slots = B + 2
    lengths = rng.integers(5, 50, slots).astype(np.int32)
    owners = np.concatenate([1 + rng.permutation(slots - 1)[:B], np.zeros(padding, np.int64)])
    counts = np.concatenate([rng.integers(0, W + 1, B), np.zeros(padding, np.int64)])
    return {
        "lengths": lengths,
        "newest": rng.integers(0, vocab, slots).astype(np.int32),
        "seen": rng.integers(0, 6, (slots, vocab)).astype(np.int32),
        "draft_from": None if is_fed else rng.integers(0, 5, slots).astype(np.int32),
        "slots": owners.astype(np.int32),
        "before": lengths[owners],
        "tokens": rng.integers(0, min(vocab, 4), (B + padding, W)).astype(np.int32),
        "counts": counts.astype(np.int32),
        "prompt_length": (lengths[owners] + rng.integers(-2, W + 2, B + padding)).astype(np.int32),
    }


def _bytes(arguments: Arguments, item_bytes: int) -> int:
    """The tokens, and what is known of each, read and written."""
    return 4 * 3 * arguments["tokens"].size


def _but_the_sink(arguments: Arguments) -> np.ndarray:
    return np.arange(1, len(arguments["lengths"]))


def _of_slots(arguments: Arguments, chosen: np.ndarray) -> list[np.ndarray]:
    return [x[chosen] for x in commit(**arguments) if x is not None]


TABLE = [
    OpCase(
        op="slots",
        function="commit",
        name=f"{B} x {W} tokens{', fed' * is_fed}",
        make=partial(commit_arguments, B=B, W=W, vocab=vocab, is_fed=is_fed),
        is_large=vocab > 100,
        real_rows=_but_the_sink,
        specify=_of_slots,
        num_bytes=_bytes,
    )
    for B, W, vocab, is_fed in (
        *((3, 1, 9, False), (5, 4, 9, True), (4, 7, 9, False)),
        *((1, 1, 151_936, True), (32, 6, 151_936, True)),
    )
]
