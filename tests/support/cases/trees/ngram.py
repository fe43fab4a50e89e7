"""Cases of the table of n-grams: texts of few different tokens, so that n-grams come again."""

from collections.abc import Callable
from functools import partial

import numpy as np

from shared.spec import ngram
from tests.support.op_case import Arguments, OpCase


def texts(rng: np.random.Generator, count: int, vocab: int) -> Arguments:
    """Ends of texts of four scopes, some of which have only begun, and what came next."""
    contexts = rng.integers(0, vocab, (count, ngram.WINDOW)).astype(np.int32)
    missing = rng.integers(-ngram.WINDOW, ngram.WINDOW, (count, 1))
    contexts[np.arange(ngram.WINDOW) < missing] = -1
    return {
        "contexts": contexts,
        "following": rng.integers(0, vocab, count).astype(np.int32),
        "scopes": rng.integers(-1, 1, (count, 2)).astype(np.int32),
        "is_real": rng.random(count) < 0.9,
    }


def learnt(rng: np.random.Generator, count: int, groups: int, vocab: int) -> ngram.NgramTable:
    """A table that has gone round its clock."""
    table = ngram.NgramTable.empty(groups)
    table.clocks[:] = ngram.LATEST - count // 2
    return ngram.insert(table, **texts(rng, count, vocab))


def learn_arguments(seed: int, *, n: int, groups: int, vocab: int) -> Arguments:
    """Entries that take each other's places, in one call and before."""
    rng = np.random.default_rng(seed)
    return {"table": learnt(rng, 200, groups, vocab), **texts(rng, n, vocab)}


def draft_arguments(
    seed: int, *, B: int, N: int, depth: int, width: int, groups: int = 512, vocab: int = 4
) -> Arguments:
    """Texts of which the table has seen much; some may have few drafts, or none."""
    rng = np.random.default_rng(seed)
    table, given = learnt(rng, 3000, groups, vocab), texts(rng, B, vocab)
    max_drafts = rng.choice(np.array([0, 2, 99], np.int32), B, p=(0.1, 0.2, 0.7))
    max_drafts[0] = 0
    return {
        "table": table,
        "contexts": given["contexts"],
        "scopes": given["scopes"],
        "max_drafts": max_drafts,
        "nodes": N,
        "depth": depth,
        "width": width,
    }


def _case(function: str, make: Callable[..., Arguments], is_large: bool, **sizes: int) -> OpCase:
    name = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return OpCase(
        op="ngram",
        function=function,
        name=name,
        make=partial(make, **sizes),
        in_place=("table",) if function == "insert" else (),
        is_large=is_large,
    )


TABLE = [
    _case("insert", learn_arguments, n > 200, n=n, groups=groups, vocab=vocab)
    for n, groups, vocab in ((1, 16, 9), (150, 2, 5), (256, 1 << 17, 999), (2048, 1 << 17, 999))
]
TABLE += [
    _case("draft", draft_arguments, B > 9, B=B, N=N, depth=depth, width=width)
    for B, N, depth, width in (
        (9, 8, 7, 7),
        (5, 5, 4, 1),
        (2, 12, 3, 8),
        (32, 8, 7, 7),
        (32, 64, 63, 8),
    )
]
