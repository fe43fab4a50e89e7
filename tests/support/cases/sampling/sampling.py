"""Cases of `sampling.choose` and `sampling.rank`: rows with all options, and many tokens."""

from functools import partial

import numpy as np

from shared.spec.gumbel_noise import DRAFT_STREAM, TARGET_STREAM
from shared.spec.sampling import Sampling, TokenCounts
from tests.support.op_case import Arguments, OpCase

NODES, WIDTH = 2, 3


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def asked(B: int, vocab: int, **changed: np.ndarray) -> Sampling:
    """Neutral parameters of B greedy rows, with some changes."""
    neutral = {
        **dict.fromkeys(("temperature", "min_p", "presence", "frequency"), np.zeros(B, np.float32)),
        **dict.fromkeys(("top_p", "repetition"), np.ones(B, np.float32)),
        **dict.fromkeys(("prompt_length", "min_length", "max_drafts"), np.zeros(B, np.int32)),
        "top_k": np.full(B, vocab, np.int32),
        "seed": (2**31 - 3 + 77 * np.arange(B)).astype(np.uint32),
        "stop_ids": np.zeros((B, 3), np.int32),
        "bias_ids": np.zeros((B, 2), np.int32),
        "bias_values": np.zeros((B, 2), np.float32),
        **dict.fromkeys(("calibration", "branch_calibration"), np.zeros((B, 1), np.float32)),
    }
    return Sampling(**neutral | changed)


def mixed_sampling(vocab: int) -> Sampling:
    """Eight rows: two without a filter, one of them greedy, then a filter of each kind."""
    bias = np.stack([f32(0, 5, 0, -np.inf, 0, 0, 3, 0), f32(0, 0, 0, 0, 0, -2, 1, 0)], 1)
    return asked(
        8,
        vocab,
        temperature=f32(0, 0.7, 1, 1.3, 0.5, 1, 0, 2),
        top_p=f32(0.9, 1, 1, 0.5, 1, 0.99, 1, 1e-6),
        top_k=i32(3, vocab, 5, vocab, vocab, 20, vocab, vocab),
        min_p=f32(0, 0, 0.1, 0, 0.02, 0, 0.5, 0),
        presence=f32(0.5, 0, 0, 1, 0, 0, -1, 0),
        frequency=f32(0, 0.3, 0, 0.2, 0, 0, 0, 0),
        repetition=f32(1, 1.2, 1, 0.8, 1, 1, 1.5, 1),
        min_length=i32(9, 0, 9, 0, 0, 0, 13, 0),
        stop_ids=np.tile(i32(4, 4, vocab - 1), (8, 1)),
        bias_ids=np.tile(i32(2, 7), (8, 1)),
        bias_values=bias,
    )


def mixed_seen(rng: np.random.Generator, rows: int, vocab: int) -> TokenCounts:
    """Counts of eight slots, and paths of five tokens, some of them repeated."""
    path = rng.integers(0, 40, (rows, 5)).astype(np.int32)
    counts = rng.integers(0, 6, (8, vocab)).astype(np.int32)
    slots = np.repeat(rng.permutation(8), rows // 8).astype(np.int32)
    return TokenCounts(counts, slots, path, rng.random(path.shape) < 0.6)


def mixed_arguments(seed: int, *, vocab: int, is_masked: bool) -> Arguments:
    """Eight rows of eight requests, in another order."""
    rng = np.random.default_rng(seed)
    logits = 3 * rng.standard_normal((8, vocab), np.float32)
    logits[:, 9] = logits[:, 3]  # ties go by id
    request = rng.permutation(8).astype(np.int32)
    return {
        "logits": logits,
        "seen": mixed_seen(rng, 8, vocab),
        "positions": np.arange(5, 13, dtype=np.int32),
        "sampling": mixed_sampling(vocab),
        "request": request,
        "allowed": rng.random(logits.shape) < 0.7 if is_masked else None,
    }


def ranked_arguments(seed: int, *, vocab: int, stream: int, by_node: bool = False) -> Arguments:
    """Two nodes of each of eight requests; `by_node`: with their own positions."""
    rng = np.random.default_rng(seed)
    logits = 3 * rng.standard_normal((8, NODES, vocab), np.float32)
    logits[:, :, 9] = logits[:, :, 3]
    positions = np.arange(5, 13, dtype=np.int32)
    if by_node:
        positions = positions[:, None] + rng.permutation(NODES).astype(np.int32)
    return {
        "logits": logits,
        "seen": mixed_seen(rng, 8 * NODES, vocab),
        "positions": positions,
        "sampling": mixed_sampling(vocab),
        "keys": positions - (stream != TARGET_STREAM),
        "stream": stream,
        "width": WIDTH,
        "is_sampled": False,
        "columns": None,
    }


def drafted_arguments(seed: int, *, vocab: int, stream: int) -> Arguments:
    """Same as `ranked_arguments`, for a draft vocabulary in an order of its own."""
    arguments = ranked_arguments(seed, vocab=vocab, stream=stream)
    # Requested tokens, and of two equal ones the later first.
    asked_about = np.array([4, 9, 3, 7], np.int32)
    others = np.setdiff1d(np.arange(vocab, dtype=np.int32), asked_about)
    kept = np.random.default_rng(seed).permutation(others)[: vocab * 2 // 3]
    columns = np.concatenate([asked_about, kept])
    return arguments | {"logits": arguments["logits"][:, :, columns], "columns": columns}


def sampled_arguments(seed: int, *, vocab: int, is_own: bool) -> Arguments:
    """Drafts to be judged by a rejection rule, of a drafter that may have its own vocabulary."""
    make = drafted_arguments if is_own else ranked_arguments
    return make(seed, vocab=vocab, stream=DRAFT_STREAM + 1) | {"width": 1, "is_sampled": True}


def large_arguments(seed: int, *, R: int, vocab: int, temperature: float, peak: float) -> Arguments:
    """Rows like those of a language model: a few tokens are higher by up to `peak`."""
    rng = np.random.default_rng(seed)
    logits = np.float32(2.5 if peak else 1) * rng.standard_normal((R, vocab), np.float32)
    if peak:
        high = np.float32(peak) - 2 * np.log(np.arange(1, 41, dtype=np.float32))
        for row in logits:
            row[rng.choice(vocab, 40, replace=False)] = high
    is_sampled = temperature > 0
    how = asked(
        R,
        vocab,
        temperature=np.full(R, temperature, np.float32),
        top_p=np.full(R, 0.95 if is_sampled else 1, np.float32),
        seed=rng.integers(0, 2**32, R, dtype=np.uint32),
        stop_ids=np.zeros((R, 8), np.int32),
        bias_ids=np.zeros((R, 16), np.int32),
        bias_values=np.zeros((R, 16), np.float32),
    )
    nothing = np.zeros((R, 0), np.int32)
    return {
        "logits": logits,
        "seen": TokenCounts(
            np.zeros((2, vocab), np.int32), np.ones(R, np.int32), nothing, nothing > 0
        ),
        "positions": np.arange(100, 100 + R, dtype=np.int32),
        "sampling": how,
        "request": np.arange(R, dtype=np.int32),
        "allowed": None,
    }


def large_ranked_arguments(
    seed: int, *, B: int, k: int, vocab: int, temperature: float, width: int, is_sampled: bool
) -> Arguments:
    """The nodes of a level of B trees, over a language model's vocabulary."""
    made = large_arguments(seed, R=B * k, vocab=vocab, temperature=temperature, peak=22.0)
    positions = made["positions"][:B]
    return {
        "logits": made["logits"].reshape(B, k, vocab),
        "seen": made["seen"],
        "positions": positions,
        "sampling": made["sampling"].rows(np.arange(B)),
        "keys": positions,
        "stream": DRAFT_STREAM if is_sampled else TARGET_STREAM,
        "width": width,
        "is_sampled": is_sampled,
        "columns": None,
    }


def _bytes(arguments: Arguments, item_bytes: int) -> int:
    """The logits, once."""
    return arguments["logits"].size * item_bytes


# Not a multiple of a group of tokens.
_VOCAB, _LARGE_VOCAB = 301, 151_936
_SMALL = {
    "any rows": ("choose", partial(mixed_arguments, vocab=_VOCAB, is_masked=False)),
    "any rows, masked": ("choose", partial(mixed_arguments, vocab=_VOCAB, is_masked=True)),
    "as the target": ("rank", partial(ranked_arguments, vocab=_VOCAB, stream=TARGET_STREAM)),
    "draft vocabulary": ("rank", partial(drafted_arguments, vocab=_VOCAB, stream=TARGET_STREAM)),
    "positions by node": (
        "rank",
        partial(ranked_arguments, vocab=_VOCAB, stream=TARGET_STREAM, by_node=True),
    ),
    "sampled": ("rank", partial(sampled_arguments, vocab=_VOCAB, is_own=False)),
    "sampled, draft vocabulary": ("rank", partial(sampled_arguments, vocab=_VOCAB, is_own=True)),
    "noise of its own": ("rank", partial(ranked_arguments, vocab=_VOCAB, stream=DRAFT_STREAM + 1)),
}
_RANKED = {
    "4 of each of 4 nodes": {"k": 4, "width": 4, "is_sampled": False},
    "16 of each of 16 nodes": {"k": 16, "width": 16, "is_sampled": False},
    "a sampled draft": {"k": 1, "width": 1, "is_sampled": True},
}
_KINDS = {
    "greedy": {"temperature": 0.0, "peak": 22.0},
    "greedy of a flat law": {"temperature": 0.0, "peak": 0.0},
    "top-p 0.95": {"temperature": 0.8, "peak": 22.0},
    "top-p 0.95 of a flat law": {"temperature": 0.8, "peak": 0.0},
}
TABLE = (
    [
        OpCase(op="sampling", function=function, name=name, make=make, num_bytes=_bytes)
        for name, (function, make) in _SMALL.items()
    ]
    + [
        OpCase(
            op="sampling",
            function="rank",
            name=f"{B} requests, {name}",
            make=partial(large_ranked_arguments, B=B, vocab=_LARGE_VOCAB, temperature=0.8, **kind),
            is_large=True,
            num_bytes=_bytes,
        )
        for name, kind in _RANKED.items()
        for B in (1, 8)
    ]
    + [
        OpCase(
            op="sampling",
            function="choose",
            name=f"{R} rows, {name}",
            make=partial(large_arguments, R=R, vocab=_LARGE_VOCAB, **kind),
            is_large=True,
            num_bytes=_bytes,
        )
        for name, kind in _KINDS.items()
        for R in (1, 4, 16, 32, 128, 512)
    ]
)
