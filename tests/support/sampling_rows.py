"""Sampling parameters of rows, and the operations of choosing a token, row by row."""

from dataclasses import replace
from typing import Any

import numpy as np

from shared.spec import sampling as spec
from shared.spec.sampling import Sampling

REAL_VOCAB = 151_936


def neutral(B: int, vocab: int, **changes: np.ndarray) -> Sampling:
    """Parameters of B greedy rows without any filter, penalty or bias."""
    zeros, ones = np.zeros(B, np.float32), np.ones(B, np.float32)
    counts = np.zeros(B, np.int32)
    ids = np.zeros((B, 1), np.int32)
    sampling = Sampling(
        temperature=zeros,
        top_p=ones,
        top_k=np.full(B, vocab, np.int32),
        min_p=zeros,
        seed=np.arange(B, dtype=np.uint32),
        presence=zeros,
        frequency=zeros,
        repetition=ones,
        prompt_length=counts,
        min_length=counts,
        max_drafts=counts,
        stop_ids=ids,
        bias_ids=ids,
        bias_values=np.zeros((B, 1), np.float32),
        calibration=np.zeros((B, 1), np.float32),
        branch_calibration=np.zeros((B, 1), np.float32),
    )
    return replace(sampling, **changes)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def process(
    ops: Any,
    logits: np.ndarray,
    seen: np.ndarray,
    positions: np.ndarray,
    sampling: Sampling,
    allowed: np.ndarray | None,
) -> np.ndarray:
    """`processed` of one row a request, which chooses right after its newest token."""
    everyone = np.arange(len(logits), dtype=np.int32)
    alone = spec.counts_alone(seen, everyone)
    return ops.processed(logits, alone, positions, sampling, everyone, allowed)


def choose(
    ops: Any,
    logits: np.ndarray,
    positions: np.ndarray,
    sampling: Sampling,
    seen: np.ndarray | None = None,
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """`choose` of one row a request."""
    everyone = np.arange(len(logits), dtype=np.int32)
    counts = np.zeros(logits.shape, np.int32) if seen is None else seen
    alone = spec.counts_alone(counts, everyone)
    return ops.choose(logits, alone, positions, sampling, everyone, allowed).ids


def in_tree(ops: Any, seen: np.ndarray, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """The counts before the choice at every node [B, N, vocab]."""
    B, N = tokens.shape
    request = np.repeat(np.arange(B, dtype=np.int32), N)
    node, slots = np.tile(np.arange(N, dtype=np.int32), B), np.arange(B, dtype=np.int32)
    rows = ops.counts_in_trees(seen, slots, tokens, parents, request, node)
    return ops.counts_of_rows(rows).reshape(B, N, -1)
