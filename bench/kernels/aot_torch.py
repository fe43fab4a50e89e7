"""Compiles what torch runs on an H200 where there is none, by the Triton that is installed.

    python -m bench.kernels.aot_torch
    python -m bench.kernels.aot_torch --only mix linear --whole

Every kernel in the cases of a real model's size that the tests of the operations have, with the
tiles of an H200. Without `--whole` only Triton's own representation is made of a kernel, in a
tenth of a second: what its language refuses is seen. With it the kernel is compiled, and its
registers, what it spills and its shared memory are told, of which it may want no more than there
is. Nothing is timed: without a device nothing can be.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from bench.kernels.aot import HEADER, cases_of, line_of
from bench.kernels.compiled import MOST_SHARED_BYTES, Thunk, read_ptxas
from tests.support.op_case import OpCase
from tests.support.triton_driver import CAPABILITY, Driver
from torch_impl.compiling import told

GPU = "NVIDIA H200"


class Zeros:
    """A generator whose normal numbers are zeros, which take no time; the others are drawn."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def standard_normal(self, size: Any = None, dtype: Any = np.float64) -> np.ndarray:
        """Of the shape and type that are asked for."""
        return np.zeros(() if size is None else size, dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rng, name)


def assembled(ptx: str) -> str:
    """What ptxas says of a kernel.

    Raises:
      ValueError: It refuses the kernel.
    """
    ptxas = import_module("triton.backends.nvidia.compiler").get_ptxas(CAPABILITY).path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        command = [ptxas, "-v", f"--gpu-name=sm_{CAPABILITY}a", str(path), "-o", f"{path}.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"ptxas refuses it: {done.stderr}")
    return done.stderr


class Compiled:
    """Notes the kernels that are compiled.

    Attributes:
      case: The case that asks for them.
      names: Of the kernels, once for each time that one is made.
    """

    def __init__(self, is_whole: bool) -> None:
        self.case, self.names = "", list[str]()
        self._is_whole, self._compiler = is_whole, import_module("triton.compiler.compiler")
        self._compile = self._compiler.compile

    def __call__(self, src: Any, target: Any, options: dict, **more: Any) -> Any:
        """Stands where Triton compiles a kernel."""
        self.names.append(src.name)
        if not self._is_whole:
            self._read(src, target, options)
            return None  # nothing that could be launched
        kernel = self._compile(src, target=target, options=options, **more)
        started = Thunk("kCustomKernel", src.name, 0, kernel.metadata.shared)
        for found in read_ptxas(assembled(kernel.asm["ptx"]), [started]):
            print(line_of(found, self.case, None), flush=True)
            if found.shared_bytes > MOST_SHARED_BYTES:
                raise ValueError(f"{found.name} wants more shared memory than a block can have")
        return kernel

    def _read(self, src: Any, target: Any, options: dict) -> None:
        backend = self._compiler.make_backend(target)
        parsed = backend.parse_options(dict(options))
        context = self._compiler.ir.context()
        self._compiler.ir.load_dialects(context)
        backend.load_dialects(context)
        found = backend.get_codegen_implementation(parsed), backend.get_module_map()
        src.make_ir(target, parsed, *found, context)


def operations() -> Any:
    """The ops of torch with kernels, though there is no GPU: what they are given has no memory."""
    with patch.multiple(torch.cuda, is_available=lambda: True, get_device_name=lambda *_: GPU):
        ops: Any = import_module("torch_impl.ops")
        side = import_module("tests.support.op_sides").TorchSide()
    ops.kernels_on = lambda device: ops.KERNELS
    how = {"is_launched": True, "enable_fp_fusion": False, "launch_pdl": True}
    module: Any
    for name, module in list(sys.modules.items()):
        if name.startswith("kernels.triton_gpu.") and hasattr(module, "launching"):
            module.launching = lambda x: how
        if name.startswith("kernels.triton_gpu.") and hasattr(module, "is_on_hopper"):
            module.is_on_hopper = lambda: True

    def placed(value: Any, dtype: str) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        own = torch.from_numpy(value[:0].copy() if value.ndim else value).dtype
        is_float = own.is_floating_point
        return torch.empty(
            value.shape, dtype=getattr(torch, dtype) if is_float else own, device="meta"
        )

    side._array = placed
    return side


def run(case: OpCase, side: Any) -> None:
    """Calls an operation, which compiles its kernels and launches none."""
    draw: Callable[..., np.random.Generator] = np.random.default_rng
    with patch.object(np.random, "default_rng", lambda *seed: Zeros(draw(*seed))):
        arguments = case.make(0)
    with side.with_tiles(case, {}):
        side.operation(case)(*side.placed(case, arguments))


def main() -> int:
    """Prints what is compiled; the exit code is 1 where something cannot be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="as of `bench.kernels.aot`"
    )
    parser.add_argument("--whole", action="store_true", help="compile to the end")
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    triton, jit = import_module("triton"), import_module("triton.runtime.jit")
    triton.runtime.driver.set_active(Driver())
    side, launch = operations(), jit.JITFunction.run
    compiled = Compiled(options.whole)
    faults = 0

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **how: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **how)

    if options.whole:
        print(HEADER)
    with (
        patch.object(jit.JITFunction, "run", compile_only),
        patch.object(import_module("triton.compiler"), "compile", compiled),
    ):
        for case in cases_of(options.only):
            compiled.case = case.name
            try:
                run(case, side)
            except Exception as error:  # of whatever kind: the others are still to be compiled
                faults += 1
                print(f"FAULT: {case}: {' '.join(told(error).split())[:400]}", flush=True)
    kinds = len(set(compiled.names))
    print(f"aot of torch: {kinds} kernels, {len(compiled.names)} compiled, {faults} faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
