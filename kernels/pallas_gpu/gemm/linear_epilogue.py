"""Prologue scales and epilogue of the WGMMA GEMM (Pallas, Mosaic GPU).

Mosaic GPU allows the compiler to fuse a product with a sum, so no product may feed a sum here.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.gemm.ptx import (
    divided,
    inverse_root,
    plus,
    power_of_two,
    product_of,
    sum_of,
    times,
)
from kernels.pallas_gpu.gemm.sum_of_squares import add_up, exponent_of, in_floats, load_squares
from kernels.pallas_gpu.sampling.lm_head_epilogue import GROUP, GROUP_SUMEXP, LOGITS
from kernels.pallas_gpu.sampling.logits_processing import (
    HIGHEST,
    KEY_OF_INFINITY,
    LOWEST,
    key_of,
    score_of,
)
from shared.models.activation import GELU_TANH, SCALED_SILU, SWIGLU_OAI

WIDE = 64
"""Rows that a warpgroup multiplies at once: the wide side of a WGMMA."""
PARTS = 2
"""Buffers of a result, `WIDE` lines each, that a warpgroup has in shared memory."""
_LAYOUT = plgpu.Layout.WGMMA
"""Register layout of the WGMMA accumulators of a warpgroup."""
_OF_ROWS = _LAYOUT.reduce(1)
SQUARES_AT_ONCE = 8
"""Column multiple that this layout requires."""
_LOG2_E = 1.4426950408889634
_SCALE_ROWS = 16
"""Rows per program of the kernel that computes norm scales."""


def scales_of(squares, rows, inputs, eps, order):
    """Computes the norm scale of each row; padding rows of a block get an arbitrary value."""
    return pl.pallas_call(
        functools.partial(_scales_kernel, inputs=inputs, eps=eps, order=order),
        grid=(rows // _SCALE_ROWS,),
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=4),
        name="row_scales",
    )(squares)


def _scales_kernel(squares_ref, out_ref, *, inputs, eps, order):
    row = pl.program_id(0) * _SCALE_ROWS + lax.iota(jnp.int32, _SCALE_ROWS)
    squares = load_squares(squares_ref, row, row < squares_ref.shape[0])
    total = add_up(squares, order.digits_of_chunks)
    pltriton.store(out_ref.at[row], lax.rsqrt(total * (1.0 / inputs) + eps))


def scales_from(refs, work, row):
    """Same as `scales_of`, for the rows of a warpgroup, by their offset within the tile."""
    scales, inputs = {}, refs.x.shape[1]
    for down in range(0, work.tiles.rows // work.groups, WIDE):
        squares_ref = refs.squares.at[pl.ds(row + down, WIDE)]
        squares = plgpu.load(squares_ref, layout=_LAYOUT, optimized=False)
        total = added_up([squares], work.order.digits_of_chunks)
        mean = times(total, 1.0 / inputs, layout=_OF_ROWS)
        scales[down] = inverse_root(plus(mean, work.eps, layout=_OF_ROWS), layout=_OF_ROWS)
    return scales


def added_up(parts, digits, axis=1):
    """Same as `sum_of_squares.add_up`, for rows with columns in parts or along the other axis."""
    largest = functools.reduce(jnp.maximum, (x.max(axis=axis) for x in parts))
    exponent = exponent_of(largest, digits)
    across = lax.broadcast_in_dim(exponent, parts[0].shape, [1 - axis])
    unit = lax.bitcast_convert_type((digits + 254 - across) << 23, jnp.float32)
    # Integer conversion is the floor of non-negative numbers; Mosaic GPU has no floor.
    units = functools.reduce(jnp.add, ((x * unit + 0.5).astype(jnp.int32) for x in parts))
    return in_floats(units.sum(axis=axis), exponent, digits)


def activated(sums, work):
    """Applies the activation, or the factor to a result without one."""
    gate, *up = sums
    activation, inner = work.activation, gate
    if not activation.is_gated:
        positive = jnp.where(gate < 0, 0.0, gate)
        return product_of(positive, positive)
    if not work.is_gated:
        return gate if work.factor == 1 else times(gate, work.factor)
    if activation.kind == GELU_TANH:  # as in `activation.act_and_mul`
        cube = times(product_of(product_of(gate, gate), gate), 0.044715)
        inner = times(sum_of(gate, cube), 1.5957691216057308)
    if activation.kind == SWIGLU_OAI:
        limit = activation.limit
        gate, *up = (jnp.where(x > limit, limit, x) for x in sums)
        up = [jnp.where(x < -limit, -limit, x) + 1.0 for x in up]
        inner = times(gate, activation.alpha)
    if activation.kind == SCALED_SILU:
        inner = gate = times(gate, activation.alpha)
    out = divided(gate, 1.0 + power_of_two(-inner * _LOG2_E)) * up[0]
    return times(out, activation.factor) if activation.kind == SCALED_SILU else out


class EpilogueOutputs:
    """Epilogue of a warpgroup's rows of a block, stored part by part."""

    def __init__(self, refs, shared, work, group, row, column, scales):
        self._out_ref, self._added_ref, self._scale_ref = refs.out, refs.added, refs.scale
        self._bias_ref, self._layer_ref = refs.bias, refs.layer
        self._work, self._row, self._column = work, row, column
        self._refs = refs
        self._parts = shared.parts.at[group]
        self._loaded = [shared.loaded.at[group * PARTS + slot] for slot in range(PARTS)]
        self._line = shared.parts.shape[-1]
        downs = range(0, work.tiles.rows // work.groups, WIDE)
        # A result of one line must have no second one, not even out of bounds: Mosaic GPU drops a
        # dimension of size 1 from a copy's target, and the offset along it.
        columns = min(work.tiles.columns, work.outputs)
        self._part_offsets = [(d, a) for d in downs for a in range(0, columns, self._line)]
        self._scales = scales

    def prepare(self):
        """Starts the loads of epilogue inputs before the main loop."""
        if self._work.is_added:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for number in range(min(PARTS, len(self._part_offsets))):
                self._fetch(number)
        if self._work.is_normed and self._scales is None:
            self._scales = {}
            for down in dict(self._part_offsets):
                scale_ref = self._scale_ref.at[pl.ds(self._row + down, WIDE)]
                self._scales[down] = plgpu.load(scale_ref, layout=_OF_ROWS, optimized=False)

    def store(self, sums):
        """Applies the epilogue and stores the result, without out-of-bounds rows and columns."""
        terms = []
        for number, (down, at) in enumerate(self._part_offsets):
            out = self._apply_epilogue(sums, down, at)
            part = self._parts.at[number % PARTS]
            if self._work.is_added:
                plgpu.barrier_wait(self._loaded[number % PARTS])
                out += plgpu.load(part, layout=_LAYOUT).astype(jnp.float32)
            else:
                plgpu.wait_smem_to_gmem(PARTS - 1, wait_read_only=True)
            out = out.astype(self._out_ref.dtype)
            part[...] = out
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(part, self._part_ref(self._out_ref, number))
            if self._refs.sums is not None:
                out = out.astype(jnp.float32)
                self._store_scaled(out, number)
                terms.append(out * out)
                if (at + self._line) % self._work.order.chunk == 0:
                    self._store_squares(terms, number)
                    terms = []
            if self._work.is_added and number + PARTS < len(self._part_offsets):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self._fetch(number + PARTS)

    def _store_scaled(self, out, number):
        """Stores a part times the scale of the next norm."""
        scaled_ref, norms_ref = self._refs.scaled, self._refs.norms
        if scaled_ref is None:
            return
        column = self._column + self._part_offsets[number][1]

        @pl.when(column < self._work.outputs)
        def _store():
            at = norms_ref.at[self._refs.norm_layer[0], pl.ds(column, self._line)]
            norm = plgpu.load(at, layout=_LAYOUT.reduce(0), optimized=False).astype(jnp.float32)
            read = out * lax.broadcast_in_dim(norm, out.shape, [1])
            self._part_ref(scaled_ref, number)[...] = read.astype(scaled_ref.dtype)

    def _store_squares(self, terms, number):
        """Stores the sums of squares of a chunk that ends with this part."""
        sums_ref, (down, at) = self._refs.sums, self._part_offsets[number]
        column = self._column + at

        @pl.when(column < self._work.outputs)
        def _store():
            chunk = lax.div(column, self._work.order.chunk)
            sums = added_up(terms, self._work.order.digits)
            sums_ref[pl.ds(self._row + down, WIDE), chunk] = sums

    def store_block_partials(self, sums):
        """Stores the block's LM-head partials, and its logits if one of its rows needs them."""
        tokens = self._refs.tokens[0]
        of_blocks = (self._refs.keys, self._refs.ids, self._refs.bad)
        for down in dict(self._part_offsets):
            best, ids, most = (None,) * 3
            for at in (at for of_rows, at in self._part_offsets if of_rows == down):
                x = self._apply_epilogue(sums, down, at)
                column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=_LAYOUT)
                column += self._column + at
                keys = jnp.where(column < tokens, key_of(x), LOWEST)
                sizes = lax.bitcast_convert_type(x, jnp.int32) & HIGHEST
                sizes = jnp.where(column < tokens, sizes, 0)
                if best is None:
                    best, ids, most = keys, column, sizes
                else:  # ids ascend, so the first of equal keys is kept
                    ids = jnp.where(keys > best, column, ids)
                    best, most = jnp.maximum(best, keys), jnp.maximum(most, sizes)
            first = best.max(axis=1)
            across = lax.broadcast_in_dim(first, best.shape, [0])
            winner = jnp.where(best == across, ids, HIGHEST).min(axis=1)
            is_bad = jnp.where(most.max(axis=1) >= KEY_OF_INFINITY, 1, 0)
            rows = pl.ds(self._row + down, WIDE)
            block = lax.div(self._column, self._work.tiles.columns)
            for ref, left in zip(of_blocks, (first, winner, is_bad), strict=True):
                ref[rows, block] = left
        asks_ref, first = self._refs.asks, lax.div(self._row, WIDE)
        asks = asks_ref[first]
        for number in range(1, self._work.tiles.rows // self._work.groups // WIDE):
            asks |= asks_ref[first + number]

        @pl.when((asks & LOGITS) != 0)
        def _store():
            self.store(sums)

        @pl.when((asks & GROUP_SUMEXP) != 0)
        def _store_groups():
            for down in dict(self._part_offsets):
                rows = pl.ds(self._row + down, WIDE)
                temperature = plgpu.load(
                    self._refs.temperature.at[rows], layout=_LAYOUT.reduce(1), optimized=False
                )
                for at in range(0, min(self._work.tiles.columns, self._work.outputs), GROUP):
                    self._store_group(sums, rows, down, at, temperature, tokens)

    def _store_group(self, sums, rows, down, at, temperature, tokens):
        """Same as `logits_processing.store_groups`, for a group of rows with a temperature."""
        keys, scores = [], []
        for part in range(at, at + GROUP, self._line):
            x = self._apply_epilogue(sums, down, part)
            x = divided(x, lax.broadcast_in_dim(temperature, x.shape, [0]))
            column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=_LAYOUT)
            is_one = column + (self._column + part) < tokens
            scores.append(x)
            keys.append(jnp.where(is_one, key_of(x), LOWEST))
        peaks = functools.reduce(jnp.maximum, keys).max(axis=1)
        across = lax.broadcast_in_dim(score_of(peaks), scores[0].shape, [0])
        total = None
        for key, x in zip(keys, scores, strict=True):
            weight = power_of_two((x - across) * _LOG2_E)
            weight = jnp.where(weight <= 1, weight, 0.0)
            # Integer conversion is the floor of non-negative numbers; Mosaic GPU has no floor.
            units = jnp.where(key > LOWEST, weight * 2.0**24 + 0.5, 0.0).astype(jnp.int32)
            total = units if total is None else total + units
        masses = total.sum(axis=1).astype(jnp.float32) * 2.0**-24
        group = lax.div(self._column + at, GROUP)

        @pl.when(group < self._refs.peaks.shape[1])
        def _store():
            self._refs.peaks[rows, group] = peaks
            self._refs.masses[rows, group] = masses

    def _apply_epilogue(self, sums, down, at):
        gate, *up = (x[down : down + WIDE, at : at + self._line] for x in sums)
        if self._work.is_normed:
            scale = lax.broadcast_in_dim(self._scales[down], gate.shape, [0])
            gate, *up = (x * scale for x in (gate, *up))
        if self._work.is_biased:
            gate, *up = (sum_of(x, self._bias(i, at)) for i, x in enumerate((gate, *up)))
        return activated((gate, *up), self._work)

    def _bias(self, number, at):
        """Loads the bias of the columns of a part, of the gate or of the up projection."""
        # Out-of-bounds columns are not written, but their loads must be in bounds.
        column = jnp.minimum(self._column + at, self._work.outputs - self._line)
        first = self._work.first + number * self._work.outputs + column
        of_layer = self._bias_ref.at[self._layer_ref[0]]
        bias = plgpu.load(
            of_layer.at[pl.ds(first, self._line)], layout=_LAYOUT.reduce(0), optimized=False
        )
        return lax.broadcast_in_dim(bias.astype(jnp.float32), (WIDE, self._line), [1])

    def _fetch(self, number):
        """Copies a part of the residual into the buffer of its sums."""
        slot = number % PARTS
        where = self._part_ref(self._added_ref, number)
        plgpu.copy_gmem_to_smem(where, self._parts.at[slot], self._loaded[slot])

    def _part_ref(self, ref, number):
        down, at = self._part_offsets[number]
        return ref.at[pl.ds(self._row + down, WIDE), pl.ds(self._column + at, self._line)]
