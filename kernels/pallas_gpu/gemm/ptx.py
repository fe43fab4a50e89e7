"""PTX instructions on the registers of a warpgroup (Pallas, Mosaic GPU).

Mosaic GPU lets the compiler fuse a product with a sum, and has its own divisions and powers of two.
Results that must equal Triton's use instructions that are rounded individually.
"""

import functools
import struct

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

LAYOUT = plgpu.Layout.WGMMA
"""Register layout of WGMMA accumulators of a warpgroup."""


def multiplied_sum(x, y, added):
    """Computes x * y + added with one rounding (FMA)."""
    return _instruct("fma.rn.f32", x, y, added)


def divided(x, by):
    """Divides as Triton does; Mosaic GPU's own division rounds to nearest."""
    return _instruct("div.full.f32", x, by)


def sum_of(x, y, layout=LAYOUT):
    """Adds with its own rounding, also after a product."""
    return _instruct("add.rn.f32", x, y, layout=layout)


def product_of(x, y, layout=LAYOUT):
    """Multiplies with its own rounding, also before a sum."""
    return _instruct("mul.rn.f32", x, y, layout=layout)


def times(x, factor, layout=LAYOUT):
    """Same as `product_of`, with a constant."""
    return _instruct("mul.rn.f32", x, constant=_constant(factor), layout=layout)


def plus(x, number, layout=LAYOUT):
    """Same as `sum_of`, with a constant."""
    return _instruct("add.rn.f32", x, constant=_constant(number), layout=layout)


def inverse_root(x, layout=LAYOUT):
    """Computes one over the square root of each element."""
    return _instruct("rsqrt.approx.ftz.f32", x, layout=layout)


def power_of_two(x):
    """Computes 2 to the power of each element."""
    return _instruct("ex2.approx.f32", x)


def flushed_power_of_two(x, layout=LAYOUT):
    """Same as `power_of_two`, with subnormal results flushed to 0 as in Triton."""
    return _instruct("ex2.approx.ftz.f32", x, layout=layout)


def _constant(number):
    return f", 0f{struct.unpack('<I', struct.pack('<f', number))[0]:08X}"


def _instruct(instruction, x, *others, constant="", layout=LAYOUT):
    """Applies one PTX instruction to each element; a constant is its last operand."""
    kind = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,) * (1 + len(others)), return_type=kind)
    def apply(_, x, *others):
        one = functools.partial(_instruct_lane, instruction, constant=constant)
        return x._pointwise(one, *others)

    return apply(x, *others)


def _instruct_lane(instruction, x, *others, constant):
    """Applies the instruction to the elements of one thread: a scalar or a vector."""
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
