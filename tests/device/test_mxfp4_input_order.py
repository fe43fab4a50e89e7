"""Order in which tensor cores add the inputs of MXFP4 weights, as compiled for an absent GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COMPILES = """
import torch
from bench.kernels.aot_cuda import absent_cuda
from kernels.tiles import LinearTiles
from shared.spec.reduction_order import SQUARES

how = {"depth": 64, "swapped": False, "described": False, "persistent": False, "widens": False}
tiles = LinearTiles(rows=16, columns=32, warps=1, stages=2, **how)
with absent_cuda(is_whole=True):
    from kernels.triton_gpu.gemm.linear import product

    x = torch.empty((16, 512), dtype=torch.bfloat16, device="cuda")
    words = torch.empty((32, 64), dtype=torch.int32, device="cuda")
    scales = torch.empty((32, 16), dtype=torch.uint8, device="cuda")
    how = {"format": "mxfp4_w4a16", "out_type": torch.bfloat16, "order": SQUARES, "tiles": tiles}
    product(x, words, scales, **how)
"""


def test_mxfp4_narrow_tiles_add_inputs_in_order(tmp_path: Path) -> None:
    """Each thread has two neighbours of a part; with four, inputs change instructions."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILES]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    found = [path.read_text() for path in tmp_path.glob("*/_product_kernel.ttgir")]
    assert len(found) == 1, done.stderr
    widths = re.findall(r"16x32xbf16, #ttg.dot_op<.*?kWidth = (\d+)", found[0])
    assert set(widths) == {"2"}
