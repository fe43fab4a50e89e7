"""Grouped GEMM of experts: tiles of slots, and steps along the inputs (Triton)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.triton_gpu.gemm.fp8_w8a16 import four
from shared.models.formats.fp8_w8a16 import FP8_BLOCK, ScaleLayout

_BLOCK = tl.constexpr(FP8_BLOCK)


class ExpertWeights(NamedTuple):
    """Expert weights, and their scales if they are packed FP8.

    `place_of` returns pointers to the weights and scales of some outputs; a scale per output is
    loaded.
    """

    weights: Any
    scales: Any


class ExpertGemmSizes(NamedTuple):
    """Outputs and inputs of an expert's GEMM, and slots of a row.

    Attributes:
      shares: Layout of packed FP8 weights; None: the weights are bfloat16 or float32.
      is_scaled: Whether the next norm has a scale.
    """

    N: int
    K: int
    slots: int
    shares: ScaleLayout | None
    is_scaled: bool


class ExpertGemmConfig(NamedTuple):
    """Tile config of a GEMM; lanes of a tile, and whether tiles are expert blocks."""

    lanes: int
    columns: int
    depth: int
    stages: int
    is_grouped: bool


class ExpertTile(NamedTuple):
    """Expert of a tile, number of its slots, and the slots."""

    expert: Any
    count: Any
    slots: Any


@triton.jit
def tile_of(number, ids_at, expert_blocks, config: tl.constexpr):
    """Returns a tile of expert-aligned slots; without expert blocks, each slot is a tile."""
    lane = tl.arange(0, config.lanes)
    if config.is_grouped:
        expert, count = (
            tl.load(expert_blocks.experts + number),
            tl.load(expert_blocks.counts + number),
        )
        at = expert_blocks.slots + tl.load(expert_blocks.firsts + number) + lane
        slots = tl.load(at, mask=lane < count, other=0)
        expert = tl.where(count > 0, expert, 0)
    else:
        expert = tl.load(ids_at + number)
        count = tl.where(expert >= 0, 1, 0)
        slots = number + lane * 0
    return ExpertTile(expert=expert, count=count, slots=slots)


@triton.jit
def product_of(
    x_at,
    is_slot,
    stored,
    expert,
    outputs: tl.constexpr,
    output,
    is_output,
    has_all: tl.constexpr,
    sizes: tl.constexpr,
    config: tl.constexpr,
    is_launched: tl.constexpr,
):
    """Multiplies some slots, [lanes, 1] pointers, with outputs of an expert, [outputs, lanes].

    The weight is the wide side of the tensor core (swap-AB).
    """
    K: tl.constexpr = sizes.K
    of_weight = place_of(stored, expert, outputs, output, is_output, has_all, sizes)
    wide: tl.constexpr = output.shape[0]
    lanes: tl.constexpr = config.lanes
    acc = tl.zeros((wide, lanes), tl.float32)
    for at in tl.range(0, K, config.depth, num_stages=config.stages):
        if sizes.shares is not None:
            acc = add_four(
                acc, of_weight, x_at, at, is_slot, is_output, has_all, sizes, is_launched
            )
        else:
            x = tl.trans(part_of(x_at, at, is_slot, False, K, config.depth))
            weight = part_of(of_weight.weights, at, is_output, has_all, K, config.depth)
            acc = tl.dot(weight, x, acc, input_precision="ieee")
    return acc


@triton.jit
def place_of(
    stored,
    expert,
    outputs: tl.constexpr,
    output,
    is_output,
    has_all: tl.constexpr,
    sizes: tl.constexpr,
):
    """Returns pointers to some outputs of an expert, [outputs, 1], and their scales."""
    expert = expert.to(tl.int64)
    if sizes.shares is not None:
        share: tl.constexpr = sizes.shares.outputs
        scale = expert * (outputs // share) + output // share
        place = place_in_words(stored, expert * outputs + output, scale, is_output, has_all, sizes)
    else:
        weights = stored.weights + ((expert * outputs + output) * sizes.K)[:, None]
        place = ExpertWeights(weights=weights, scales=stored.scales)
    return place


@triton.jit
def place_in_words(stored, output, scale, is_output, has_all: tl.constexpr, sizes: tl.constexpr):
    """Returns pointers to some packed FP8 outputs and their scales, numbered along the outputs."""
    weights = stored.weights + (output.to(tl.int64) * (sizes.K // 4))[:, None]
    scales = stored.scales + (scale * sizes.shares.scales_in)[:, None]
    if sizes.shares.scales_in == 1:
        scales = _scale_at(scales, is_output, has_all)
    return ExpertWeights(weights=weights, scales=scales)


@triton.jit
def _scale_at(at, is_output, has_all: tl.constexpr):
    return tl.load(at) if has_all else tl.load(at, mask=is_output[:, None], other=0.0)


@triton.jit
def part_of(at, step, is_one, has_all: tl.constexpr, K: tl.constexpr, depth: tl.constexpr):
    """Loads a step of some rows or outputs, from [rows, 1] pointers; zero out of bounds."""
    inputs = step + tl.arange(0, depth)
    at += inputs[None, :]
    if has_all and K % depth == 0:
        part = tl.load(at)
    elif K % depth == 0:
        part = tl.load(at, mask=is_one[:, None], other=0.0)
    else:
        part = tl.load(at, mask=is_one[:, None] & (inputs < K)[None, :], other=0.0)
    return part


@triton.jit
def add_four(
    acc,
    of_weight,
    x_at,
    step,
    is_row,
    is_column,
    has_all: tl.constexpr,
    sizes: tl.constexpr,
    is_launched: tl.constexpr,
):
    """Adds the products of a block of inputs with a packed FP8 weight, in input order."""
    x0 = tl.trans(part_of(x_at, step, is_row, False, 32, 32))
    x1 = tl.trans(part_of(x_at, step + 32, is_row, False, 32, 32))
    x2 = tl.trans(part_of(x_at, step + 64, is_row, False, 32, 32))
    x3 = tl.trans(part_of(x_at, step + 96, is_row, False, 32, 32))
    words = part_of(of_weight.weights, step // 4, is_column, has_all, 32, 32)
    scale = of_weight.scales
    if sizes.shares.scales_in > 1:
        scale = _scale_at(scale + step // _BLOCK, is_column, has_all)
    w0, w1, w2, w3 = four(words, scale, is_launched)
    acc = tl.dot(w0.to(x0.dtype), x0, acc, input_precision="ieee")
    acc = tl.dot(w1.to(x0.dtype), x1, acc, input_precision="ieee")
    acc = tl.dot(w2.to(x0.dtype), x2, acc, input_precision="ieee")
    return tl.dot(w3.to(x0.dtype), x3, acc, input_precision="ieee")
