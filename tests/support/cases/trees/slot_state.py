"""Cases of `slots`: few slots and small states, and a batch and states of a real model."""

from functools import partial

import numpy as np

from shared.spec.slot_state import commit
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
    """Bytes of the tokens and of their flags, read and written."""
    return 4 * 3 * arguments["tokens"].size


def _but_the_sink(arguments: Arguments) -> np.ndarray:
    return np.arange(1, len(arguments["lengths"]))


def _of_slots(arguments: Arguments, chosen: np.ndarray) -> list[np.ndarray]:
    return [x[chosen] for x in commit(**arguments) if x is not None]


def restore_arguments(seed: int, *, B: int, L: int, state: tuple[int, ...]) -> Arguments:
    """Rows that start with a snapshot or with none, or go on; the last is padding."""
    rng = np.random.default_rng(seed)
    draw = partial(rng.standard_normal, dtype=np.float32)
    memory, saved = draw((L, B + 2, *state)), draw((L, B + 1, *state))
    return {
        "memory": memory,
        "saved": saved,
        "slots": np.append(1 + rng.permutation(B + 1)[:B], 0).astype(np.int32),
        "sources": np.append(rng.integers(0, B + 1, B) * (np.arange(B) % 3 != 1), 0),
        "starts": np.append(np.arange(B) % 4 != 3, False),
    }


def _restored_bytes(arguments: Arguments, item_bytes: int) -> int:
    """The states of starting rows, read where there are any, and written."""
    starts, sources = arguments["starts"], arguments["sources"]
    moved = int(starts.sum() + (starts & (sources != 0)).sum())
    return item_bytes * moved * arguments["memory"][:, 0].size


def _restore_case(B: int, L: int, state: tuple[int, ...], is_large: bool) -> OpCase:
    return OpCase(
        op="slot_state",
        function="restore",
        name=f"{B} rows, {L} layers of {' x '.join(map(str, state))}",
        make=partial(restore_arguments, B=B, L=L, state=state),
        in_place=("memory",),
        is_large=is_large,
        num_bytes=_restored_bytes,
    )


RESTORES = [
    _restore_case(5, 2, (2, 3, 5), False),
    _restore_case(8, 4, (32, 128, 128), True),
]
COMMITS = [
    OpCase(
        op="slot_state",
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
TABLE = [*COMMITS, *RESTORES]
