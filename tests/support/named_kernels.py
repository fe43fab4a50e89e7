"""Two kernels of Triton that call one function, which has a constant; the one by another."""

import triton
import triton.language as tl

SCALE = tl.constexpr(3)


@triton.jit
def _scaled(x):
    return x * SCALE


@triton.jit
def _shifted(x):
    return _scaled(x) + 1


@triton.jit
def first_kernel(x_at, lanes: tl.constexpr, sizes: tl.constexpr):
    at = x_at + tl.arange(0, lanes)
    tl.store(at, _shifted(tl.load(at)) * sizes[1])


@triton.jit
def second_kernel(x_at, lanes: tl.constexpr, sizes: tl.constexpr):
    at = x_at + tl.arange(0, lanes)
    tl.store(at, _scaled(tl.load(at)) - sizes[0])
