"""Three kernels of Triton: two that call one function, which has a constant, the one by another.

The third reads its arguments and constants by their names.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Sizes(NamedTuple):
    """Constants of a kernel."""

    first: Any
    second: int


class Place(NamedTuple):
    """Arguments of a kernel."""

    at: Any
    shift: int


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


@triton.jit
def third_kernel(place, lanes: tl.constexpr, sizes: tl.constexpr):
    at = place.at + tl.arange(0, lanes)
    tl.store(at, tl.load(at) - sizes.second - place.shift)
