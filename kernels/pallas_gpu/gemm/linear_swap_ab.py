"""Epilogue of the swap-AB, small-M GEMM (Pallas, Mosaic GPU).

Outputs are the wide side of the WGMMA and rows the narrow side, so a row spans the registers of a
warpgroup. The result is transposed through shared memory.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.pallas_gpu.gemm.linear_epilogue import WIDE, activated, added_up
from kernels.pallas_gpu.gemm.ptx import LAYOUT


class SwappedResult:
    """Epilogue of all rows of `WIDE` outputs, with a buffer for the next norm's input."""

    def __init__(self, refs, shared, work, row, column):
        self._refs, self._work, self._column = refs, work, column
        self._parts, self._loaded, self._squares = shared.parts, shared.loaded.at[0], shared.squares
        self._slices = pl.ds(row, work.tiles.rows), pl.ds(column, WIDE)

    def prepare(self):
        """Starts the load of the residual before the main loop."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self._work.is_added:
            added_ref = self._refs.added.at[self._slices]
            plgpu.copy_gmem_to_smem(added_ref, self._parts.at[0], self._loaded)

    def store(self, sums, norms=None):
        """Applies the epilogue and stores the result; out-of-bounds rows are not written.

        `norms` are the norm scales of the rows, if there is a norm before the GEMM.
        """
        refs = self._refs
        if norms is not None:
            sums = [x * lax.broadcast_in_dim(norms, x.shape, [1]) for x in sums]
        out = activated(sums, self._work)
        if self._work.is_added:
            plgpu.barrier_wait(self._loaded)
            added = plgpu.load(self._parts.at[0].T, layout=LAYOUT, optimized=False)
            out += added.astype(jnp.float32)
        out = out.astype(refs.out.dtype)
        self._store_part(out, 0, refs.out)
        if refs.sums is None:
            return
        out = out.astype(jnp.float32)
        if refs.scaled is not None:
            at = refs.norms.at[refs.norm_layer[0], pl.ds(self._column, WIDE)]
            norm = plgpu.load(at, layout=LAYOUT.reduce(1), optimized=False).astype(jnp.float32)
            read = out * lax.broadcast_in_dim(norm, out.shape, [0])
            self._store_part(read.astype(refs.scaled.dtype), 1, refs.scaled)
        self._store_squares(out * out)

    def _store_squares(self, terms):
        """Stores the sums of squares of a chunk, which is all outputs of the block."""
        rows, most, first = self._refs.sums.shape[0], self._work.tiles.rows, self._slices[0].start
        chunk = lax.div(self._column, WIDE)
        self._squares[...] = added_up([terms], self._work.order.digits, axis=0)
        # A vector of rows has at least eight elements, and there may be fewer rows.
        whole, rest = divmod(rows, most) if most >= WIDE else (0, rows)
        has_both = whole > 0 and rest > 0

        @pl.when(first + most <= rows if has_both else whole > 0)
        def _store_tile():
            for down in range(0, most, WIDE):
                part = self._squares.at[pl.ds(down, WIDE)]
                sums = plgpu.load(part, layout=LAYOUT.reduce(1), optimized=False)
                self._refs.sums[pl.ds(first + down, WIDE), chunk] = sums

        @pl.when(first + most > rows if has_both else whole == 0)
        def _store_rest():
            for row in range(rest):
                self._refs.sums[rows - rest + row, chunk] = self._squares[row]

    def _store_part(self, values, number, ref):
        """Copies a part to its place in global memory."""
        part = self._parts.at[number]
        part.T[...] = values
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(part, ref.at[self._slices])
