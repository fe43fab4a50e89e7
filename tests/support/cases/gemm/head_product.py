"""Cases of the products per head of `latent_attention`: tiny ones, and those of two models."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from shared.models.mixers import LatentAttentionConfig
from shared.spec import latent_attention as spec
from shared.spec.attention_layer import Angles
from shared.spec.linear import Matrix
from shared.spec.lora import RowAdapters
from tests.support.cases.gemm.lora import adapter_weights, in_turn
from tests.support.latent_sizes import DEEPSEEK, DEEPSEEK_RANK, EVEN, GLM, ODD, LatentSizes
from tests.support.op_case import Arguments, OpCase


def query_arguments(
    seed: int, *, sizes: LatentSizes, R: int, adapters: tuple[int, int] | None
) -> Arguments:
    """Rows that begin with query heads, and the weights of the heads."""
    rng = np.random.default_rng(seed)
    angle = rng.uniform(-3, 3, (R, sizes.rope // 2))
    return {
        "query": rng.standard_normal((R, sizes.query_columns), np.float32),
        "config": sizes.config(),
        "kv_b": _weights(rng, sizes, R, adapters),
        "angles": Angles(np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)),
    }


def value_arguments(
    seed: int, *, sizes: LatentSizes, R: int, adapters: tuple[int, int] | None
) -> Arguments:
    """Attention outputs in the latent space, and the weights of the heads."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((R, sizes.heads, sizes.rank), np.float32),
        "config": sizes.config(),
        "kv_b": _weights(rng, sizes, R, adapters),
    }


def _weights(
    rng: np.random.Generator, sizes: LatentSizes, R: int, adapters: tuple[int, int] | None
) -> Matrix:
    """Weights of the heads, with adapters of a number and a rank in turn for the rows."""
    shape = (sizes.heads * (sizes.nope + sizes.value), sizes.rank)
    weight = Matrix.plain(rng.standard_normal(shape, np.float32) / 16)
    if adapters is None:
        return weight
    num, rank = adapters
    slots = in_turn(R, num)
    return replace(weight, lora=row_adapters(sizes.config(), slots, num=num, rank=rank))


def row_adapters(
    config: LatentAttentionConfig, slots: np.ndarray, *, num: int, rank: int
) -> RowAdapters:
    """Adapters of `kv_b`, and the slot of each row."""
    outputs = config.num_heads * config.head_rows
    weights = adapter_weights(7, (num,), rank, (outputs,), config.latent_rank)
    weights = replace(weights, factors=np.ones_like(weights.factors))  # no DoRA
    return RowAdapters(weights, slots)


def _specified_queries(arguments: Arguments, rows: np.ndarray) -> list[np.ndarray]:
    angles = Angles(arguments["angles"].cos[rows], arguments["angles"].sin[rows])
    query, config = arguments["query"][rows], arguments["config"]
    return [spec.latent_queries(query, config, arguments["kv_b"].of_rows(rows), angles)]


def _specified_values(arguments: Arguments, rows: np.ndarray) -> list[np.ndarray]:
    return [
        spec.value_heads(arguments["x"][rows], arguments["config"], arguments["kv_b"].of_rows(rows))
    ]


def _query_bytes(arguments: Arguments, item_bytes: int) -> int:
    """Query heads, W_UK, angles and results."""
    config, R = arguments["config"], len(arguments["query"])
    heads = config.num_heads
    row = heads * (config.nope_size + config.rope_size + config.head_size)
    weights = heads * config.nope_size * config.latent_rank
    return item_bytes * (R * row + weights) + 4 * R * config.rope_size


def _value_bytes(arguments: Arguments, item_bytes: int) -> int:
    """Attention outputs, W_UV and results."""
    x, config = arguments["x"], arguments["config"]
    values = config.num_heads * config.value_size
    return item_bytes * (x.size + values * config.latent_rank + len(x) * values)


def _queries(
    name: str, sizes: LatentSizes, R: int, dtype: str, adapters: tuple[int, int] | None = None
) -> OpCase:
    return OpCase(
        op="latent_attention",
        function="latent_queries",
        name=name,
        make=partial(query_arguments, sizes=sizes, R=R, adapters=adapters),
        dtype=dtype,
        wide=("angles",),
        is_large=dtype == "bfloat16",
        tiled="head_product",
        real_rows=lambda arguments: np.arange(len(arguments["query"])),
        specify=_specified_queries,
        num_bytes=None if adapters else _query_bytes,
    )


def _values(
    name: str, sizes: LatentSizes, R: int, dtype: str, adapters: tuple[int, int] | None = None
) -> OpCase:
    return OpCase(
        op="latent_attention",
        function="value_heads",
        name=name,
        make=partial(value_arguments, sizes=sizes, R=R, adapters=adapters),
        dtype=dtype,
        is_large=dtype == "bfloat16",
        tiled="head_product",
        real_rows=lambda arguments: np.arange(len(arguments["x"])),
        specify=_specified_values,
        num_bytes=None if adapters else _value_bytes,
    )


_MODELS = {"GLM-4.7-Flash": GLM, "DeepSeek-V3": DEEPSEEK, "DeepSeek-V3, TP 8": DEEPSEEK_RANK}
_CALLS: list[tuple[Any, ...]] = [
    ("heads in the input projection", ODD, 5, "float32"),
    ("heads in their own projection", EVEN, 19, "float32"),
    *(
        (f"{name}, {R} rows", sizes, R, "bfloat16")
        for name, sizes in _MODELS.items()
        for R in (1, 4, 16, 32, 128, 512, 2048)
    ),
    ("heads with adapters", ODD, 5, "float32", (2, 16)),
    *(
        (f"{name}, {num} x rank {rank}, {R} rows", sizes, R, "bfloat16", (num, rank))
        for name, sizes in _MODELS.items()
        for num, rank in ((1, 16), (8, 64))
        for R in (1, 32, 512, 2048)
    ),
]
TABLE = [make(*call) for make in (_queries, _values) for call in _CALLS]
