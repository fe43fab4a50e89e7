"""Cases of `latent_attention.latent_rows`: tiny ones, and those of two models."""

from functools import partial

import numpy as np

from shared.spec import attention
from shared.spec import latent_attention as spec
from shared.spec.attention_layer import Angles
from shared.spec.linear import Matrix
from tests.support.cases.attention.attention_layer import AttentionRows
from tests.support.latent_sizes import DEEPSEEK, EVEN, GLM, ODD, LatentSizes
from tests.support.op_case import Arguments, OpCase

PAGE = 16
INTEGERS = ("request", "positions", "places", "first", "until", "page_table")
"""Rows' integers, which steps have as int32."""


def arguments_of(seed: int, *, sizes: LatentSizes, requests: int, count: int) -> Arguments:
    """Rows of requests at `count` consecutive positions, and pools of two layers."""
    rng = np.random.default_rng(seed)
    columns = -(-(count + PAGE) // PAGE)
    table = 1 + rng.permutation(requests * columns).reshape(requests, columns)
    starts, first = np.arange(requests + 1) * count, rng.integers(0, PAGE, requests)
    rows = attention.causal_rows(starts, first, 0 * first, table, int(starts[-1]))
    angle = rng.uniform(-3, 3, (len(rows.request), sizes.rope // 2))
    narrow = {name: x.astype(np.int32) for name, x in vars(rows).items() if name in INTEGERS}
    return {
        "inputs": rng.standard_normal((len(angle), sizes.input_columns), np.float32),
        "config": sizes.config(),
        "weights": spec.LatentWeights(
            latent_norm=_norm(rng, sizes.rank),
            query_norm=None if sizes.query_rank is None else _norm(rng, sizes.query_rank),
            queries=None,
            kv_b=Matrix.plain(np.zeros((1, 1), np.float32)),
        ),
        "angles": Angles(np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)),
        "rows": AttentionRows(
            **vars(rows) | narrow, row_starts=starts.astype(np.int32), max_rows=count
        ),
        "pools": np.zeros((2, 1, 1 + table.size, PAGE, 1, sizes.rank + sizes.rope), np.float32),
        "layer": 1,
    }


def _norm(rng: np.random.Generator, size: int) -> np.ndarray:
    return (1 + rng.standard_normal(size) / 4).astype(np.float32)


def _specified(arguments: Arguments, rows: np.ndarray) -> list[np.ndarray]:
    """Returns the query latents; `tests/device` compares the pools."""
    angles = Angles(arguments["angles"].cos[rows], arguments["angles"].sin[rows])
    inputs, config = arguments["inputs"][rows], arguments["config"]
    return [spec.latent_rows(inputs, config, arguments["weights"], angles)[0]]


def _bytes(arguments: Arguments, item_bytes: int) -> int:
    """Input projection, query latents, cache rows and angles."""
    inputs, config = arguments["inputs"], arguments["config"]
    row = inputs.shape[1] + (config.query_rank or 0) + config.head_size
    return len(inputs) * (item_bytes * row + 4 * config.rope_size)


def _case(name: str, sizes: LatentSizes, requests: int, count: int, dtype: str) -> OpCase:
    return OpCase(
        op="latent_attention",
        function="latent_rows",
        name=name,
        make=partial(arguments_of, sizes=sizes, requests=requests, count=count),
        dtype=dtype,
        wide=("weights", "angles"),
        in_place=("pools",),
        is_large=dtype == "bfloat16",
        real_rows=lambda arguments: np.arange(len(arguments["inputs"])),
        specify=_specified,
        num_bytes=_bytes,
    )


TABLE = [
    _case("two requests without query latents", ODD, 2, 5, "float32"),
    _case("two requests", EVEN, 2, 7, "float32"),
    *(
        _case(f"{name}, {requests} x {count} rows", sizes, requests, count, "bfloat16")
        for name, sizes in (("GLM-4.7-Flash", GLM), ("DeepSeek-V3", DEEPSEEK))
        for requests, count in ((1, 1), (8, 1), (32, 1), (32, 4), (1, 512), (1, 2048))
    ),
]
