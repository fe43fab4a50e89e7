"""Cases of `projection.fused_choose` and `projection.ranked`: rows that ask for anything, and the
head of Qwen3-8B."""

from dataclasses import replace
from functools import partial

import numpy as np

from shared.spec import lm_head as spec
from shared.spec.gumbel_noise import TARGET_STREAM
from shared.spec.lm_head import Projection
from shared.spec.sampling import TokenCounts
from tests.support.cases.gemm.linear import product_arguments
from tests.support.cases.sampling.sampling import asked, mixed_sampling, mixed_seen
from tests.support.op_case import Arguments, OpCase


def mixed_arguments(seed: int, *, K: int, N: int) -> Arguments:
    """Twenty rows: those of eight requests with all options, and more without options."""
    rng = np.random.default_rng(seed)
    made, request = product_arguments(seed, R=20, K=K, N=N), rng.permutation(8).astype(np.int32)
    request = np.concatenate([request, np.full(12, 8, np.int32)])
    asking, nothing = mixed_sampling(N), asked(1, N)
    both = {
        name: np.concatenate([np.asarray(x), np.asarray(getattr(nothing, name))])
        for name, x in vars(asking).items()
    }
    seen = mixed_seen(rng, 8, N)
    more = {"slots": np.zeros(12, np.int32), "path": np.zeros((12, 5), np.int32)}
    more["on_path"] = more["path"] > 0
    seen = replace(seen, **{k: np.concatenate([getattr(seen, k), x]) for k, x in more.items()})
    return {
        "projection": Projection(made["x"], made["weight"]),
        "seen": seen,
        "positions": np.arange(5, 25, dtype=np.int32),
        "params": replace(asking, **both),
        "request": request,
    }


def greedy_arguments(seed: int, *, R: int, K: int, N: int, temperature: float) -> Arguments:
    """Rows that need only their best token, or are sampled at a temperature."""
    made, nothing = product_arguments(seed, R=R, K=K, N=N), np.zeros((R, 0), np.int32)
    seen = TokenCounts(np.zeros((2, N), np.int32), np.ones(R, np.int32), nothing, nothing > 0)
    return {
        "projection": Projection(made["x"], made["weight"]),
        "seen": seen,
        "positions": np.arange(100, 100 + R, dtype=np.int32),
        "params": asked(R, N, temperature=np.full(R, temperature, np.float32)),
        "request": np.arange(R, dtype=np.int32),
    }


def ranked_arguments(seed: int, *, B: int, k: int, K: int, N: int, width: int) -> Arguments:
    """Returns arguments with k nodes per request; requests after the eighth need no logits."""
    made, asking = product_arguments(seed, R=B * k, K=K, N=N), mixed_sampling(N)
    nothing, kept = asked(max(B - 8, 0), N), min(B, 8)
    params = {
        name: np.concatenate([np.asarray(x)[:kept], np.asarray(getattr(nothing, name))])
        for name, x in vars(asking).items()
    }
    path, slots = np.zeros((B * k, 2), np.int32), np.arange(B * k, dtype=np.int32) // k % 8
    counts = np.random.default_rng(seed).integers(0, 6, (8, N)).astype(np.int32)
    positions = np.arange(5, 5 + B, dtype=np.int32)
    return {
        "projection": Projection(made["x"], made["weight"]),
        "seen": TokenCounts(counts, slots, path, path == 0),
        "positions": positions,
        "params": replace(asking, **params),
        "keys": positions,
        "stream": TARGET_STREAM,
        "width": width,
        "columns": None,
    }


def _all_rows(arguments: Arguments) -> np.ndarray:
    return np.arange(len(arguments["request"]))


def _specified(arguments: Arguments, rows: np.ndarray) -> list[np.ndarray]:
    """Returns the specification's results for some rows."""
    whole, seen = arguments["projection"], arguments["seen"]
    fields = {name: getattr(seen, name)[rows] for name in ("slots", "path", "on_path")}
    given = {name: arguments[name][rows] for name in ("positions", "request")}
    projection = replace(whole, rows=whole.rows[rows])
    params = arguments["params"]
    chosen = spec.fused_choose(projection, replace(seen, **fields), params=params, **given)
    return [chosen.ids, chosen.is_finite]


def _bytes(arguments: Arguments, item_bytes: int) -> int:
    """The rows and the head, once."""
    projection = arguments["projection"]
    return (projection.rows.size + projection.weight.values.size) * item_bytes


_CASE = partial(
    OpCase, op="lm_head", function="fused_choose", wide=("seen", "params"), num_bytes=_bytes
)
_RANKED = partial(_CASE, function="fused_rank")
TABLE = [
    _CASE(name="any rows", make=partial(mixed_arguments, K=96, N=301)),
    _RANKED(name="children", make=partial(ranked_arguments, B=10, k=2, K=96, N=301, width=3)),
] + [
    _CASE(
        name=f"head, {R} rows, {name}",
        make=partial(greedy_arguments, R=R, K=4096, N=151_936, temperature=temperature),
        dtype="bfloat16",
        is_large=True,
        real_rows=_all_rows,
        specify=_specified,
    )
    for name, temperature in {"greedy": 0.0, "at a temperature": 0.8}.items()
    for R in (1, 8, 32, 128, 256, 512)
    if not temperature or R in (8, 512)
]
