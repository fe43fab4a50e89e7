"""Cases of products with LoRA adapters: small ones, and those of a layer of Qwen3-8B."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from shared.spec.lora import AdapterWeights, RowAdapters
from tests.support.cases.gemm.linear import (
    added_arguments,
    gated_arguments,
    normed_arguments,
    product_arguments,
)
from tests.support.op_case import Arguments, OpCase

_Maker = Callable[..., Arguments]
_MAKERS: dict[str, _Maker] = {
    "product": product_arguments,
    "linear_add": added_arguments,
    "rmsnorm_linear": normed_arguments,
    "act_and_mul_linear": gated_arguments,
}


def adapted_arguments(
    seed: int, *, function: str, parts: tuple[int, ...], adapters: int, rank: int, R: int, K: int
) -> Arguments:
    """Arguments of a function of `linear`, with adapters in turn for the rows; some have none."""
    outputs, ranks = sum(parts), rank * len(parts)
    N = outputs // (2 if function == "act_and_mul_linear" else 1)
    arguments, rng = _MAKERS[function](seed, R=R, K=K, N=N), np.random.default_rng(seed)
    weights = AdapterWeights(
        a=rng.standard_normal((adapters, ranks, K), np.float32) / np.float32(K**0.5),
        b=rng.standard_normal((adapters, outputs, rank), np.float32) / np.float32(rank**0.5),
        scales=np.full((adapters, ranks), 2, np.float32),
        factors=np.ones((adapters, outputs), np.float32),
        parts=parts,
    )
    slots = (np.arange(R, dtype=np.int32) + 1) % (adapters + 1)
    weight = replace(arguments["weight"], lora=RowAdapters(weights, slots))
    return arguments | {"weight": weight}


_SMALL = {
    "product": (80,),
    "rmsnorm_linear": (48, 16, 16),
    "linear_add": (80,),
    "act_and_mul_linear": (80, 80),
}
_LARGE = {
    "qkv": ("rmsnorm_linear", 4096, (4096, 1024, 1024)),
    "out": ("linear_add", 4096, (4096,)),
    "gate and up": ("act_and_mul_linear", 4096, (12288, 12288)),
    "down": ("linear_add", 12288, (4096,)),
}
TABLE = [
    OpCase(
        op="linear",
        function=function,
        name="2 x rank 16, three rows",
        make=partial(
            adapted_arguments, function=function, parts=parts, adapters=2, rank=16, R=3, K=96
        ),
    )
    for function, parts in _SMALL.items()
]
TABLE += [
    OpCase(
        op="linear",
        function=function,
        name=f"{name}, {adapters} x rank {rank}, {R} rows",
        make=partial(
            adapted_arguments,
            function=function,
            parts=parts,
            adapters=adapters,
            rank=rank,
            R=R,
            K=K,
        ),
        dtype="bfloat16",
        is_large=True,
    )
    for name, (function, K, parts) in _LARGE.items()
    for adapters, rank in ((1, 16), (8, 16), (8, 64))
    for R in (1, 32, 256, 2048)
]
