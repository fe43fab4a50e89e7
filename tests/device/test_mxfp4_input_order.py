"""Order in which tensor cores add the inputs of MXFP4 weights, as compiled for an absent GPU."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

# An import in this process, before the tests of kernels select the interpreter, would break them.
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

COMPILES = """
import torch
from bench.kernels.aot_cuda import absent_cuda
from kernels.tiles import LinearTiles
from shared.spec.reduction_order import SQUARES

how = {"depth": 64, "swapped": False, "described": False, "persistent": False, "widens": False}
tiles = LinearTiles(rows=16, columns=32, warps=1, stages=2, **how)
with absent_cuda(is_whole=True):
    from kernels.triton_gpu.gemm.linear import product

    how = {"format": "mxfp4_w4a16", "out_type": torch.bfloat16, "order": SQUARES, "tiles": tiles}
    for inputs in (512, 640):
        x = torch.empty((16, inputs), dtype=torch.bfloat16, device="cuda")
        words = torch.empty((32, inputs // 8), dtype=torch.int32, device="cuda")
        scales = torch.empty((32, inputs // 32), dtype=torch.uint8, device="cuda")
        product(x, words, scales, **how)
"""


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Triton's IR of a GEMM with blocks of 256 inputs, and of one with blocks of 128."""
    folder = tmp_path_factory.mktemp("cache")
    env = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILES]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    found = [path.read_text() for path in folder.glob("*/_product_kernel.ttgir")]
    assert len(found) == 2, done.stderr
    return found


def test_mxfp4_narrow_tiles_add_inputs_in_order(loops: list[str]) -> None:
    """Each thread has two neighbours of a part; with four, inputs change instructions."""
    for loop in loops:
        widths = re.findall(r"16x32xbf16, #ttg.dot_op<.*?kWidth = (\d+)", loop)
        assert set(widths) == {"2"}


def test_mxfp4_scales_are_loaded_ahead(loops: list[str]) -> None:
    for loop in loops:
        steps = loop[loop.index("scf.for") : loop.index("scf.yield")]
        assert "tt.load" not in steps
        assert steps.count("async_copy_global_to_local") >= 3
