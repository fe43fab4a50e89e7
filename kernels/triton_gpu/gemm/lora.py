"""LoRA adapters of a GEMM: shrink as a kernel, expand within the GEMM (Triton).

The kernel of the shrink computes `A x` for rows grouped by adapter slot: a program has one slot and
ends if none of its rows has it. The GEMM kernels continue their accumulators over the inputs of the
adapters, see `expand`. The grouped GEMMs of experts do too, with the shrink of `expert_lora`.
Implements `shared.spec.lora`.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int
from torch import Tensor

from kernels.shrink_tiles import FEW_ROWS, ShrinkTiles, adapters_at_once
from kernels.triton_gpu.gemm.block_loaders import add_product
from kernels.triton_gpu.gemm.lora_shrink import ShrinkSizes, shrink_kernel
from shared.spec.reduction_order import ShrinkOrder

_SLICE = tl.constexpr(16)
"""Inputs of an adapter that are added at once: the depth of a tensor core instruction."""
_FEW_ROWS = tl.constexpr(FEW_ROWS)


class AdapterOperands(NamedTuple):
    """Arrays of the expand, or pointers to them.

    Attributes:
      sums: Partial sums of `A x` of each row for its adapter, undefined for rows without one.
      slots: Adapter slot of each row, 0 for none.
      b, scales, factors: Adapters of one weight by slot, see `shared.spec.lora.AdapterWeights`.
    """

    sums: Float32[Tensor, "R splits ranks"]
    slots: Int[Tensor, " R"]
    b: Float[Tensor, "slots outputs rank"]
    scales: Float32[Tensor, "slots ranks"]
    factors: Float32[Tensor, "slots outputs"]


class AdapterSizes(NamedTuple):
    """Sizes of the expand, compile-time constants.

    Attributes:
      slots, splits: Adapter slots, and partial sums.
      rank, ranks: Columns of B, and rows of A.
      ends: First output after each part.
      b, scales, factors: Elements from a slot to the next.
      at_once: Adapters that a tile of few rows loads at once.
      is_next: Whether the GEMM is the kernel after the shrink. It then waits for the shrink after
        its main loop only: the shrink has waited for all kernels before.
    """

    slots: int
    splits: int
    rank: int
    ranks: int
    ends: tuple[int, ...]
    b: int
    scales: int
    factors: int
    at_once: int
    is_next: bool


class AdapterTile(NamedTuple):
    """Rows of a tile.

    Attributes:
      row: Rows of the sums: those of the GEMM, or slots of experts.
      slots: Adapter slot of each row, 0 out of bounds.
      begin, end: First adapter slot of any row, counted from 0, and the one after the last.
      used: A bit for every 32nd slot that a row has.
    """

    row: Any
    slots: Any
    begin: Any
    end: Any
    used: Any


class RowAdapters(NamedTuple):
    """Adapters of the rows of a GEMM.

    Attributes:
      operands: Arrays of the expand.
      parts: Outputs of each part.
      is_next: See `AdapterSizes`.
    """

    operands: AdapterOperands
    parts: tuple[int, ...]
    is_next: bool = True

    @property
    def sizes(self) -> AdapterSizes:
        """Returns the sizes of the expand."""
        sums, slots, b, scales, factors = self.operands
        return AdapterSizes(
            slots=len(b),
            splits=sums.shape[1],
            rank=b.shape[-1],
            ranks=sums.shape[2],
            ends=tuple(accumulate(self.parts)),
            b=b.stride(0),
            scales=scales.stride(0),
            factors=factors.stride(0),
            at_once=adapters_at_once(min(len(b), len(slots)), b.shape[-1]),
            is_next=self.is_next,
        )


def shrink(
    x: Float[Tensor, "R inputs"],
    a: Float[Tensor, "slots ranks inputs"],
    b: Float[Tensor, "slots outputs rank"],
    scales: Float32[Tensor, "slots ranks"],
    factors: Float32[Tensor, "slots outputs"],
    slots: Int[Tensor, " R"],
    *,
    parts: Sequence[int],
    order: ShrinkOrder,
) -> RowAdapters:
    """Computes `A x` of each row for its own adapter.

    Args:
      x: The rows, as the GEMM reads them.
      a, b, scales, factors: Adapters of the weight; slots may be strided.
      slots: Adapter slot of each row, 0 for none.
      parts: Outputs of each part of the weight.
      order: Reduction order.

    Returns:
      The adapters of the rows, an argument of `linear.product`.
    """
    (R, K), (num_slots, ranks, _) = x.shape, a.shape
    tiles = ShrinkTiles.of(R, ranks, K, order)
    sums = torch.empty((R, tiles.splits, ranks), dtype=torch.float32, device=x.device)
    sizes = ShrinkSizes.of(a, tiles, order)
    shrunk = RowAdapters(AdapterOperands(sums, slots, b, scales, factors), tuple(parts))
    launching = {"is_launched": False}
    if x.is_cuda:
        launching = {"is_launched": True, "enable_fp_fusion": False, "launch_pdl": True}
    shrink_kernel[(sizes.blocks * sizes.splits, triton.cdiv(R, tiles.rows), num_slots)](
        x,
        a,
        shrunk.operands,
        R,
        sizes=sizes,
        expanded=shrunk.sizes,
        num_warps=tiles.warps,
        **launching,
    )
    return shrunk


@triton.jit
def adapter_tile(row, slots):
    """Returns the rows of a tile with their adapter slots; see `AdapterTile`."""
    most: tl.constexpr = 2**31 - 1
    return AdapterTile(
        row=row,
        slots=slots,
        begin=tl.min(tl.where(slots > 0, slots, most), 0) - 1,
        end=tl.max(slots, 0),
        used=tl.reduce(tl.where(slots > 0, 1 << ((slots - 1) & 31), 0), 0, _either),
    )


@triton.jit
def expand(
    acc,
    output,
    is_output,
    first: tl.constexpr,
    last: tl.constexpr,
    adapters,
    tile,
    sizes: tl.constexpr,
):
    """Continues an accumulator over the inputs of the adapters, each row over its own.

    Args:
      acc: Accumulator of a tile, `[rows, outputs]`.
      output, is_output: Outputs of the accumulator, and mask of those in bounds.
      first, last: Outputs of all tiles are from `first` to before `last`.
      adapters: Pointers, see `AdapterOperands`.
      tile: Rows of the accumulator, see `AdapterTile`.
      sizes: Sizes, see `AdapterSizes`.
    """
    parts: tl.constexpr = len(sizes.ends)
    for part in tl.static_range(parts):
        acc = _expand_part(acc, output, is_output, first, last, part, adapters, tile, sizes)
    return acc


@triton.jit
def _expand_part(
    acc,
    output,
    is_output,
    first: tl.constexpr,
    last: tl.constexpr,
    part: tl.constexpr,
    adapters,
    tile,
    sizes: tl.constexpr,
):
    """Continues the outputs of one part, if the tile has some."""
    ends: tl.constexpr = sizes.ends
    begin: tl.constexpr = 0 if part == 0 else ends[part - 1]
    end: tl.constexpr = ends[part]
    if begin <= first and last <= end:
        acc = _add_inputs(acc, output, is_output, part, adapters, tile, sizes)
    elif begin < last and first < end:
        is_part = is_output & (output >= begin) & (output < end)
        if tl.max(is_part.to(tl.int32), 0) > 0:
            acc = _add_inputs(acc, output, is_part, part, adapters, tile, sizes)
    return acc


@triton.jit
def _add_inputs(acc, output, is_output, part: tl.constexpr, adapters, tile, sizes: tl.constexpr):
    """Continues some outputs of one part, with the inputs of all rows loaded once.

    Operands are loaded before the first is used, as each load takes longer than the products. The
    next adapters are loaded before the products of the current ones.
    """
    at_once: tl.constexpr = sizes.at_once if tile.row.shape[0] <= _FEW_ROWS else 1
    slices: tl.constexpr = sizes.rank // _SLICE
    slots = tile.slots
    begin, end, used = tile.begin, tile.end, tile.used
    weights, factors = _zeros(output, at_once, adapters, sizes)
    inputs = ()
    for _ in tl.static_range(slices):
        inputs = inputs + (tl.zeros((tile.row.shape[0], _SLICE), adapters.b.dtype.element_ty),)
    if begin < end:  # always with adapters: one branch of all loads, before layout conversions
        weights, factors = _load_adapters(
            used, begin, end, output, is_output, at_once, adapters, sizes
        )
        inputs = _inputs_of(tile, part, adapters, sizes)
    for number in tl.range(begin, end, at_once):
        own_weights, own_factors = weights, factors
        if number + at_once < end:
            weights, factors = _load_adapters(
                used, number + at_once, end, output, is_output, at_once, adapters, sizes
            )
        for i in tl.static_range(at_once):
            if _is_used(used, number + i, end):
                is_own, sums = slots == number + i + 1, acc
                for step in tl.static_range(slices):
                    sums = add_product(sums, inputs[step], own_weights[i * slices + step], False)
                sums = sums * tl.expand_dims(own_factors[i], 0)
                acc = tl.where(is_own[:, None] & is_output[None, :], sums, acc)
    return acc


@triton.jit
def _zeros(output, at_once: tl.constexpr, adapters, sizes: tl.constexpr):
    """Returns zeros for the weights and factors of some adapters."""
    weights, factors = (), ()
    for _ in tl.static_range(at_once):
        factors = factors + (tl.zeros(output.shape, tl.float32),)
        for _ in tl.static_range(sizes.rank // _SLICE):
            b = tl.zeros((output.shape[0], _SLICE), adapters.b.dtype.element_ty)
            weights = weights + (b,)
    return weights, factors


@triton.jit
def _load_adapters(
    used,
    first,
    end,
    output,
    is_output,
    at_once: tl.constexpr,
    adapters,
    sizes: tl.constexpr,
):
    """Returns the weights and factors of some adapters, zero if no row has one."""
    weights, factors = (), ()
    for i in tl.static_range(at_once):
        mask = tl.where(_is_used(used, first + i, end), is_output, False)
        factor = _factor_of(first + i, output, mask, adapters, sizes)
        factors = factors + (factor,)
        for step in tl.static_range(sizes.rank // _SLICE):
            at = step * _SLICE
            b = _weight_of(first + i, output, mask, at, adapters, sizes)
            weights = weights + (b,)
    return weights, factors


@triton.jit
def _inputs_of(tile, part: tl.constexpr, adapters, sizes: tl.constexpr):
    """Returns `round(s * (A x))` of each row for the rows of A of its own adapter, in slices."""
    splits: tl.constexpr = sizes.splits
    is_own = (tile.slots > 0)[:, None]
    slot = tl.where(tile.slots > 0, tile.slots - 1, 0).to(tl.int64)[:, None]
    of_slots = adapters.scales + slot * sizes.scales
    of_rows = adapters.sums + tile.row.to(tl.int64)[:, None] * (splits * sizes.ranks)
    inputs = ()
    for step in tl.static_range(sizes.rank // _SLICE):
        rank = tl.arange(0, _SLICE)[None, :] + (part * sizes.rank + step * _SLICE)
        scale = tl.load(of_slots + rank, mask=is_own, other=0.0)
        total = tl.zeros(scale.shape, tl.float32)
        for split in tl.static_range(splits):
            total += tl.load(of_rows + split * sizes.ranks + rank, mask=is_own, other=0.0)
        inputs = inputs + ((total * scale).to(adapters.b.dtype.element_ty),)
    return inputs


@triton.jit
def _weight_of(number, output, mask, at: tl.constexpr, adapters, sizes: tl.constexpr):
    """Returns some columns of B of an adapter, zero where `mask` is not set."""
    lane = at + tl.arange(0, _SLICE)
    of_outputs = adapters.b + tl.cast(number, tl.int64) * sizes.b
    of_outputs += output.to(tl.int64)[:, None] * sizes.rank
    return tl.load(of_outputs + lane[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def _factor_of(number, output, mask, adapters, sizes: tl.constexpr):
    """Returns the factor of each output of an adapter, zero where `mask` is not set."""
    of_outputs = adapters.factors + tl.cast(number, tl.int64) * sizes.factors + output
    return tl.load(of_outputs, mask=mask, other=0.0)


@triton.jit
def _is_used(used, number, end):
    """Returns whether a row may have an adapter; `used` has a bit for every 32nd slot."""
    return (number < end) & (((used >> (number & 31)) & 1) > 0)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def expand_rows(acc, tile, output, is_output, part: tl.constexpr, adapters, sizes: tl.constexpr):
    """Same as `expand` for outputs of one part, without tensor cores and without a loop over slots.

    Each product of two bfloat16 values is exact, so the bits do not depend on fused operations.
    """
    splits: tl.constexpr = sizes.splits
    is_own = tile.slots > 0
    slot = tl.where(is_own, tile.slots - 1, 0).to(tl.int64)
    keep = is_own[:, None] & is_output[None, :]
    of_rows = adapters.sums + tile.row.to(tl.int64) * (splits * sizes.ranks)
    of_outputs = adapters.b + slot[:, None] * sizes.b + output[None, :] * sizes.rank
    sums = acc
    for lane in tl.range(0, sizes.rank):
        rank = part * sizes.rank + lane
        scale = tl.load(adapters.scales + slot * sizes.scales + rank, mask=is_own, other=0.0)
        total = tl.zeros(tile.row.shape, tl.float32)
        for split in tl.static_range(splits):
            total += tl.load(of_rows + split * sizes.ranks + rank, mask=is_own, other=0.0)
        b = tl.load(of_outputs + lane, mask=keep, other=0.0)
        a = (total * scale).to(b.dtype).to(tl.float32)
        sums += a[:, None] * b.to(tl.float32)
    factors = adapters.factors + slot[:, None] * sizes.factors + output[None, :]
    return tl.where(is_own[:, None], sums * tl.load(factors, mask=keep, other=0.0), acc)


@triton.jit
def expand_logits(logits, gate, row, is_row, expert, adapters, routing: tl.constexpr):
    """Continues the logits of some rows, and those of the gate of the shared expert.

    Args:
      logits, gate: Logits of the experts, `[rows, experts]`, and of the gate if there is one.
      row, is_row: The rows, and mask of those that are not padding.
      expert: Experts of the logits, some after the last.
      adapters: Pointers, see `AdapterOperands`.
      routing: See `router.RoutingConfig`.
    """
    sizes: tl.constexpr = routing.adapters
    tile = adapter_tile(row, tl.load(adapters.slots + row, mask=is_row, other=0))
    is_expert = expert < routing.experts
    logits = expand_rows(logits, tile, expert, is_expert, 0, adapters, sizes)
    if routing.is_gated:
        last = routing.experts + tl.arange(0, 1)
        gate = expand_rows(gate[:, None], tile, last, last > 0, 1, adapters, sizes)
        gate = tl.reshape(gate, row.shape)
    return logits, gate
