"""Main loop of the WGMMA GEMM of packed weights (Pallas, Mosaic GPU).

A producer warpgroup copies blocks of packed words and of the rows by TMA. The consumer warpgroup
dequantises a part of a block in registers while the tensor cores multiply the part before it.
"""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from kernels.pallas_gpu.gemm.block_loaders import shares_of
from kernels.pallas_gpu.gemm.fp8_w8a16 import fp8_assembly
from kernels.pallas_gpu.gemm.int4_w4a16 import int4_assembly, int4_scales
from kernels.pallas_gpu.gemm.linear_epilogue import WIDE
from kernels.pallas_gpu.gemm.ptx import LAYOUT

FORMATS = {"int4_w4a16": 256, "fp8_w8a16": 128}
"""Formats with a dequantisation below, and their inputs in a block of `WORDS` words."""
WORDS = 32
"""Words of an output in a block, a shared-memory line."""
GROUPS = {"int4_w4a16": (32, 64, 128), "fp8_w8a16": (128,)}
"""Inputs of a scale."""
PAIR = 64
"""Inputs of a product: two parts of a block."""
AHEAD = 1024
"""Inputs from the loaded scales to the used ones, divided among gate and up."""
_MOST_SCALES = 16
"""Scales of a thread's output that are loaded in advance, if these are fewer."""
_IN_FLIGHT = 2
"""Products that the tensor cores have yet to finish while the next part is dequantised; 1 of them
with a gate, so that two programs have enough registers on a multiprocessor. A step has more
products, since the next one dequantises to the same registers."""
_FEW_ROWS = 32
"""Maximum rows of a tile without large blocks, see `is_large`."""


def is_large(rows, weights):
    """Returns whether blocks are large, so that shared memory has space for few stages.

    A program then frees each block one step earlier, and has only parts of a result that it uses.
    """
    return rows > _FEW_ROWS or weights > 1


def copy_blocks(refs, shared, work, format, row, column, begin):
    """Producer: copies the blocks of a segment, from step `begin`; rows out of bounds are zero."""
    tiles, count = work.tiles, work.tiles.depth // FORMATS[format] * WORDS
    weight_ref, large = refs.weights.at[refs.layer[0]], is_large(tiles.rows, work.weights)

    def copy(k, _):
        slot = lax.rem(k, tiles.stages)

        @pl.when(k >= (tiles.stages - 1 if large else tiles.stages))
        def _wait():
            plgpu.barrier_wait(shared.free.at[slot])

        full = shared.full.at[slot]
        for number in range(work.weights):
            first = work.first + number * work.outputs + column
            words = weight_ref.at[pl.ds(first, WIDE), pl.ds((begin + k) * count, count)]
            place = shared.words.at[slot, pl.ds(number * WIDE, WIDE)]
            plgpu.copy_gmem_to_smem(words, place, full)
        x = refs.x.at[pl.ds(row, tiles.rows), pl.ds((begin + k) * tiles.depth, tiles.depth)]
        plgpu.copy_gmem_to_smem(x, shared.rows.at[slot], full)

    lax.fori_loop(0, work.segment_steps, copy, None)


def sums_of(refs, shared, work, format, column, begin):
    """Consumer: multiplies the blocks of a segment, from step `begin`.

    Returns the accumulators, outputs by rows.
    """
    tiles, layer = work.tiles, refs.layer[0]
    inputs = FORMATS[format]
    group = refs.weights.shape[-1] * (inputs // WORDS) // refs.scales.shape[-1]
    groups, blocks = tiles.depth // group, tiles.depth // inputs
    ahead = min(AHEAD // work.weights // tiles.depth, _MOST_SCALES // work.weights // groups)
    ahead = max(1, ahead)
    outputs = [work.first + i * work.outputs + column for i in range(work.weights)]
    share, _ = shares_of(refs.weights.shape, refs.scales.shape)
    in_flight = _IN_FLIGHT // work.weights
    large = is_large(tiles.rows, work.weights)

    def scales_at(step):
        first = (begin + jnp.minimum(step, work.segment_steps - 1)) * groups
        return [[_stored(refs, layer, o, share, first + i) for i in range(groups)] for o in outputs]

    def add_all(*sums_refs):
        def add(k, later):
            scales, *later = [*later, scales_at(k + ahead)]
            slot = lax.rem(k, tiles.stages)

            # Products in flight are of the previous step: those of the step before are complete.
            if not large:

                @pl.when(k > 1)
                def _free():
                    plgpu.barrier_arrive(shared.free.at[lax.rem(k - 2, tiles.stages)])

            plgpu.barrier_wait(shared.full.at[slot])
            products = 0
            for block, (i, sums_ref) in itertools.product(range(blocks), enumerate(sums_refs)):
                at = pl.ds(i * WIDE, WIDE), pl.ds(block * WORDS, WORDS)
                words = plgpu.load(shared.words.at[slot, *at], layout=LAYOUT)
                for number in range(inputs // PAIR):
                    first = block * inputs + number * PAIR
                    x = shared.rows.at[slot, :, pl.ds(first, PAIR)]
                    both = dict.fromkeys((first // group, (first + PAIR // 2) // group))
                    stored = [scales[i][at] for at in both]
                    weight = dequantised(words, stored, number, format)
                    plgpu.wgmma(sums_ref, weight, x.transpose((1, 0)))
                    plgpu.wgmma_wait(in_flight)
                    products += 1
                    if large and products == in_flight:
                        # The step before is complete. There is none at first, so the first arrival
                        # frees the last block, which is not copied before it: a branch would
                        # serialise the products.
                        last = lax.rem(k + tiles.stages - 1, tiles.stages)
                        plgpu.barrier_arrive(shared.free.at[last])
            return tuple(later)

        lax.fori_loop(0, work.segment_steps, add, tuple(map(scales_at, range(ahead))))
        plgpu.wgmma_wait(0)
        return [sums_ref[...] for sums_ref in sums_refs]

    shape = plgpu.ACC((WIDE, tiles.rows), jnp.float32)
    return pl.run_scoped(add_all, *[shape] * work.weights)


def _stored(refs, layer, output, share, group):
    """Loads the scales of `WIDE` outputs in a group: a vector, or one number for all."""
    if share > 1:
        return refs.scales[layer, lax.div(output, share), group]
    at = refs.scales.at[layer, pl.ds(output, WIDE), group]
    return plgpu.load(at, layout=LAYOUT.reduce(1), optimized=False)


def dequantised(words, stored, number, format):
    """Dequantises two neighbouring parts of a block as an operand of WGMMA in registers.

    `stored` are the scales of each part, or those of both.
    """
    if format == "int4_w4a16":
        columns = [_columns(int4_scales(each)) for each in stored]
        texts = [int4_assembly(2 * number + i, len(columns[0]) > 1) for i in range(2)]
    else:
        columns = [[each] for each in stored]
        texts = [fp8_assembly(2 * number + i, is_scaled=True) for i in range(2)]
    count = len(columns[0])
    columns = [_across(column, words.shape) for each in columns for column in each]
    kind = plgpu.ShapeDtypeStruct((WIDE, PAIR), jnp.bfloat16, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT,) * (1 + len(columns)), return_type=kind)
    def apply(_, words, *columns):
        each = zip(texts, (columns[:count], columns[-count:]), strict=True)
        parts = [words._pointwise(functools.partial(_two_codes, text), *own) for text, own in each]
        registers = np.concatenate([part.registers for part in parts], axis=1)
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=None)

    return apply(words, *columns)


def _columns(scales):
    """Returns the operands of `int4_assembly`."""
    return [scales.upper, *([] if scales.rest is None else [scales.rest, scales.shift])]


def _across(column, shape):
    if column.ndim:
        return lax.broadcast_in_dim(column, shape, [0])
    return plgpu.layout_cast(lax.broadcast(column, shape), LAYOUT)


def _two_codes(text, words, *scales):
    """Applies PTX to the codes of two neighbouring words of a thread."""
    word = ir.IntegerType.get_signless(32)
    places = [ir.DenseI64ArrayAttr.get([i]) for i in range(2)]
    given = [vector.extract(words, dynamic_position=[], static_position=at) for at in places]
    given += [llvm.bitcast(word, scale) for scale in scales]
    made = llvm.inline_asm(word, given, text, ",".join(["=r"] + ["r"] * len(given)))
    return llvm.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), made)
