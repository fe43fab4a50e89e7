"""Cases of products with LoRA adapters: small ones, and those of Qwen3-8B and Qwen3-30B-A3B."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from shared.models.mlp import MoEConfig
from shared.spec.lora import AdapterWeights, RowAdapters
from tests.support.cases.gemm.linear import (
    added_arguments,
    gated_arguments,
    normed_arguments,
    product_arguments,
)
from tests.support.cases.moe.experts import LARGE as LARGE_EXPERTS
from tests.support.cases.moe.experts import SMALL as SMALL_EXPERTS
from tests.support.cases.moe.experts import added_arguments as added_arguments_of_experts
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
    outputs = sum(parts)
    N = outputs // (2 if function == "act_and_mul_linear" else 1)
    arguments = _MAKERS[function](seed, R=R, K=K, N=N)
    weights = adapter_weights(seed, (adapters,), rank, parts, K)
    weight = replace(arguments["weight"], lora=RowAdapters(weights, in_turn(R, adapters)))
    return arguments | {"weight": weight}


def adapter_weights(
    seed: int, lead: tuple[int, ...], rank: int, parts: tuple[int, ...], K: int
) -> AdapterWeights:
    """Random adapters of a weight; `lead` has their number, and a number of experts if any."""
    rng, outputs, ranks = np.random.default_rng(seed), sum(parts), rank * len(parts)

    def normal(shape: tuple[int, ...]) -> np.ndarray:
        """Random numbers, repeated in a large array, which would take a while to draw."""
        size = math.prod(shape)
        drawn = rng.standard_normal(min(size, 2**20 - 3), np.float32) / np.float32(shape[-1] ** 0.5)
        return np.resize(drawn, shape)

    return AdapterWeights(
        a=normal((*lead, ranks, K)),
        b=normal((*lead, outputs, rank)),
        scales=np.full((*lead, ranks), 2, np.float32),
        factors=1 + normal((*lead, outputs)) ** 2,
        parts=parts,
    )


def in_turn(rows: int, adapters: int) -> np.ndarray:
    """Adapter slots in turn for the rows; some rows have none."""
    return (np.arange(rows, dtype=np.int32) + 1) % (adapters + 1)


def adapted_experts(
    seed: int, *, adapters: int, rank: int, R: int, hidden: int, config: MoEConfig, **how: Any
) -> Arguments:
    """Arguments of `added_experts`, with adapters of the router and of each expert."""
    given = added_arguments_of_experts(seed, R=R, hidden=hidden, config=config, **how)
    block, slots, inner = given["weights"], in_turn(R, adapters), config.intermediate
    of_gate = (1,) if config.num_scored > config.num_experts else ()
    width, stored = config.latent or hidden, config.num_stacked
    parts = {"router": (config.num_experts, *of_gate), "down": (width,)}
    parts["gate_up"] = (inner,) * config.activation.num_projections
    inputs = {"router": hidden, "gate_up": width, "down": inner}
    adapted = {}
    for number, (name, K) in enumerate(inputs.items()):
        lead = (adapters,) if name == "router" else (adapters, stored)
        own = adapter_weights(seed + number, lead, rank, parts[name], K)
        adapted[name] = replace(getattr(block, name), lora=RowAdapters(own, slots))
    return given | {"weights": replace(block, **adapted)}


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
TABLE += [
    OpCase(
        op="experts",
        function="added_experts",
        name="experts, 2 x rank 16, three rows",
        make=partial(adapted_experts, adapters=2, rank=16, R=3, hidden=64, config=SMALL_EXPERTS),
        wide=("norm",),
    )
]
TABLE += [
    OpCase(
        op="experts",
        function="added_experts",
        name=f"experts {name}, {adapters} x rank {rank}, {R} rows",
        make=partial(
            adapted_experts, adapters=adapters, rank=rank, R=R, hidden=2048, config=config
        ),
        dtype="bfloat16",
        wide=("norm",),
        is_large=True,
    )
    for name, config in LARGE_EXPERTS.items()
    for adapters, rank in ((1, 16), (8, 64))
    for R in (1, 32, 512)
]
