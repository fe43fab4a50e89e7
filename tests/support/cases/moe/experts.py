"""Cases of `experts.added_experts`: small and odd ones, and blocks of Qwen3.5-35B-A3B and 30B-A3B.

The large ones have a quarter of those models' experts: what a kernel does with one is the same.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from shared.models.activation import GELU_TANH, RELU2, SWIGLU_OAI, Activation
from shared.models.mlp import ExpertTensors, MoEConfig
from shared.spec.experts import Experts
from shared.spec.linear import Matrix, NormedStream
from tests.support.cases.gemm.linear import QUANTIZED, Quantized
from tests.support.op_case import Arguments, OpCase

EPS = 1e-6


def config_of(*, num_experts: int, num_chosen: int, intermediate: int, shared: bool, **how: object):
    """Experts with softmax weights, renormalised; the shared one has a gate."""
    usual = {
        "scores": "softmax",
        "has_score_bias": False,
        "num_groups": 1,
        "num_chosen_groups": 1,
        "is_renormalised": True,
        "routed_factor": 1.0,
        "output_factor": 1.0,
        "has_bias": False,
        "activation": Activation(),
        "has_expert_scale": False,
        "parallel": None,
        "tensors": ExpertTensors(),
    }
    return MoEConfig(
        num_experts=num_experts,
        top_k=num_chosen,
        intermediate=intermediate,
        shared_intermediate=intermediate if shared else 0,
        shared_is_gated=shared,
        **(usual | how),
    )


def _matrix(rng: np.random.Generator, *shape: int) -> Matrix:
    """Random numbers, repeated in a large one: drawing 200 million of them would take a while."""
    drawn = rng.standard_normal(min(int(np.prod(shape)), 2**20 - 3), np.float32)
    return Matrix.plain(np.resize(drawn / np.float32(shape[-1] ** 0.5), shape))


def added_arguments(
    seed: int,
    *,
    R: int,
    hidden: int,
    config: MoEConfig,
    quantized: Quantized | None = None,
) -> Arguments:
    """Rows of a stream, the experts of a layer, and the scale of the norm that reads the sum.

    The rows are larger than what is added, so that an expert that only just is or is not chosen
    does not decide the error.

    Args:
      quantized: Quantises the matrices; None: they are numbers.
    """
    rng, inner = np.random.default_rng(seed), config.intermediate
    norms = 1 + rng.standard_normal((2, hidden), np.float32) / 4
    bias = rng.standard_normal(config.num_experts, np.float32) if config.has_score_bias else None
    router = _matrix(rng, config.num_scored, hidden)
    scale = 1 + 0.25 * np.random.default_rng(seed + 1).standard_normal(config.num_experts)
    width, latent = config.latent or hidden, config.latent
    matrices = [
        _matrix(rng, config.num_stacked, *x)
        for x in ((config.activation.num_projections * inner, width), (width, inner))
    ]
    if quantized is not None:
        matrices = [quantized(matrix.values) for matrix in matrices]
    if config.has_bias:
        router, *matrices = (
            replace(x, bias=rng.standard_normal(x.values.shape[:-1], np.float32) / 4)
            for x in (router, *matrices)
        )
    weights = Experts(
        router=router,
        gate_up=matrices[0],
        down=matrices[1],
        score_bias=bias,
        shared_gate_up=None,
        shared_down=None,
        latent_in=_matrix(rng, latent, hidden) if latent else None,
        latent_out=_matrix(rng, hidden, latent) if latent else None,
        expert_scale=scale.astype(np.float32) if config.has_expert_scale else None,
    )
    return {
        "stream": NormedStream(3 * rng.standard_normal((R, hidden), np.float32), norms[0]),
        "eps": EPS,
        "config": config,
        "weights": weights,
        "norm": norms[1],
    }


def large_cases(
    name: str,
    hidden: int,
    config: MoEConfig,
    *,
    rows: tuple[int, ...] = (1, 32, 512),
    quantized: Quantized | None = None,
) -> list[OpCase]:
    """Cases in bfloat16 of real sizes, one for each number of rows."""
    return [
        OpCase(
            op="experts",
            function="added_experts",
            name=f"{name}, {R} rows",
            make=partial(added_arguments, R=R, hidden=hidden, config=config, quantized=quantized),
            dtype="bfloat16",
            wide=("norm",),
            is_large=True,
        )
        for R in rows
    ]


SMALL = config_of(num_experts=8, num_chosen=3, intermediate=32, shared=True)
GROUPS = config_of(
    num_experts=12,
    num_chosen=4,
    intermediate=48,
    shared=False,
    scores="sigmoid",
    has_score_bias=True,
    num_groups=3,
    num_chosen_groups=2,
    routed_factor=2.5,
)
LARGE = {
    "64 of 512 and one": config_of(num_experts=64, num_chosen=8, intermediate=512, shared=True),
    "32 of 768": config_of(num_experts=32, num_chosen=8, intermediate=768, shared=False),
}
OSS = config_of(
    num_experts=32,
    num_chosen=4,
    intermediate=2880,
    shared=False,
    has_bias=True,
    activation=Activation(SWIGLU_OAI, 1.702, 7.0),
)
"""The experts of gpt-oss-20b."""
NEMOTRON = config_of(
    num_experts=32,
    num_chosen=6,
    intermediate=1856,
    shared=False,
    scores="sigmoid",
    has_score_bias=True,
    routed_factor=2.5,
    activation=Activation(RELU2),
)
"""Some experts of Nemotron 3 Nano, without their shared expert."""
LATENTS = replace(NEMOTRON, latent=1024)
NO_GATE = config_of(
    num_experts=6, num_chosen=2, intermediate=48, shared=False, activation=Activation(RELU2)
)
GEMMA = config_of(
    num_experts=128,
    num_chosen=8,
    intermediate=704,
    shared=False,
    activation=Activation(GELU_TANH),
    has_expert_scale=True,
)
"""The experts of Gemma 4 26B-A4B."""
TABLE = [
    OpCase(
        op="experts",
        function="added_experts",
        name=name,
        make=partial(added_arguments, R=R, hidden=64, config=config),
        wide=("norm",),
    )
    for name, R, config in (
        ("three rows", 3, SMALL),
        ("groups, many rows", 37, GROUPS),
        ("no gate", 3, NO_GATE),
        ("latents", 3, replace(NO_GATE, latent=32, output_factor=0.22)),
    )
]
TABLE += [
    case
    for name, config in LARGE.items()
    for case in large_cases(name, 2048, config, rows=(1, 4, 8, 32, 128, 512))
]
TABLE += large_cases(
    "FP8 64 of 512 and one",
    2048,
    LARGE["64 of 512 and one"],
    rows=(1, 4, 8, 32),
    quantized=QUANTIZED["FP8"],
)
TABLE += large_cases("scales, 128 of 704", 2816, GEMMA, rows=(1, 4, 8, 32, 512))
TABLE += large_cases(
    "INT4 scales, 32 of 704",
    2816,
    replace(GEMMA, num_experts=32),
    quantized=QUANTIZED["INT4 in groups of 32"],
)
TABLE += large_cases("biases, 32 of 2880", 2880, OSS)
TABLE += large_cases("no gate, 32 of 1856", 2688, NEMOTRON, rows=(1, 4, 8, 32, 512))
TABLE += [
    case
    for kind in ("FP8", "FP8 by channels in float32")
    for case in large_cases(
        f"{kind} no gate, 32 of 1856", 2688, NEMOTRON, quantized=QUANTIZED[kind]
    )
]
TABLE += large_cases("latents of 1024, 32 of 1856", 2688, LATENTS)
TABLE += [
    case
    for kind, quantized in QUANTIZED.items()
    for case in large_cases(f"{kind} 32 of 768", 2048, LARGE["32 of 768"], quantized=quantized)
]
MXFP4 = large_cases(
    "MXFP4 8 of 2880",
    2880,
    config_of(num_experts=8, num_chosen=4, intermediate=2880, shared=False),
    quantized=QUANTIZED["MXFP4"],
)
COPIED = {"copies_packed": 1, "depth": 256, "down_depth": 256}
TABLE += MXFP4
BY_TMA = ("MXFP4 8 of 2880", "FP8 64 of 512 and one")
TABLE += [
    replace(case, name=f"{case.name}, by TMA", tiles=COPIED)
    for case in TABLE
    if case.name in [f"{name}, {R} rows" for name in BY_TMA for R in (1, 32)]
]
