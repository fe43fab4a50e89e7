"""Kernels: two of Triton that call one function, which has a constant, the one by another.

The third reads its arguments and constants by their names; the fourth is of Gluon.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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


@gluon.jit
def fourth_kernel(x_at, lanes: gl.constexpr, sizes: gl.constexpr):
    at = x_at + gl.arange(0, lanes, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(at, gl.max(gl.load(at), 0) - sizes.first)
