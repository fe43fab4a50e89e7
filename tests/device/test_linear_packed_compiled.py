"""GEMMs of many rows with packed weights, copied by TMA, as compiled for an absent GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

COMPILES = """
import torch
from bench.kernels.aot_cuda import absent_cuda
from kernels.tiles import LinearTiles
from shared.spec.reduction_order import SQUARES

R, K, N = 128, 4096, 4096
COPIED = {"swapped": True, "described": True, "persistent": False, "widens": False, "warps": 4}

def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")

def compile(format, kind, segments=1, **change):
    is_gated = kind == "gated"
    stored, packed = N * (1 + is_gated), 4 if format == "fp8_w8a16" else 8
    cut = COPIED | {"columns": 32 if is_gated else 64, "depth": 256, "separate": segments > 1}
    how = {"is_gated": is_gated, "segments": segments, "tiles": LinearTiles(**(cut | change))}
    if is_gated:
        how |= {"squares": tensor(R, K // 64, dtype=torch.float32), "eps": 1e-6}
    else:
        how |= {"added": tensor(R, N), "norm": tensor(N, dtype=torch.float32)}
    linear.product(
        tensor(R, K),
        tensor(stored, K // packed, dtype=torch.int32),
        tensor(stored // 128 if packed == 4 else stored, K // 128),
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
    for kernel in compiler.kernels:
        print(kernel.name, kernel.spilled_bytes, kernel.registers)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_packed_linear_of_many_rows_compiles_without_spills(tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILES]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 7, done.stderr
    assert {tuple(line) for line in lines} == {("_linear_packed_sm90_kernel", "0", "128")}
