"""LoRA adapters of a GEMM: shrink as a kernel, expand within the GEMM (Pallas, Triton backend).

The kernel of the shrink computes `A x` for rows grouped by adapter slot: a program has one slot and
ends if none of its rows has it. For few rows the first programs of the GEMM compute it instead, and
the others wait for them after their main loops, see `shrink_ahead`. The GEMM kernels continue their
accumulators over the inputs of the adapters, see `expand`. The grouped GEMMs of experts do too,
with the shrink of `expert_lora`.
Implements `shared.spec.lora`.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Float32, Int

from kernels.pallas_gpu.gemm.lora_shrink import (
    EXACT,
    ShrinkSettings,
    SlotsInUse,
    any_of,
    shrink_kernel,
)
from kernels.shrink_tiles import (
    FEW_ROWS,
    ShrinkTiles,
    adapters_at_once,
    is_within_gemm,
)
from shared.spec.reduction_order import ShrinkOrder

_SLICE = 16
"""Inputs of an adapter that are added at once: the depth of a tensor core instruction."""
_MOST_EARLY_SUMS = 12288
"""Partial sums of a tile that are loaded before the main loop: 96 registers of 128 threads."""


class AdapterOperands(NamedTuple):
    """Arrays of the expand, or references to them.

    Attributes:
      sums: Partial sums of `A x` of each row for its adapter, undefined for rows without one; None
        for a shrink within the GEMM, before its launch.
      slots: Adapter slot of each row, 0 for none.
      in_use: Slots of all rows, see `SlotsInUse`; None for experts.
      layer: Index into the stacks.
      b, scales, factors: Stacked adapters by slot, see `shared.spec.lora.AdapterWeights`.
      a, arrivals, counter: For a shrink within the GEMM, stacked rows of A, counters of programs,
        and the one of this GEMM.
    """

    sums: Float32[jax.Array, "R splits ranks"] | None
    slots: Int[jax.Array, " R"]
    in_use: Int[jax.Array, " 3"] | None
    layer: Int[jax.Array, " 1"]
    b: Float[jax.Array, "slots L outputs rank"]
    scales: Float32[jax.Array, "slots L ranks"]
    factors: Float32[jax.Array, "slots L outputs"]
    a: Float[jax.Array, "slots L ranks inputs"] | None = None
    arrivals: Int[jax.Array, " counters"] | None = None
    counter: Int[jax.Array, " 1"] | None = None


class RowAdapters(NamedTuple):
    """Adapters of the rows of a GEMM.

    Attributes:
      operands: Arrays of the expand.
      parts: Outputs of each part.
      shrink: Shrink within the GEMM; None after the shrink.
    """

    operands: AdapterOperands
    parts: tuple[int, ...]
    shrink: ShrinkSettings | None = None


def shrink(
    x: Float[jax.Array, "R inputs"],
    a: Float[jax.Array, "slots L ranks inputs"],
    b: Float[jax.Array, "slots L outputs rank"],
    scales: Float32[jax.Array, "slots L ranks"],
    factors: Float32[jax.Array, "slots L outputs"],
    slots: Int[jax.Array, " R"],
    layer: Int[jax.Array, ""],
    *,
    parts: Sequence[int],
    order: ShrinkOrder,
    arrivals: Int[jax.Array, " counters"] | None = None,
    counter: Int[jax.Array, ""] | None = None,
    interpret: bool = False,
) -> RowAdapters:
    """Computes `A x` of each row for its own adapter, or leaves that to the GEMM.

    Args:
      x: The rows, as the GEMM reads them.
      a, b, scales, factors: Stacked adapters of the weight. The stack avoids the copy of a slice.
      slots: Adapter slot of each row, 0 for none.
      layer: Index into the stacks.
      parts: Outputs of each part of the weight.
      order: Reduction order.
      arrivals, counter: Counters for a shrink within the GEMM of few rows, and the one of this
        GEMM, zero before and after it.
      interpret: Run on a CPU.

    Returns:
      The adapters of the rows, an argument of `linear.product`.
    """
    (R, K), (num_slots, _, ranks, _) = x.shape, a.shape
    tiles, layer = ShrinkTiles.of(R, ranks, K, order), layer.reshape(1)
    in_use = jnp.stack(SlotsInUse.of(slots))
    blocks = pl.cdiv(ranks, tiles.ranks)
    units = blocks * tiles.splits * min(R, num_slots)
    if arrivals is not None and is_within_gemm(R, units):
        operands = AdapterOperands(
            None, slots, in_use, layer, b, scales, factors, a, arrivals, counter.reshape(1)
        )
        within = ShrinkSettings(tiles, blocks, order.chunk, ranks, units)
        return RowAdapters(operands, tuple(parts), within)
    sums = pl.pallas_call(
        functools.partial(shrink_kernel, tiles=tiles, blocks=blocks, chunk=order.chunk),
        grid=(blocks * tiles.splits, pl.cdiv(R, tiles.rows), num_slots),
        out_shape=jax.ShapeDtypeStruct((R, tiles.splits, ranks), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="shrink",
    )(x, a, slots, layer)
    operands = AdapterOperands(sums, slots, in_use, layer, b, scales, factors)
    return RowAdapters(operands, tuple(parts))


class AdapterTile(NamedTuple):
    """Outputs of an accumulator, and rows of a tile.

    Attributes:
      output, is_output: Outputs of the accumulator, and mask of those in bounds.
      first, last: Outputs of all tiles are from `first` to before `last`.
      row: Rows of the sums: those of the GEMM, or slots of experts.
      slots: Adapter slot of each row, 0 out of bounds.
      used: Slots that a row has.
      layer: Index into the stacks.
      at: First output of the accumulator; None if its outputs are not consecutive.
      wait: Waits for the sums of a shrink within the GEMM, once; None after the shrink.
    """

    output: Any
    is_output: Any
    first: int
    last: int
    row: Any
    slots: Any
    used: SlotsInUse
    layer: Any
    at: Any = None
    wait: Callable[[], None] | None = None

    def only_part(self, parts: Sequence[int]) -> Any:
        """Returns the part of the weight that has all outputs; None if there may be several."""
        ends = list(accumulate(parts))
        for part, (begin, end) in enumerate(pairwise([0, *ends])):
            if begin <= self.first and self.last <= end:
                return part
        if self.at is None or any(x % len(self.output) for x in (self.first, *ends[:-1])):
            return None
        return sum((self.at >= end).astype(jnp.int32) for end in ends[:-1])


class LoadedOperands(NamedTuple):
    """Operands of the expand of one part that are loaded before the main loop.

    Attributes:
      weights: Columns of B and the factor of each output, for the first adapters; None later.
      sums: Scales and partial sums of the rows, by slices; None if they are loaded later.
      inputs: Inputs of the adapters, if the main loop computed them.
    """

    weights: Any
    sums: Any
    inputs: Any = None


def load_operands(tile, adapters, parts, count, is_shrunk):
    """Loads operands of `expand` before the main loop, to hide their latency.

    Few rows leave enough registers. Nothing may use these values before the main loop, as its
    copies would start after them.

    Args:
      tile, adapters, parts: See `expand`.
      count: Accumulators of a tile.
      is_shrunk: Whether the sums are complete before the GEMM.
    """
    part = tile.only_part(parts)
    if part is None or len(tile.row) > FEW_ROWS:
        return None
    weights = _load_weights(tile, adapters, tile.is_output, tile.used.begin)
    rank, splits = adapters.b.shape[-1], adapters.sums.shape[1]
    if not is_shrunk or count * len(tile.row) * splits * rank > _MOST_EARLY_SUMS:
        return LoadedOperands(weights, None)
    lanes = [part * rank + lane for lane in _lanes(adapters)]
    return LoadedOperands(weights, [_load_sums(tile, adapters, lane) for lane in lanes])


def expand(acc, tile, adapters, parts, loaded=None):
    """Continues an accumulator over the inputs of the adapters, each row over its own.

    Args:
      acc: Accumulator of a tile, `[rows, outputs]`.
      tile: See `AdapterTile`.
      adapters: References, see `AdapterOperands`.
      parts: Outputs of each part.
      loaded: Operands that were loaded before the main loop, of `load_operands`.
    """
    part = tile.only_part(parts)
    if part is not None:
        return _add_inputs(acc, tile, adapters, tile.is_output, part, loaded)
    end = 0
    for part, outputs in enumerate(parts):
        begin, end = end, end + outputs
        if begin < tile.last and tile.first < end:
            if tile.wait is not None:
                tile.wait()  # here, as a program skips parts
                tile = tile._replace(wait=None)
            is_part = tile.is_output & (tile.output >= begin) & (tile.output < end)
            how = {"tile": tile, "adapters": adapters, "is_output": is_part, "part": part}
            continued = functools.partial(_add_inputs, **how)
            acc = lax.cond(any_of(is_part), continued, lambda acc: acc, acc)
    return acc


def _add_inputs(acc, tile, adapters, is_output, part, loaded=None):
    """Continues some outputs of one part, with the inputs of all rows loaded once.

    Operands are loaded before the first is used, as each load takes longer than the products. The
    first weights are loaded before the wait for the sums, and the next adapters before the products
    of the current ones.
    """
    used, at_once = tile.used, _at_once(tile, adapters)
    weights, sums, inputs = loaded or LoadedOperands(None, None)
    if weights is None:
        weights = _load_weights(tile, adapters, is_output, used.begin)
    if tile.wait is not None:
        tile.wait()
    if inputs is None:
        inputs = adapter_inputs(tile, adapters, part, sums)

    def multiply(acc, first, weights):
        for i, (columns, factor) in enumerate(weights):
            # Otherwise Triton copies columns to shared memory as soon as they are loaded.
            columns = [jnp.where(used.begin < used.end, x, jnp.zeros_like(x)) for x in columns]
            is_own = tile.slots == first + i + 1
            how = {"inputs": inputs, "weights": columns, "factor": factor}
            continued = functools.partial(_multiply, is_own=is_own, is_output=is_output, **how)
            acc = lax.cond(used.has(first + i), continued, lambda acc: acc, acc)
        return acc

    def add(step, state):
        acc, weights = state
        first = used.begin + step * at_once
        after = _load_weights(tile, adapters, is_output, first + at_once)
        return multiply(acc, first, weights), after

    if adapters.slots.shape[0] == 1 or at_once >= adapters.b.shape[0]:
        return multiply(acc, used.begin, weights)
    steps = lax.div(used.end - used.begin + at_once - 1, at_once)
    return lax.fori_loop(0, steps, add, (acc, weights))[0]


def _at_once(tile, adapters):
    """Returns the adapters that a tile loads at once; a GEMM of few rows has no more than rows."""
    num_slots, *_, rank = adapters.b.shape
    if len(tile.row) > FEW_ROWS:
        return 1
    return adapters_at_once(min(num_slots, adapters.slots.shape[0]), rank)


def _lanes(adapters):
    """Returns the slices of the inputs of an adapter."""
    rank = adapters.b.shape[-1]
    return [at + lax.iota(jnp.int32, _SLICE) for at in range(0, rank, _SLICE)]


def _multiply(acc, is_own, is_output, inputs, weights, factor):
    """Continues the accumulator of the rows of one adapter."""
    sums = acc
    for a, b in zip(inputs, weights, strict=True):
        sums = sums + pltriton.dot(a, b, **EXACT)
    return jnp.where(is_own[:, None] & is_output[None, :], sums * factor[None, :], acc)


def _load_sums(tile, adapters, rank):
    """Returns the scale and the partial sums of each row for some rows of A of its own adapter."""
    slot = jnp.maximum(tile.slots - 1, 0)[:, None]
    is_own = jnp.broadcast_to((tile.slots > 0)[:, None], (len(tile.slots), _SLICE))
    load = functools.partial(pltriton.load, mask=is_own, other=0.0)
    row, splits = tile.row[:, None], range(adapters.sums.shape[1])
    sums = [load(adapters.sums.at[row, split, rank[None, :]]) for split in splits]
    return load(adapters.scales.at[slot, tile.layer, rank[None, :]]), sums


def no_inputs(tile, adapters):
    """Returns inputs of zeros, in the form of `adapter_inputs`."""
    return [jnp.zeros((len(tile.row), _SLICE), adapters.b.dtype) for _ in _lanes(adapters)]


def adapter_inputs(tile, adapters, part, loaded=None):
    """Returns `round(s * (A x))` of each row for its own adapter, by slices.

    Args:
      tile, adapters, part: See `expand`.
      loaded: Scales and partial sums; None if they are not loaded yet.
    """
    rank = adapters.b.shape[-1]
    lanes = [part * rank + lane for lane in _lanes(adapters)]

    def added():
        found = []
        for number, lane in enumerate(lanes):
            scale, sums = loaded[number] if loaded else _load_sums(tile, adapters, lane)
            total = jnp.zeros(scale.shape, jnp.float32)
            for each in sums:
                total = total + each
            found.append((total * scale).astype(adapters.b.dtype))
        return found

    # A branch: otherwise Triton converts the layout of each sum before it adds or loads the next.
    nothing = no_inputs(tile, adapters)
    return lax.cond(tile.used.begin < tile.used.end, added, lambda: nothing)


def _load_weights(tile, adapters, is_output, first):
    """Returns the columns of B, by slices, and the factor of each output of some adapters.

    They are zero for adapters that no row has. Columns are loaded as rows, and without a branch:
    XLA would move a transposition with its loads to after the main loop, and values of a branch
    are complete at its end.
    """
    num_slots, width, found = adapters.b.shape[0], len(is_output), []
    for number in range(_at_once(tile, adapters)):
        is_used = is_output & tile.used.has(first + number)
        slot = jnp.minimum(first + number, num_slots - 1)
        mask = jnp.broadcast_to(is_used[None, :], (_SLICE, width))
        of_outputs = (slot, tile.layer, tile.output[None, :])
        at = [adapters.b.at[(*of_outputs, lane[:, None])] for lane in _lanes(adapters)]
        columns = [pltriton.load(x, mask=mask, other=0.0) for x in at]
        factors = adapters.factors.at[slot, tile.layer, tile.output]
        found.append((columns, pltriton.load(factors, mask=is_used, other=0.0)))
    return found


def expand_rows(acc, tile, part, adapters):
    """Same as `expand` for outputs of one part, without tensor cores and without a loop over slots.

    Each product of two bfloat16 values is exact, so the bits do not depend on fused operations.
    """
    is_own, all_rank = tile.slots > 0, adapters.b.shape[-1]
    slot = jnp.where(is_own, tile.slots - 1, 0)
    keep = jnp.broadcast_to(is_own[:, None] & tile.is_output[None, :], acc.shape)
    load = functools.partial(pltriton.load, other=0.0)

    def add(lane, sums):
        rank = part * all_rank + lane
        scale = load(adapters.scales.at[slot, tile.layer, rank], mask=is_own)
        total = jnp.zeros(tile.row.shape, jnp.float32)
        for split in range(adapters.sums.shape[1]):
            total = total + load(adapters.sums.at[tile.row, split, rank], mask=is_own)
        b = load(adapters.b.at[slot[:, None], tile.layer, tile.output[None, :], lane], mask=keep)
        a = (total * scale).astype(b.dtype).astype(jnp.float32)
        return sums + a[:, None] * b.astype(jnp.float32)

    sums = lax.fori_loop(0, all_rank, add, acc)
    factors = load(adapters.factors.at[slot[:, None], tile.layer, tile.output[None, :]], mask=keep)
    return jnp.where(is_own[:, None], sums * factors, acc)


def expand_logits(logits, gate, row, is_row, expert, adapters, routing):
    """Continues the logits of some rows, and those of the gate of the shared expert.

    Args:
      logits, gate: Logits of the experts, `[rows, experts]`, and of the gate if there is one.
      row, is_row: The rows, and mask of those that are not padding.
      expert: Experts of the logits, some after the last.
      adapters: References, see `AdapterOperands`.
      routing: Router config.
    """

    slots = pltriton.load(adapters.slots.at[row], mask=is_row, other=0)

    def tile_of_outputs(output: Any, end: int) -> AdapterTile:
        return AdapterTile(
            output=output,
            is_output=output < end,
            first=0,
            last=end,
            row=row,
            slots=slots,
            used=SlotsInUse.of(slots),
            layer=adapters.layer[0],
        )

    logits = expand_rows(logits, tile_of_outputs(expert, routing.experts), 0, adapters)
    if routing.is_gated:
        last = jnp.full((1,), routing.experts, jnp.int32)
        of_gate = tile_of_outputs(last, routing.outputs)
        gate = expand_rows(gate[:, None], of_gate, 1, adapters).reshape(gate.shape)
    return logits, gate
