"""Grouped GEMM of experts: tiles of slots, and steps along the inputs (Pallas, Triton backend)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.gemm.fp8_w8a16 import four
from shared.models.formats.fp8_w8a16 import FP8_BLOCK, shares_of


class ExpertWeights(NamedTuple):
    """Expert weights, and their scales if they are packed FP8."""

    weights: Any
    scales: Any


class ExpertGemmConfig(NamedTuple):
    """Tile config of a GEMM; lanes of a tile, and slots of a row."""

    lanes: int
    columns: int
    depth: int
    slots: int
    interpret: bool


class ExpertTile(NamedTuple):
    """Expert of a tile, number of its slots, and the slots."""

    expert: Any
    count: Any
    slots: Any


def tile_of(number, ids_ref, expert_blocks, config):
    """Returns a tile of expert-aligned slots; without expert blocks, each slot is a tile."""
    lane = lax.iota(jnp.int32, config.lanes)
    if expert_blocks is None:
        expert = ids_ref[lax.div(number, config.slots), lax.rem(number, config.slots)]
        # A select between constants would have the type of its condition.
        count = jnp.minimum(jnp.maximum(expert + 1, 0), 1)
        return ExpertTile(expert=expert, count=count, slots=number + lane * 0)
    expert, count, first = (
        ref[number] for ref in (expert_blocks.experts, expert_blocks.counts, expert_blocks.firsts)
    )
    rows = expert_blocks.slots.shape[1]
    at = expert_blocks.slots.at[expert, first - expert * rows + lane]
    slots = pltriton.load(at, mask=lane < count, other=0)
    return ExpertTile(expert=expert, count=count, slots=slots)


def product(x_ref, row, is_row, stored, of_expert, output, is_output, has_all, config):
    """Multiplies some rows with outputs of an expert, [outputs, lanes].

    The weight is the wide side of the tensor core (swap-AB).

    Args:
      x_ref: Rows, `[R, inputs]`.
      row, is_row: Row of each lane, and a mask of the lanes that have one.
      stored: Expert weights.
      of_expert: Indices of the layer and of the expert.
      output, is_output: Outputs to compute, and a mask of those in bounds.
      has_all: Whether all outputs are in bounds.
      config: Tile config.
    """
    K = x_ref.shape[1]
    exact = {"precision": lax.Precision.HIGHEST}

    def part(ref, lead, inputs, is_one, has_all, size):
        masks = [] if has_all else [is_one[:, None]]
        masks += [] if size % len(inputs) == 0 else [(inputs < size)[None, :]]
        masked = {}
        if masks:
            keep = masks[0] if len(masks) == 1 else masks[0] & masks[1]
            keep = jnp.broadcast_to(keep, (len(is_one), len(inputs)))
            masked = {"mask": keep, "other": 0.0 if ref.dtype != jnp.int32 else 0}
        return pltriton.load(ref.at[(*lead, inputs[None, :])], **masked)

    def rows_at(inputs):
        return part(x_ref, (row[:, None],), inputs, is_row, False, K).T

    def weight_at(inputs, size):
        lead = (*of_expert, output[:, None])
        return part(stored.weights, lead, inputs, is_output, has_all, size)

    def add(i, total):
        inputs = i * config.depth + lax.iota(jnp.int32, config.depth)
        return total + pltriton.dot(weight_at(inputs, K), rows_at(inputs), **exact)

    def scale_at(i):
        share, _ = shares_of(stored.weights.shape, stored.scales.shape)
        block = jnp.full((len(output), 1), i)
        at = (*of_expert, lax.div(output, share)[:, None], block)
        masked = {} if has_all else {"mask": is_output[:, None], "other": 0.0}
        return pltriton.load(stored.scales.at[at], **masked)

    def add_four(i, total):
        lane = lax.iota(jnp.int32, FP8_BLOCK // 4)
        xs = [rows_at(i * FP8_BLOCK + quarter * len(lane) + lane) for quarter in range(4)]
        words = weight_at(i * len(lane) + lane, K // 4)
        scale = scale_at(i) if only_scale is None else only_scale
        for weight, x in zip(four(words, scale, not config.interpret), xs, strict=True):
            total += pltriton.dot(weight.astype(x.dtype), x, **exact)
        return total

    only_scale = None
    if stored.scales is not None and stored.scales.shape[-1] == 1:  # one scale for all inputs
        only_scale = scale_at(0)
    nothing = jnp.zeros((len(output), config.lanes), jnp.float32)
    step = add if stored.scales is None else add_four
    return lax.fori_loop(0, pl.cdiv(K, config.depth), step, nothing)
