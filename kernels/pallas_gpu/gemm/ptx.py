"""Instructions of PTX on the registers of a warpgroup, for Pallas by Mosaic GPU.

Mosaic GPU lets a compiler make one rounding of a product and a sum, and has divisions and powers of
two of its own. What must have the bits of Triton is an instruction that is rounded by itself.
"""

import functools
import struct

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

LAYOUT = plgpu.Layout.WGMMA
"""How the matrix units leave their sums in the registers of a warpgroup."""


def multiplied_sum(x, y, added):
    """The product of the first two and the third, rounded once."""
    return _instruct("fma.rn.f32", x, y, added)


def divided(x, by):
    """As Triton divides; Mosaic's own division is rounded to the nearest."""
    return _instruct("div.full.f32", x, by)


def sum_of(x, y, layout=LAYOUT):
    """Rounded by itself, whatever was multiplied before."""
    return _instruct("add.rn.f32", x, y, layout=layout)


def product_of(x, y, layout=LAYOUT):
    """Rounded by itself, whatever is added behind."""
    return _instruct("mul.rn.f32", x, y, layout=layout)


def times(x, factor, layout=LAYOUT):
    """As `product_of`, with a number."""
    return _instruct("mul.rn.f32", x, constant=_constant(factor), layout=layout)


def plus(x, number, layout=LAYOUT):
    """As `sum_of`, with a number."""
    return _instruct("add.rn.f32", x, constant=_constant(number), layout=layout)


def inverse_root(x, layout=LAYOUT):
    """One over the square root of each number."""
    return _instruct("rsqrt.approx.ftz.f32", x, layout=layout)


def power_of_two(x):
    """2 to the power of each number."""
    return _instruct("ex2.approx.f32", x)


def flushed_power_of_two(x, layout=LAYOUT):
    """As `power_of_two`, and as Triton has it: 0 where there is no normal number."""
    return _instruct("ex2.approx.ftz.f32", x, layout=layout)


def _constant(number):
    return f", 0f{struct.unpack('<I', struct.pack('<f', number))[0]:08X}"


def _instruct(instruction, x, *others, constant="", layout=LAYOUT):
    """One instruction of PTX for each element; a constant is its last operand."""
    kind = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,) * (1 + len(others)), return_type=kind)
    def apply(_, x, *others):
        one = functools.partial(_instruct_lane, instruction, constant=constant)
        return x._pointwise(one, *others)

    return apply(x, *others)


def _instruct_lane(instruction, x, *others, constant):
    """The instruction for what a thread holds together: a number, or a vector."""
    kind, operands = x.type, (x, *others)
    if not isinstance(kind, ir.VectorType):
        places = ", ".join(f"${number}" for number in range(len(operands) + 1))
        constraints = ",".join(["=f"] + ["f"] * len(operands))
        return llvm.inline_asm(kind, operands, f"{instruction} {places}{constant};", constraints)
    packed = llvm.mlir_undef(kind)
    for i in range(kind.shape[0]):
        at = {"dynamic_position": [], "static_position": ir.DenseI64ArrayAttr.get([i])}
        lanes = (vector.extract(x, **at) for x in operands)
        made = _instruct_lane(instruction, *lanes, constant=constant)
        packed = vector.insert(made, packed, **at)
    return packed
