"""Cases of the products of `linear`: small and odd ones, and those of a layer of Qwen3-8B."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
from jaxtyping import Float32

from kernels.kernel_limits import MOST_SEPARATE_BLOCKS
from shared.models.activation import GELU_TANH, RELU2, Activation
from shared.models.formats import fp8
from shared.models.formats.fp8 import Granularity
from shared.models.formats.int4_encoding import Int4Encoding, scale_shape, spread
from shared.models.formats.mxfp4 import GROUP, NUMBERS
from shared.spec.linear import Matrix, NormedStream
from tests.support.op_case import Arguments, OpCase
from tests.support.weight_formats import int4_matrix, mxfp4_matrix, w8a16_matrix

EPS = 1e-6


def _weight(rng: np.random.Generator, outputs: int, inputs: int) -> Matrix:
    """Random numbers, repeated in a large one: drawing 600 million of them would take a while."""
    drawn = rng.standard_normal(min(outputs * inputs, 2**20 - 3), np.float32)
    return Matrix.plain(np.resize(drawn / np.float32(inputs**0.5), (outputs, inputs)))


def in_fp8(
    wide: Float32[np.ndarray, "*stack N K"], granularity: Granularity, scale_dtype: str = "bfloat16"
) -> Matrix:
    """A weight in FP8, of which neighbouring scales differ."""
    shape = fp8.scale_shape(wide.shape, granularity)
    sizes = 2 + np.resize(np.arange(7, dtype=np.float32), shape)
    scales = (sizes / np.float32(64 * wide.shape[-1] ** 0.5)).astype(scale_dtype)
    codes = fp8.apply_scales(wide.copy(), 1 / scales.astype(np.float32))
    return w8a16_matrix(codes.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scales, granularity)


def in_int4(wide: Float32[np.ndarray, "*stack N K"], encoding: Int4Encoding) -> Matrix:
    """A weight in INT4, of which neighbouring scales and zero points differ."""
    shape = scale_shape(wide.shape, encoding.group)
    sizes = (12 + np.resize(np.arange(7, dtype=np.float32), shape)) / np.float32(32)
    scales = (sizes / np.float32(wide.shape[-1] ** 0.5)).astype(ml_dtypes.bfloat16)
    scales = scales.astype(np.float32)
    zeros = np.resize(np.arange(7, 10, dtype=np.uint8), shape)
    codes = wide / spread(scales, wide.shape[-1]) + 8
    codes = codes.round().clip(0, 15).astype(np.uint8)
    return int4_matrix(codes, scales, zeros if encoding.has_zeros else None, encoding)


def in_mxfp4(wide: Float32[np.ndarray, "*stack N K"]) -> Matrix:
    """A weight in MXFP4 with about its numbers, of which neighbouring scales differ."""
    groups = (*wide.shape[:-1], wide.shape[-1] // GROUP)
    exponents = 125 - np.resize(np.arange(3), groups) - int(np.log2(wide.shape[-1])) // 2
    sizes = np.abs(wide) / np.repeat(np.ldexp(np.float32(1), exponents - 127), GROUP, axis=-1)
    between = (NUMBERS[:7] + NUMBERS[1:8]) / 2
    codes = np.searchsorted(between, sizes).astype(np.uint8) + 8 * np.signbit(wide).astype(np.uint8)
    return mxfp4_matrix(codes, exponents.astype(np.uint8))


Quantized = Callable[[Float32[np.ndarray, "*stack N K"]], Matrix]
QUANTIZED: dict[str, Quantized] = {
    "FP8": partial(in_fp8, granularity=Granularity.BLOCK),
    "FP8 by channels": partial(in_fp8, granularity=Granularity.CHANNEL),
    "FP8 by channels in float32": partial(
        in_fp8, granularity=Granularity.CHANNEL, scale_dtype="float32"
    ),
    "INT4": partial(in_int4, encoding=Int4Encoding(128, "BF16", has_zeros=False)),
    "INT4 in groups of 32": partial(in_int4, encoding=Int4Encoding(32, "BF16", has_zeros=False)),
    "AWQ": partial(in_int4, encoding=Int4Encoding(128, "F16", has_zeros=True)),
    "MXFP4": in_mxfp4,
}
"""Functions that quantise a weight, by the name of the format."""
OF_EXPERTS = ("FP8 by channels in float32", "MXFP4")
"""Formats of experts only."""


def quantized_arguments(
    seed: int, *, function: str, quantized: Quantized, R: int, K: int, N: int
) -> Arguments:
    """Returns the arguments of a function, with its weight quantised."""
    arguments = _MAKERS[function](seed, R=R, K=K, N=N)
    return arguments | {"weight": quantized(arguments["weight"].values)}


def product_arguments(seed: int, *, R: int, K: int, N: int) -> Arguments:
    """Rows, and a weight."""
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((R, K), np.float32), "weight": _weight(rng, N, K)}


def residual_arguments(seed: int, *, R: int, K: int, N: int) -> Arguments:
    """Rows, a weight, and the counters of a pass."""
    arrivals = np.zeros(MOST_SEPARATE_BLOCKS, np.int32)
    return product_arguments(seed, R=R, K=K, N=N) | {"arrivals": arrivals}


def added_arguments(seed: int, *, R: int, K: int, N: int) -> Arguments:
    """Rows, a weight, what is added, and the scale of the norm that reads the sum."""
    rng = np.random.default_rng(seed)
    stream = NormedStream(rng.standard_normal((R, N), np.float32))
    norm = 1 + rng.standard_normal(N, np.float32) / 4
    return {
        "x": rng.standard_normal((R, K), np.float32),
        "weight": _weight(rng, N, K),
        "stream": stream,
        "factor": 1.0,
        "norm": norm,
    }


def normed_arguments(seed: int, *, R: int, K: int, N: int) -> Arguments:
    """Rows of a stream that are read through a norm, and a weight."""
    rng = np.random.default_rng(seed)
    rows, norm = 3 * rng.standard_normal((R, K), np.float32), rng.standard_normal(K, np.float32)
    stream = NormedStream(rows, 1 + norm / 4)
    return {"stream": stream, "eps": EPS, "weight": _weight(rng, N, K)}


def gated_arguments(seed: int, *, R: int, K: int, N: int) -> Arguments:
    """Same as `normed_arguments`, with a gate."""
    return normed_arguments(seed, R=R, K=K, N=2 * N)


def gelu_arguments(seed: int, *, R: int, K: int, N: int) -> Arguments:
    """Same as `gated_arguments`, with the activation of Gemma."""
    return gated_arguments(seed, R=R, K=K, N=N) | {"activation": Activation(GELU_TANH)}


def relu2_arguments(seed: int, *, R: int, K: int, N: int) -> Arguments:
    """Same as `normed_arguments`, with the activation of Nemotron."""
    return normed_arguments(seed, R=R, K=K, N=N) | {"activation": Activation(RELU2)}


_MAKERS = {
    "product": product_arguments,
    "product_float32": product_arguments,
    "residual_product": residual_arguments,
    "linear_add": added_arguments,
    "rmsnorm_linear": normed_arguments,
    "act_and_mul_linear": gated_arguments,
}
_SMALL = {
    "three rows": {"R": 3, "K": 96, "N": 80},
    "many rows": {"R": 37, "K": 64, "N": 192},
}
# The products of a layer of Qwen3-8B, and its head; of Qwen3-32B what one of four ranks has. Heads
# of at most 16,384 tokens have the tiles of layers, with larger results.
_LARGE = {
    "rmsnorm_linear": {"qkv": (4096, 6144)},
    "linear_add": {"out": (4096, 4096), "down": (12288, 4096), "32B down": (25600, 1280)},
    "act_and_mul_linear": {"gate and up": (4096, 12288)},
    "product_float32": {
        "head": (4096, 151936),
        "head of 4,096 tokens": (256, 4096),
        "head of 16,000 tokens": (4096, 16000),
    },
}
# Also those of Qwen3.5-27B and of Qwen3.5-35B-A3B, which have wide outputs, and the output
# projections of Gemma 4 31B, which norms follow.
_LARGE_QUANTIZED = {
    "rmsnorm_linear": {"qkv": (4096, 6144), "35B in": (2048, 12288)},
    "linear_add": {"out": (4096, 4096), "down": (12288, 4096)},
    "residual_product": {"31B out": (8192, 5376), "31B down": (21504, 5376)},
    "act_and_mul_linear": {"gate and up": (4096, 12288), "27B gate and up": (5120, 17408)},
}
_ROWS = (1, 8, 32, 128, 256, 512, 2048)
_LAYER_ROWS = (*_ROWS[:3], 64, *_ROWS[3:])
_SOME_ROWS = {
    **dict.fromkeys(("qkv", "out", "down", "gate and up"), _LAYER_ROWS),
    "head": (1, 32, 512),
    "head of 4,096 tokens": (768,),
    "head of 16,000 tokens": (512, 768),
    **dict.fromkeys(("31B out", "31B down"), (1, 32, 512)),
    "32B down": (1, 32),
}
TABLE = [
    OpCase(op="linear", function=function, name=name, make=partial(make, **sizes))
    for function, make in _MAKERS.items()
    for name, sizes in _SMALL.items()
]
TABLE += [
    OpCase(
        op="linear",
        function=function,
        name=f"{name}, {R} rows",
        make=partial(_MAKERS[function], R=R, K=K, N=N),
        dtype="bfloat16",
        is_large=True,
    )
    for function, cases in _LARGE.items()
    for name, (K, N) in cases.items()
    for R in _SOME_ROWS.get(name, _ROWS)
]
TABLE.append(
    OpCase(
        op="linear",
        function="act_and_mul_linear",
        name="no gate, three rows",
        make=partial(relu2_arguments, R=3, K=96, N=80),
    )
)
TABLE += [
    OpCase(
        op="linear",
        function="act_and_mul_linear",
        name=f"no gate, {R} rows",
        make=partial(relu2_arguments, R=R, K=2688, N=3712),
        dtype="bfloat16",
        is_large=True,
    )
    for R in (1, 32, 512)
]
TABLE += [
    OpCase(
        op="linear",
        function="act_and_mul_linear",
        name=f"GELU gate and up, {R} rows",
        make=partial(gelu_arguments, R=R, K=2560, N=10240),
        dtype="bfloat16",
        is_large=True,
    )
    for R in (1, 32, 512)
]
TABLE += [
    OpCase(
        op="linear",
        function=function,
        name=f"{name}, three rows",
        make=partial(
            quantized_arguments, function=function, quantized=quantized, R=3, K=128, N=256
        ),
    )
    for function in _MAKERS
    for name, quantized in QUANTIZED.items()
    if name in ("FP8", "AWQ") or function == "act_and_mul_linear" and name not in OF_EXPERTS
]
TABLE += [
    OpCase(
        op="linear",
        function=function,
        name=f"{kind} {name}, {R} rows",
        make=partial(quantized_arguments, function=function, quantized=quantized, R=R, K=K, N=N),
        dtype="bfloat16",
        is_large=True,
    )
    for function, cases in _LARGE_QUANTIZED.items()
    for name, (K, N) in cases.items()
    for kind, quantized in QUANTIZED.items()
    for R in _SOME_ROWS.get(name, _ROWS)
    if kind in ("FP8", "INT4")
    or (kind not in OF_EXPERTS and name == "gate and up" and R in (1, 32, 512))
]
TABLE += [
    OpCase(
        op="linear",
        function=function,
        name=f"INT4 in groups of 32 26B {name}, {R} rows",
        make=partial(
            quantized_arguments,
            function=function,
            quantized=QUANTIZED["INT4 in groups of 32"],
            R=R,
            K=K,
            N=N,
        ),
        dtype="bfloat16",
        is_large=True,
    )
    for function, name, K, N in (
        ("rmsnorm_linear", "qkv", 2816, 8192),
        ("product", "out", 4096, 2816),
        ("act_and_mul_linear", "gate and up", 2816, 2112),
        ("linear_add", "down", 2112, 2816),
    )
    for R in (1, 32, 512)
]
SEGMENTS = 2
TABLE += [
    replace(case, name=f"{case.name}, {SEGMENTS} segments", segments=SEGMENTS)
    for case in TABLE
    if case.function in ("linear_add", "residual_product")
    and case.is_large
    and re.fullmatch(r"(FP8 |INT4 )?((31B )?(out|down)|32B down), \d+ rows", case.name)
]

_COPIED = {"depth": 64, "swapped": 0, "described": 1, "persistent": 1, "widens": 1}
THREE_HALVES = {
    "gate and up, 128 rows": {"rows": 64, "columns": 96, "warps": 4, "stages": 6} | _COPIED,
    "gate and up, 256 rows": {"rows": 128, "columns": 96, "warps": 8, "stages": 5} | _COPIED,
    "qkv, 512 rows": {"rows": 128, "columns": 192, "warps": 8, "stages": 4} | _COPIED,
}
"""Tiles of 192 columns of the weight, by the names of the cases above that they fill a GPU with."""
TABLE += [
    replace(case, name=f"{case.name}, 192 columns", tiles=THREE_HALVES[case.name])
    for case in TABLE
    if case.name in THREE_HALVES
]

STORED_SUMS = {"rows": 128, "columns": 256, "warps": 8, "stages": 3} | _COPIED
"""Tiles of which shared memory has half of the sums of finished segments."""
TABLE += [
    replace(case, name=f"{case.name}, 256 columns", tiles=STORED_SUMS)
    for case in TABLE
    if case.name == f"down, 2048 rows, {SEGMENTS} segments"
]
