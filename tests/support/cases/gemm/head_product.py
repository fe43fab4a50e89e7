"""Cases of the products per head of `latent_attention`: tiny ones, and those of two models."""

from functools import partial

import numpy as np

from shared.spec import latent_attention as spec
from shared.spec.attention_layer import Angles
from shared.spec.linear import Matrix
from tests.support.latent_sizes import DEEPSEEK, DEEPSEEK_RANK, EVEN, GLM, ODD, LatentSizes
from tests.support.op_case import Arguments, OpCase


def query_arguments(seed: int, *, sizes: LatentSizes, R: int) -> Arguments:
    """Rows that begin with query heads, and the weights of the heads."""
    rng = np.random.default_rng(seed)
    angle = rng.uniform(-3, 3, (R, sizes.rope // 2))
    return {
        "query": rng.standard_normal((R, sizes.query_columns), np.float32),
        "config": sizes.config(),
        "kv_b": _weights(rng, sizes),
        "angles": Angles(np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)),
    }


def value_arguments(seed: int, *, sizes: LatentSizes, R: int) -> Arguments:
    """Attention outputs in the latent space, and the weights of the heads."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((R, sizes.heads, sizes.rank), np.float32),
        "config": sizes.config(),
        "kv_b": _weights(rng, sizes),
    }


def _weights(rng: np.random.Generator, sizes: LatentSizes) -> Matrix:
    shape = (sizes.heads * (sizes.nope + sizes.value), sizes.rank)
    return Matrix.plain(rng.standard_normal(shape, np.float32) / 16)


def _specified_queries(arguments: Arguments, rows: np.ndarray) -> list[np.ndarray]:
    angles = Angles(arguments["angles"].cos[rows], arguments["angles"].sin[rows])
    query, config = arguments["query"][rows], arguments["config"]
    return [spec.latent_queries(query, config, arguments["kv_b"], angles)]


def _specified_values(arguments: Arguments, rows: np.ndarray) -> list[np.ndarray]:
    return [spec.value_heads(arguments["x"][rows], arguments["config"], arguments["kv_b"])]


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


def _queries(name: str, sizes: LatentSizes, R: int, dtype: str) -> OpCase:
    return OpCase(
        op="latent_attention",
        function="latent_queries",
        name=name,
        make=partial(query_arguments, sizes=sizes, R=R),
        dtype=dtype,
        wide=("angles",),
        is_large=dtype == "bfloat16",
        tiled="head_product",
        real_rows=lambda arguments: np.arange(len(arguments["query"])),
        specify=_specified_queries,
        num_bytes=_query_bytes,
    )


def _values(name: str, sizes: LatentSizes, R: int, dtype: str) -> OpCase:
    return OpCase(
        op="latent_attention",
        function="value_heads",
        name=name,
        make=partial(value_arguments, sizes=sizes, R=R),
        dtype=dtype,
        is_large=dtype == "bfloat16",
        tiled="head_product",
        real_rows=lambda arguments: np.arange(len(arguments["x"])),
        specify=_specified_values,
        num_bytes=_value_bytes,
    )


_MODELS = {"GLM-4.7-Flash": GLM, "DeepSeek-V3": DEEPSEEK, "DeepSeek-V3, TP 8": DEEPSEEK_RANK}
_CALLS = [
    ("heads in the input projection", ODD, 5, "float32"),
    ("heads in their own projection", EVEN, 19, "float32"),
    *(
        (f"{name}, {R} rows", sizes, R, "bfloat16")
        for name, sizes in _MODELS.items()
        for R in (1, 4, 16, 32, 128, 512, 2048)
    ),
]
TABLE = [make(*call) for make in (_queries, _values) for call in _CALLS]
