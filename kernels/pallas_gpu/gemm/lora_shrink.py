"""Shrink of LoRA adapters: a kernel, and the first programs of a GEMM of few rows (Pallas).

See `lora`. Both compute the same sums in the same order.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.shrink_tiles import ShrinkTiles, programs_ahead

EXACT = {"precision": lax.Precision.HIGHEST}


class ShrinkSettings(NamedTuple):
    """Compile-time constants of a shrink within a GEMM.

    Attributes:
      tiles: Tile config; all rows are one tile.
      blocks: Blocks of rows of A.
      chunk: Inputs of a chunk, see `ShrinkOrder`.
      ranks: Rows of A.
      units: Most units, which are an adapter slot, a block of rows of A and a split of the inputs.
      programs: Programs of the GEMM that compute the shrink, before those of its blocks.
      waiting: Programs of the GEMM that wait for the sums: one of each block.
    """

    tiles: ShrinkTiles
    blocks: int
    chunk: int
    ranks: int
    units: int
    programs: int = 0
    waiting: int = 0

    def before(self, programs: int, blocks: int) -> "ShrinkSettings":
        """Returns the settings for a GEMM of some programs and blocks."""
        return self._replace(programs=programs_ahead(self.units, programs), waiting=blocks)

    def sums(self, R: int) -> jax.ShapeDtypeStruct:
        """Returns the shape of the sums of `R` rows."""
        return jax.ShapeDtypeStruct((R, self.tiles.splits, self.ranks), jnp.float32)


class SlotsInUse(NamedTuple):
    """Adapter slots of some rows.

    Attributes:
      begin, end: First slot, counted from 0, and the one after the last.
      used: A bit for every 32nd slot that a row has.
    """

    begin: Any
    end: Any
    used: Any

    @classmethod
    def of(cls, slots: Any) -> "SlotsInUse":
        """Returns those of rows with the given slots, 0 for none."""
        most, number = 2**30, lax.iota(jnp.int32, 32)
        is_used = (slots > 0)[:, None] & (((slots - 1) & 31)[:, None] == number[None, :])
        bits = jnp.where(jnp.max(is_used.astype(jnp.int32), axis=0) > 0, 1 << number, 0)
        begin = jnp.min(jnp.where(slots > 0, slots, most)) - 1
        return cls(begin, jnp.max(slots), jnp.sum(bits))

    @classmethod
    def read(cls, ref: Any) -> "SlotsInUse":
        """Returns those of all rows of a call, computed before its kernels."""
        return cls(ref[0], ref[1], ref[2])

    def has(self, slot: Any) -> Any:
        """Returns whether a row may have a slot."""
        return (slot < self.end) & (((self.used >> (slot & 31)) & 1) > 0)


def shrink_kernel(x_ref, a_ref, slots_ref, layer_ref, sums_ref, *, tiles, blocks, chunk):
    """One program per slot, block of rows, block of rows of A, and split of the inputs."""
    row = pl.program_id(1) * tiles.rows + lax.iota(jnp.int32, tiles.rows)
    slot, split = pl.program_id(2), lax.div(pl.program_id(0), blocks)
    block = lax.rem(pl.program_id(0), blocks)
    is_own = pltriton.load(slots_ref.at[row], mask=row < x_ref.shape[0], other=0) == slot + 1
    a_of = (a_ref, slot, layer_ref[0])
    _add_inputs_of_rows(x_ref, a_of, sums_ref, row, is_own, block, split, tiles, chunk)


def shrink_ahead(number, x_ref, adapters, settings, interpret):
    """Computes the shrink as one of the first programs of a GEMM, of the given number.

    Programs start in the order of their numbers, so those that wait do not keep one of these from
    starting. The first adds the blocks of the GEMM to the counter once for each program, and every
    other one takes them off. So the blocks remain when all have stored their sums.
    """
    tiles, blocks, (R, _) = settings.tiles, settings.blocks, x_ref.shape
    row = lax.iota(jnp.int32, tiles.rows)
    layer, counter = adapters.layer[0], adapters.counter[0]
    slots = pltriton.load(adapters.slots.at[row], mask=row < R, other=0)
    begin, end, _ = SlotsInUse.read(adapters.in_use)

    def add(step, done):
        unit = number + step * settings.programs
        within, block = lax.div(unit, blocks), lax.rem(unit, blocks)
        slot, split = begin + lax.div(within, tiles.splits), lax.rem(within, tiles.splits)
        a_of, own = (adapters.a, slot, layer), slots == slot + 1
        _add_inputs_of_rows(
            x_ref, a_of, adapters.sums, row, own, block, split, tiles, settings.chunk
        )
        return done

    units = jnp.maximum(end - begin, 0) * (blocks * tiles.splits)
    steps = lax.div(jnp.maximum(units - number, 0) + settings.programs - 1, settings.programs)
    lax.fori_loop(0, steps, add, number * 0)
    if not interpret:
        pltriton.debug_barrier()
    is_first = (number == 0).astype(jnp.int32)
    times = is_first * (settings.programs + 1) - 1  # where would make an array
    pltriton.atomic_add(adapters.arrivals, (counter,), times * settings.waiting)


def wait_for_sums(adapters, counter, settings):
    """Waits until all programs of `shrink_ahead` have stored their sums.

    One program of each block takes 1 off the counter, so that it is zero again after the GEMM. The
    counter is negative until the first program of the shrink has added to it. It is at least the
    number of blocks until all have.
    """
    nothing = counter * 0

    def look(change):
        return pltriton.atomic_add(adapters.arrivals, (counter,), change) + change

    def is_early(left):
        return (left < 0) | (left >= settings.waiting)

    lax.while_loop(is_early, lambda _: look(nothing), look(nothing - 1))


def _add_inputs_of_rows(x_ref, a_of, sums_ref, row, is_own, block, split, tiles, chunk):
    """Stores the sums of the rows of one adapter, for a block of rows of A and a split.

    Args:
      x_ref, a_of, sums_ref: The rows; rows of A, the adapter slot and the layer; partial sums.
      row, is_own: The rows, and mask of those of the adapter.
      block, split, tiles, chunk: Block of rows of A, split of the inputs, and their sizes.
    """
    (R, K), depth, (a_ref, slot, layer) = x_ref.shape, tiles.depth, a_of
    rank = block * tiles.ranks + lax.iota(jnp.int32, tiles.ranks)
    lane = lax.iota(jnp.int32, depth)

    def add_chunk(number, total):
        first = (split * tiles.chunks + number) * chunk

        def add(step, acc):
            at = first + step * depth + lane
            is_input = at < K
            of_rows = jnp.broadcast_to(is_own[:, None] & is_input[None, :], (len(row), depth))
            x = pltriton.load(x_ref.at[row[:, None], at[None, :]], mask=of_rows, other=0.0)
            a_at = a_ref.at[slot, layer, rank[:, None], at[None, :]]
            if K % chunk:
                of_ranks = jnp.broadcast_to(is_input[None, :], (len(rank), depth))
                a = pltriton.load(a_at, mask=of_ranks, other=0.0)
            else:
                a = pltriton.load(a_at)
            return acc + pltriton.dot(x, a.T, **EXACT)

        zeros = jnp.zeros((len(row), len(rank)), jnp.float32)
        return total + lax.fori_loop(0, chunk // depth, add, zeros)

    @pl.when(any_of(is_own))
    def _add():
        zeros = jnp.zeros((len(row), len(rank)), jnp.float32)
        total = lax.fori_loop(0, tiles.chunks, add_chunk, zeros)
        # Rows that are not stored get an index outside the array, which the interpreter requires.
        at = sums_ref.at[jnp.where(is_own, row, R)[:, None], split, rank[None, :]]
        pltriton.store(at, total, mask=jnp.broadcast_to(is_own[:, None], total.shape))


def any_of(flags):
    """Returns True if any of some flags is set."""
    return jnp.max(flags.astype(jnp.int32)) > 0
