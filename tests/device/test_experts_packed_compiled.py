"""Kernels of experts with TMA copies of the weight, as compiled for an absent GPU."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.compiled_triton import HALF_BYTES, compiled_by

# An import in this process, before the tests of kernels select the interpreter, would break them.
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

COMPILES = """
from dataclasses import replace
import torch
from bench.kernels.aot_cuda import absent_cuda
from kernels.routing import RoutingSettings
from kernels.tiles import MEASURED, Tiles
from shared.spec.reduction_order import SQUARES
from tests.support.cases.moe.experts import GEMMA, NEMOTRON, OSS

usual = {"groups": 1, "top_groups": 1, "is_sigmoid": False, "is_renormalised": True}
usual |= {"factor": 1.0, "output_factor": 1.0, "is_shared": False, "is_gated": False}
choice = RoutingSettings(experts=4, top=2, **usual)
usual = Tiles.load("triton_gpu", MEASURED).experts.lines[0].tiles

def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")

def compile(format, hidden, inner, scale, columns, activation, grouped, halves=2, **changed):
    cut = {"depth": 256, "down_depth": 256, "down_columns": 2 * columns, "columns": columns}
    cut = replace(usual, copies_packed=True, grouped=grouped, **(cut | changed))
    whole = lambda inputs: -(-inputs // 128) * 128
    def stored(outputs, inputs):
        if format == "plain":
            return ExpertWeights(tensor(4, outputs, inputs), None, tensor(4, outputs))
        packed, shape = 8, (outputs, whole(inputs) // 32)
        if format == "fp8_w8a16":
            packed, shape = 4, (outputs // 128, whole(inputs) // 128)
            shape = shape if scale == torch.bfloat16 else (outputs, 1)
        words = tensor(4, outputs, whole(inputs) // packed, dtype=torch.int32)
        return ExpertWeights(words, tensor(4, *shape, dtype=scale), tensor(4, outputs))
    ids, arrivals = tensor(8, 2, dtype=torch.int32), tensor(8 * hidden, dtype=torch.int32)
    how = {"format": format, "routing": choice, "squares_order": SQUARES, "tiles": cut}
    blocks = group(ids, arrivals, routing=choice, tiles=cut) if grouped else None
    x, squares = tensor(8, hidden), tensor(8, -(-hidden // 64), dtype=torch.float32)
    gate_up = stored(halves * inner, hidden), ids, blocks, None
    inner = experts.act_and_mul_linear(
        x, squares, *gate_up, eps=1e-5, activation=activation, **how
    )
    chosen = RouterSelection(ids, tensor(8, 2, dtype=torch.float32))
    down = stored(hidden, inner.shape[1])
    experts.linear_add(inner, down, chosen, blocks, x, x[0], arrivals, None, **how)

with absent_cuda(is_whole=True) as compiler:
    from kernels.triton_gpu.gemm.moe_gemm_tiles import ExpertWeights
    from kernels.triton_gpu.moe import experts
    from kernels.triton_gpu.moe.moe_align import group
    from kernels.triton_gpu.moe.router import RouterSelection

    for grouped in (False, True):
        compile("mxfp4_w4a16", 2880, 2880, torch.uint8, 32, OSS.activation, grouped)
        compile("mxfp4_w4a16", 2880, 1440, torch.uint8, 16, OSS.activation, grouped)
        compile("int4_w4a16", 2816, 704, torch.bfloat16, 32, GEMMA.activation, grouped)
        compile("fp8_w8a16", 2048, 512, torch.bfloat16, 32, GEMMA.activation, grouped)
        compile("fp8_w8a16", 2688, 1856, torch.float32, 32, NEMOTRON.activation, grouped, 1)
    two = {"warps": 2, "down_warps": 2}
    compile("fp8_w8a16", 2048, 512, torch.bfloat16, 32, GEMMA.activation, False, **two)
    cut = {"depth": 128, "stages": 5, "down_depth": 128, "slots": 8}
    for grouped in (False, True):
        compile("plain", 2048, 512, None, 32, GEMMA.activation, grouped, **cut)
        compile("plain", 2816, 704, None, 16, GEMMA.activation, grouped, **cut)
        compile("plain", 2688, 1856, None, 32, NEMOTRON.activation, grouped, 1, **cut)
    for kernel in compiler.kernels:
        if "packed_sm90" in kernel.name:
            print(kernel.name, kernel.spilled_bytes, kernel.registers, kernel.shared_bytes)
"""


def test_copied_experts_compile_without_spills(tmp_path: Path) -> None:
    """Two programs or more with tiles of bfloat16 fit on a multiprocessor."""
    found = compiled_by(COMPILES, tmp_path)
    assert len(found) == 34
    assert {kernel.spilled for kernel in found} == {0}
    assert max(kernel.registers for kernel in found) <= 128
    assert max(kernel.registers for kernel in found[22:]) <= 64
    assert max(kernel.shared for kernel in found[22:]) <= HALF_BYTES
