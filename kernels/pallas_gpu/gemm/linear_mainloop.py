"""Main loop of the GEMM kernels: one chain along the inputs (Pallas, Triton backend)."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.gemm.block_loaders import LOADERS, OperandTiles
from kernels.pallas_gpu.gemm.lora import (
    AdapterTile,
    LoadedOperands,
    adapter_inputs,
    expand,
    load_operands,
    no_inputs,
)
from kernels.pallas_gpu.gemm.lora_shrink import SlotsInUse, wait_for_sums
from shared.models.formats.weight_format import PLAIN


def sums_of(operands, tiling, block, is_compiled, segment, beside=None):
    """Computes the accumulators of a block, `[rows, columns]` for each operand of the weight.

    Returns them with the values of `beside`, None without.

    Args:
      operands: Arrays of the block and place in the stack, fields of `OperandTiles`.
      tiling: Sizes of the call and its tiles.
      block: Block of the result.
      is_compiled: Whether the kernel is compiled, not interpreted.
      segment: Segment of the inputs; None for the sum of all.
      beside: Values to compute near the end of the only segment, see `BesideLoop`.

    Raises:
      ValueError: The segments are no whole blocks of the weight format.
    """
    tiles, rows, format = block.tiles, block.row.shape[0], tiling.format
    tile = OperandTiles(
        **operands,
        scale_row=block.row,
        has_all_rows=block.has_all_rows,
        has_all_outputs=block.has_all_columns,
        loads_weight_first=format != PLAIN,
        **LOADERS[format].of_block(block),
    )
    shape = (tile.columns, rows) if tiles.swapped else (rows, tile.columns)
    loader = LOADERS[format](tile, tiles.depth, is_compiled)
    segments, steps = tiling.segments, pl.cdiv(tiling.K, loader.depth) // tiling.segments
    if segments > 1 and tiling.K % (segments * loader.depth):
        raise ValueError(
            f"segments of {format} must be multiples of {loader.depth} inputs, got {segments} of "
            f"{tiling.K} inputs"
        )

    def chain(number):
        how = {"first": number * steps, "beside": beside}
        return accumulate(loader, shape, len(tile.outputs), steps, tiles.swapped, **how)

    sums, found = chain(0 if segment is None else segment)
    if segment is None:
        for number in range(1, segments):
            sums = [total + x for total, x in zip(sums, chain(number)[0], strict=True)]
    if is_compiled:
        sums[0] = let_next_start(sums[0])
    return [x.T for x in sums] if tiles.swapped else sums, found


def split_weights(sums, block):
    """Returns the accumulators of each weight."""
    if len(sums) == block.weights:
        return sums
    return list(lax.split(sums[0], (block.tiles.columns, block.tiles.columns), axis=1))


class ExpandInputs(NamedTuple):
    """Adapters of an accumulator of a block.

    Attributes:
      tile: Outputs of the accumulator, and rows.
      loaded: Operands that are loaded before the main loop, to hide their latency.
    """

    tile: AdapterTile
    loaded: LoadedOperands | None

    def after_loop(self, found: Any) -> "ExpandInputs":
        """Returns the adapters after a main loop that computed their inputs."""
        loaded = self.loaded or LoadedOperands(None, None)
        return ExpandInputs(self.tile._replace(wait=None), loaded._replace(inputs=found))

    @classmethod
    def of(cls, block: Any, tiling: Any, adapters: Any, parts: Any, shrink: Any) -> list[Any]:
        """Loads the inputs of each accumulator of a block.

        Args:
          block, tiling: Block of the result, and sizes of the call.
          adapters, parts: LoRA adapters of the rows, see `lora.expand`.
          shrink: Shrink of the first programs, see `lora.shrink_ahead`; None without.
        """
        columns, N, layer = block.tiles.columns, block.outputs, adapters.layer[0]
        slots = adapters.slots.at[block.row]
        slots = pltriton.load(slots, mask=block.row < block.num_rows, other=0)
        is_whole = block.num_rows <= len(block.row)
        used = SlotsInUse.read(adapters.in_use) if is_whole else SlotsInUse.of(slots)
        wait = None
        if shrink is not None:
            wait = partial(wait_for_sums, adapters, adapters.counter[0], shrink)
        count = len(LOADERS[tiling.format].of_block(block)["outputs"])
        span, found = block.weights // count, []
        for number in range(count):
            lane = lax.iota(jnp.int32, span * columns)
            in_result = block.number * columns + lax.rem(lane, columns)
            tile = AdapterTile(
                output=in_result + (number + lax.div(lane, columns)) * N,
                is_output=in_result < N,
                first=number * N,
                last=(number + span) * N,
                row=block.row,
                slots=slots,
                used=used,
                layer=layer,
                at=block.number * columns + number * N if span == 1 else None,
                wait=None if number else wait,
            )
            loaded = None  # the last program of separate segments loads beside their sums
            if not tiling.separate:
                loaded = load_operands(tile, adapters, parts, count, shrink is None)
            found.append(cls(tile, loaded))
        return found


def inputs_beside_loop(inputs, tiling, adapters, parts):
    """Returns the wait for the sums of a shrink within the GEMM, for the main loop.

    None if there is no wait, or if only some programs wait; `adapted` waits then. The arguments are
    those of `adapted`.
    """
    tiles = [own.tile for own in inputs]
    of_tiles = [tile.only_part(parts) for tile in tiles]
    if tiles[0].wait is None or tiling.segments > 1 or any(part is None for part in of_tiles):
        return None

    def compute():
        tiles[0].wait()
        return [adapter_inputs(x, adapters, y) for x, y in zip(tiles, of_tiles, strict=True)]

    return BesideLoop(compute, [no_inputs(tile, adapters) for tile in tiles])


def adapted(sums, inputs, adapters, parts):
    """Yields the accumulators, continued over the inputs of the adapters of the rows.

    Args:
      sums: Accumulators of a block, see `sums_of`.
      inputs: Adapters of each accumulator, see `ExpandInputs`.
      adapters, parts: LoRA adapters of the rows, see `lora.expand`.
    """
    for acc, own in zip(sums, inputs, strict=True):
        yield expand(acc, own.tile, adapters, parts, own.loaded)


class BesideLoop(NamedTuple):
    """Values that a program computes within its main loop, to hide the latency of loads.

    Attributes:
      compute: Computes the values.
      before: Values of the same shapes.
    """

    compute: Callable[[], Any]
    before: Any


def accumulate(loader, shape, count, steps, is_swapped, first=0, beside=None):
    """Adds the products of the blocks of a tile in one chain from zero, for every weight format.

    Returns the accumulators, and the values of `beside`.

    Args:
      loader: Block loader of the format.
      shape, count: Shape and number of the accumulators.
      steps: Steps along the inputs.
      is_swapped: Whether the operands are swapped (swap-AB).
      first: First step.
      beside: Values to compute after three quarters of the steps, see `BesideLoop`.
    """

    def add(step, state):
        sums, carried, found = state
        if beside is not None:
            is_due = step == steps - 1 - steps // 4
            found = lax.cond(is_due, beside.compute, lambda: found)
        for number in loader.blocks(first + step):
            after = loader.after(number)
            for x, weights in loader.parts(number, carried):
                pairs = zip(sums, weights, strict=True)
                sums = tuple(loader.add(total, x, weight, is_swapped) for total, weight in pairs)
            carried = after
        return sums, carried, found

    nothing = (jnp.zeros(shape, jnp.float32),) * count
    state = (nothing, loader.start(first), None if beside is None else beside.before)
    sums, _, found = lax.fori_loop(0, steps, add, state)
    return list(sums), found


def let_next_start(x):
    """Lets the next kernel launch early; every kernel waits for the previous ones anyway.

    The assembly counts as free of side effects, so a needed value must pass through it.
    """
    kind = "f" if x.dtype == jnp.float32 else "r"
    (same,) = pltriton.elementwise_inline_asm(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        args=[x],
        constraints=f"={kind},{kind}",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return same
