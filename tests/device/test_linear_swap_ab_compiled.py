"""GEMMs with swap-AB, copied by TMA, as compiled for an absent GPU."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.compiled_triton import HALF_BYTES, compiled_by

COMPILES = """
import torch
from bench.kernels.aot_cuda import absent_cuda
from kernels.tiles import LinearTiles
from shared.spec.reduction_order import SQUARES

K, N = 4096, 4096
PACKED = {"fp8_w8a16": 4, "int4_w4a16": 8}
COPIED = {"swapped": True, "described": True, "persistent": False, "widens": False, "warps": 4}

def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")

def compile(format, kind, segments=1, R=128, K=K, N=N, group=128, has_zeros=False, **change):
    is_gated = kind == "gated"
    stored, packed = N * (1 + is_gated), PACKED.get(format)
    cut = COPIED | {"columns": 32 if is_gated else 64, "depth": 256, "separate": segments > 1}
    how = {"is_gated": is_gated, "segments": segments, "tiles": LinearTiles(**(cut | change))}
    if is_gated:
        how |= {"squares": tensor(R, K // 64, dtype=torch.float32), "eps": 1e-6}
    else:
        how |= {"added": tensor(R, N), "norm": tensor(N, dtype=torch.float32)}
    weight, scales = tensor(stored, K), None
    if packed:
        whole, kind = -(-K // 128) * 128, torch.int32 if has_zeros else torch.bfloat16
        weight = tensor(stored, whole // packed, dtype=torch.int32)
        scales = tensor(stored // 128 if packed == 4 else stored, whole // group, dtype=kind)
    linear.product(
        tensor(R, K),
        weight,
        scales,
        format=format,
        out_type=torch.bfloat16,
        order=SQUARES,
        **how,
    )

with absent_cuda(is_whole=True) as compiler:
    from kernels.triton_gpu.gemm import linear

    for kind in ("gated", "added"):
        compile("fp8_w8a16", kind, rows=64, stages=4)
        compile("fp8_w8a16", kind, rows=128, stages=2)
        compile("int4_w4a16", kind, rows=128, stages=3)
    compile("int4_w4a16", "added", segments=2, rows=128, stages=3)
    for kind in ("gated", "added"):
        compile("plain", kind, R=1, rows=16, depth=128, stages=6)
        compile("plain", kind, R=16, rows=16, depth=128, stages=5)
        compile("plain", kind, R=32, rows=32, depth=128, stages=4)
        compile("plain", kind, R=1, K=2880, rows=16, depth=128, stages=6)
    for group, has_zeros in ((32, False), (32, True), (64, False)):
        how = {"group": group, "has_zeros": has_zeros}
        compile("int4_w4a16", "gated", R=1, K=2816, rows=16, stages=4, **how)
        compile("int4_w4a16", "added", R=8, K=8192, segments=2, rows=16, stages=8, **how)
        compile("int4_w4a16", "added", R=32, K=2112, rows=32, stages=5, **how)
    for format in ("fp8_w8a16", "int4_w4a16"):  # by `mma.sync`
        compile(format, "gated", R=8, N=12288, rows=16, stages=2)
    for kernel in compiler.kernels:
        print(kernel.name, kernel.spilled_bytes, kernel.registers, kernel.shared_bytes)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_swap_ab_linear_compiles_without_spills(tmp_path: Path) -> None:
    """Tiles of few rows in bfloat16 leave half of a multiprocessor to the next kernel.

    INT4 scales of 32 inputs, with a zero point each and a partial last step, fit in registers.
    """
    found = compiled_by(COMPILES, tmp_path)
    assert len(found) == 26
    assert {kernel.name for kernel in found} == {"_linear_swap_ab_kernel"}
    assert {kernel.spilled for kernel in found} == {0}
    assert [kernel.registers for kernel in found] == [128] * 7 + [80] * 8 + [128] * 9 + [80] * 2
    assert max(kernel.shared for kernel in found[7:15]) <= HALF_BYTES
