"""Main loop of the WGMMA GEMMs of experts with packed weights (Pallas, Mosaic GPU).

One producer warpgroup copies blocks of packed words and of the rows into a ring in shared memory,
and all MXFP4 scales of the outputs at the start. The consumer warpgroup dequantises a part of a
block in registers while the tensor cores multiply the part before it. It loads FP8 scales some
steps ahead.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from kernels.pallas_gpu.gemm.linear_epilogue import WIDE
from kernels.pallas_gpu.gemm.linear_packed_sm90_mainloop import AHEAD, dequantised
from kernels.pallas_gpu.gemm.linear_sm90_mainloop import LINES
from kernels.pallas_gpu.gemm.mxfp4_w4a16 import mxfp4_assembly
from kernels.pallas_gpu.gemm.ptx import LAYOUT
from shared.models.activation import Activation
from shared.models.formats.four_bit import block_of
from shared.models.formats.fp8_w8a16 import FP8_BLOCK

FP8 = "fp8_w8a16"
FORMATS = {FP8: 4, "mxfp4_w4a16": 8}
"""Formats with a dequantisation below, and their inputs in an int32."""
GROUP = 32
"""Inputs of an MXFP4 scale, a byte."""
FOUR = 4 * GROUP
"""Inputs of four MXFP4 scales, which are read at once."""
PRODUCT = 64
"""Inputs that are dequantised and multiplied at once."""
_IN_FLIGHT = 2
"""Products that the tensor cores have yet to finish while the next part is dequantised."""
LEAST_DEPTH = 2 * _IN_FLIGHT * PRODUCT
"""Minimum inputs per step. Each step dequantises its products to the same registers, so a product
must not be in flight when the next step begins with it."""


@dataclass(frozen=True, kw_only=True)
class PackedExpertsWork:
    """Problem size and tile config.

    Attributes:
      operands: Their names, in order.
      format: Name of the weight format.
      inputs: Inputs of the weight, with those that fill its last block.
      outputs: Outputs of a projection.
      columns: Outputs of a projection of a program.
      is_gated: Whether a program has outputs of gate and up.
      lanes: Columns of the product: slots of a tile, or neighbours of a row.
      is_grouped: Whether a tile has the slots of expert blocks.
      slots: Slots of a row.
      rows_of: Consecutive slots that read the same row, without expert blocks.
      has_all_rows: Whether the lanes of all expert blocks are all rows, in their order.
      depth, stages: Inputs per step, in whole packed blocks, and pipeline stages.
      activation: Same as for `experts.act_and_mul_linear`.
      out_type: Type of the result.
    """

    operands: tuple[str, ...]
    format: str
    inputs: int
    outputs: int
    columns: int
    is_gated: bool
    lanes: int
    is_grouped: bool
    slots: int
    rows_of: int
    has_all_rows: bool
    depth: int
    stages: int
    activation: Activation | None
    out_type: Any

    @property
    def steps(self) -> int:
        """Returns the steps along the inputs; the last may have inputs out of bounds."""
        return pl.cdiv(self.inputs, self.depth)

    def first_row(self, tile: Any) -> Any:
        """Returns the first row of the lanes of a tile."""
        if self.has_all_rows:
            return 0
        group = tile if self.is_grouped else lax.div(lax.div(tile, self.rows_of), LINES)
        return group * self.lanes

    def firsts(self, column: Any) -> list[Any]:
        """Returns the first outputs of a program, by its first column: of gate and up, or one."""
        return [column + i * self.outputs for i in range(WIDE // self.columns)]

    @property
    def packed(self) -> int:
        """Returns the inputs in a word."""
        return FORMATS[self.format]

    @property
    def block(self) -> int:
        """Returns the inputs of a packed block."""
        return packed_block(self.format, self.inputs)

    @property
    def words(self) -> int:
        """Returns the words of an output in a packed block, a line in shared memory."""
        return self.block // self.packed


class PackedExpertsBuffers(NamedTuple):
    """Shared memory of a program.

    Attributes:
      rows, words: Rings of blocks.
      full, free: Barriers of the rings: a block is loaded, and is consumed.
      scales, bias: MXFP4 scales and biases of all outputs.
      ready: Barrier: both are loaded.
      sums: Accumulators, which bring gate and up of an output together.
      out: Result, slots by outputs.
    """

    rows: Any
    words: Any
    full: Any
    free: Any
    out: Any
    scales: Any = None
    bias: Any = None
    ready: Any = None
    sums: Any = None


def packed_block(format: str, inputs: int) -> int:
    """Returns the inputs of a packed block of a weight."""
    return FP8_BLOCK if format == FP8 else block_of(inputs)


def copy_blocks(refs, shared, work, tile, expert, column):
    """Producer: copies scales, biases and all blocks; elements out of bounds are zero."""
    layer, words, groups = refs.layer[0], work.depth // work.packed, work.inputs // GROUP
    firsts = work.firsts(column)
    weight_ref = refs.weights.at[layer, expert]
    row = work.first_row(tile)

    def copy(k, _):
        slot = lax.rem(k, work.stages)

        @pl.when(k >= work.stages)
        def _wait():
            plgpu.barrier_wait(shared.free.at[slot])

        full = shared.full.at[slot]
        for i, first in enumerate(firsts):
            at = weight_ref.at[pl.ds(first, work.columns), pl.ds(k * words, words)]
            place = shared.words.at[slot, pl.ds(i * work.columns, work.columns)]
            plgpu.copy_gmem_to_smem(at, place, full)
        x = refs.x.at[pl.ds(row, work.lanes), pl.ds(k * work.depth, work.depth)]
        plgpu.copy_gmem_to_smem(x, shared.rows.at[slot], full)

    in_bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    for i, first in enumerate(firsts):
        if shared.scales is not None:
            at = refs.scales.at[layer, expert, pl.ds(first * groups, work.columns * groups)]
            place = shared.scales.at[pl.ds(i * work.columns * groups, work.columns * groups)]
            plgpu.copy_gmem_to_smem(at, place, shared.ready, oob_mode=in_bounds)
        if refs.bias is not None:
            at = refs.bias.at[layer, expert, pl.ds(first, work.columns)]
            place = shared.bias.at[pl.ds(i * work.columns, work.columns)]
            plgpu.copy_gmem_to_smem(at, place, shared.ready, oob_mode=in_bounds)
    lax.fori_loop(0, work.steps, copy, None)


def sums_of(refs, shared, work, expert, column):
    """Consumer: multiplies the blocks of the ring; returns the accumulators, outputs by slots."""
    groups, parts = work.inputs // GROUP, WIDE // work.columns
    ahead = max(1, AHEAD // parts // work.depth)
    scales_at = functools.partial(_fp8_scales, refs, work, expert, column)

    def add_all(sums_ref):
        def add(k, later):
            if work.format == FP8:
                loaded, *later = [*later, scales_at(k + ahead)]
            slot = lax.rem(k, work.stages)

            # Products in flight are of the previous step: those of the step before are complete.
            @pl.when(k > 1)
            def _free():
                plgpu.barrier_arrive(shared.free.at[lax.rem(k - 2, work.stages)])

            plgpu.barrier_wait(shared.full.at[slot])
            for inputs in range(0, work.depth, PRODUCT):
                if inputs % work.block == 0:
                    at = pl.ds(inputs // work.packed, work.words)
                    words = plgpu.load(shared.words.at[slot, :, at], layout=LAYOUT)
                if work.format == FP8:
                    number, inner = divmod(inputs, FP8_BLOCK)
                    scales = _column_of(loaded[number], work)
                    weight = dequantised(words, [scales], inner // PRODUCT, FP8)
                else:
                    if inputs % FOUR == 0:
                        # The scales of inputs that do not exist must be finite.
                        at = jnp.minimum(k * work.depth + inputs, work.inputs - FOUR) // FOUR
                        scales = _four_scales(shared.scales, at, groups)
                    weight = _mxfp4(words, scales, inputs, work)
                x = shared.rows.at[slot, :, pl.ds(inputs, PRODUCT)]
                plgpu.wgmma(sums_ref, weight, x.transpose((1, 0)))
                plgpu.wgmma_wait(_IN_FLIGHT)
            return tuple(later)

        if shared.ready is not None:
            plgpu.barrier_wait(shared.ready)
        later = map(scales_at, range(ahead)) if work.format == FP8 else ()
        lax.fori_loop(0, work.steps, add, tuple(later))
        plgpu.wgmma_wait(0)
        return sums_ref[...]

    return pl.run_scoped(add_all, plgpu.ACC((WIDE, work.lanes), jnp.float32))


def _fp8_scales(refs, work, expert, column, step):
    """Loads the scales of each block of a step: of gate and up, or one; the last ones after it."""
    layer, blocks = refs.layer[0], work.depth // FP8_BLOCK
    numbers = [step * blocks + i for i in range(blocks)]
    numbers = [jnp.minimum(number, work.inputs // FP8_BLOCK - 1) for number in numbers]
    firsts = [lax.div(first, FP8_BLOCK) for first in work.firsts(column)]
    return [[refs.scales[layer, expert, first, number] for first in firsts] for number in numbers]


def _column_of(scales, work):
    """Returns the scales of the outputs of a program as a column, or one scale of all."""
    gate, *up = scales
    if not up:
        return gate
    row = plgpu.broadcasted_iota(jnp.int32, (WIDE,), 0, layout=LAYOUT.reduce(1))
    return jnp.where(row < work.columns, gate, up[0])


def _four_scales(scales_ref, at, groups):
    """Loads four bytes of each output at once, from bytes of all outputs."""
    kind = plgpu.ShapeDtypeStruct((WIDE,), jnp.int32, layout=LAYOUT.reduce(1))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=kind)
    def apply(_, own):
        words = ir.MemRefType.get(
            (WIDE,),
            ir.IntegerType.get_signless(32),
            ir.StridedLayoutAttr.get(0, [groups // 4]),
            utils.smem(),
        )
        own, layout = utils.ptr_as_memref(utils.memref_ptr(own), words), LAYOUT.reduce(1).to_mgpu()
        return mgpu.FragmentedArray.load_untiled(
            own, layout=layout, is_signed=True, optimized=False
        )

    # A slice up to the last byte that is read.
    return apply(scales_ref.at[pl.ds(4 * at, (WIDE - 1) * groups + 4)])


def _mxfp4(words, scales, inputs, work):
    """Dequantises the inputs of a product as an operand of WGMMA in registers.

    Args:
      words: A packed block.
      scales: Scales of `FOUR` inputs.
      inputs: First of the inputs of the product.
    """
    kind = plgpu.ShapeDtypeStruct((WIDE, PRODUCT), jnp.bfloat16, layout=LAYOUT)
    parts = range(PRODUCT // work.words)
    first = inputs % work.block // work.words

    @plgpu.inline_mgpu(arg_types=(LAYOUT, LAYOUT.reduce(1)), return_type=kind)
    def apply(_, words, scales):
        numbers = [(inputs % FOUR + part * work.words) // GROUP for part in parts]
        columns = {
            number: scales._pointwise(functools.partial(_scale_pair, number)).broadcast_in_dim(
                words.shape, (0,), words.layout
            )
            for number in sorted(set(numbers))
        }
        made = [
            words._pointwise(
                functools.partial(_two_codes, mxfp4_assembly(first + part)), columns[number]
            )
            for part, number in zip(parts, numbers, strict=True)
        ]
        registers = np.concatenate([part.registers for part in made], axis=1)
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=None)

    return apply(words, scales)


def _scale_pair(number, word):
    """Returns a byte of a word as the exponents of two bfloat16."""
    kind, at = ir.IntegerType.get_signless(32), ir.DenseI64ArrayAttr.get([0])
    text = f"{{\n.reg .b32 t;\nprmt.b32 t, $1, 0, 0x4{number}4{number};\nshl.b32 $0, t, 7;\n}}"
    given = vector.extract(word, dynamic_position=[], static_position=at)
    return vector.from_elements(word.type, [llvm.inline_asm(kind, [given], text, "=r,r")])


def _two_codes(text, words, scales):
    """Applies PTX to the codes of two neighbouring words of a thread."""
    kind = ir.IntegerType.get_signless(32)
    places = [ir.DenseI64ArrayAttr.get([i]) for i in range(2)]
    given = [vector.extract(words, dynamic_position=[], static_position=at) for at in places]
    given.append(vector.extract(scales, dynamic_position=[], static_position=places[0]))
    made = llvm.inline_asm(kind, given, text, "=r,r,r,r")
    return llvm.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), made)
