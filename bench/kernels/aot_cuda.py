"""CUDA in torch for an absent GPU: tensors without memory, and kernels that do not run."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from subprocess import run
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from bench.kernels.compiled import MOST_SHARED_BYTES, Kernel, Thunk, misaligned_access, read_ptxas
from shared.boundary.buffers import empty_plan
from shared.boundary.program import Program
from shared.boundary.tp_group import TPGroup
from shared.models.parameter import Parameter
from shared.options.command_line import parse
from shared.process.device import Device
from shared.process.start import prepare
from tests.support.triton_driver import CAPABILITY, Driver

GPU, MULTIPROCESSORS, FREE_BYTES = "NVIDIA H200", 132, 110 * 2**30
_IS_CUDA, _DEVICE = torch.Tensor.is_cuda.__get__, torch.Tensor.device.__get__  # type: ignore[attr-defined]


class AbsentCuda(TorchFunctionMode):
    """Mode in which tensors on a GPU have no memory, and report the GPU as their device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func == _IS_CUDA:
            return args[0].is_meta
        if func == _DEVICE:
            return torch.device("cuda", 0) if args[0].is_meta else args[0].device
        named = {name: _elsewhere(value) for name, value in (kwargs or {}).items()}
        return func(*map(_elsewhere, args), **named)


def _elsewhere(value: Any) -> Any:
    kind = value.type if isinstance(value, torch.device) else value
    is_cuda = isinstance(kind, str) and kind.partition(":")[0] == "cuda"
    return torch.device("meta") if is_cuda else value


class Compiler:
    """Replacement of Triton's JIT: parses or compiles kernels, and launches none.

    Attributes:
      names: Of the different kernels.
      kernels: Those that were called since they were last taken, if they are compiled.
    """

    def __init__(self, is_whole: bool) -> None:
        self.names, self.kernels = list[str](), list[Kernel]()
        self._is_whole, self._compiler = is_whole, import_module("triton.compiler.compiler")
        self._compile, self._seen = self._compiler.compile, dict[str, list[Kernel]]()

    def __call__(self, src: Any, target: Any, options: dict, **more: Any) -> Any:
        digest = f"{src.hash()} {sorted(options.items())}"
        if digest not in self._seen:
            self.names.append(src.name)
            take = self._whole if self._is_whole else self._read
            self._seen[digest] = take(src, target, options, more)
        self.kernels += self._seen[digest]
        return None  # nothing that could be launched

    def _whole(self, src: Any, target: Any, options: dict, more: dict) -> list[Kernel]:
        kernel = self._compile(src, target=target, options=options, **more)
        started = Thunk("kCustomKernel", src.name, 0, kernel.metadata.shared)
        ptx = kernel.asm["ptx"]
        for each in (found := read_ptxas(_assembled(ptx), [started])):
            if each.shared_bytes > MOST_SHARED_BYTES:
                raise ValueError(f"{each.name} exceeds the shared memory of a block")
        return [replace(each, misaligned=misaligned_access(ptx)) for each in found]

    def _read(self, src: Any, target: Any, options: dict, more: dict) -> list[Kernel]:
        backend = self._compiler.make_backend(target)
        parsed = backend.parse_options(dict(options))
        context = self._compiler.ir.context()
        self._compiler.ir.load_dialects(context)
        backend.load_dialects(context)
        found = backend.get_codegen_implementation(parsed), backend.get_module_map()
        src.make_ir(target, parsed, *found, context)
        return []


def _assembled(ptx: str) -> str:
    """Figures that ptxas reports of a kernel.

    Raises:
      ValueError: ptxas cannot compile the kernel.
    """
    ptxas = import_module("triton.backends.nvidia.compiler").get_ptxas(CAPABILITY).path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        command = [ptxas, "-v", f"--gpu-name=sm_{CAPABILITY}a", str(path), "-o", f"{path}.cubin"]
        done = run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"ptxas failed: {done.stderr}")
    return done.stderr


@contextmanager
def absent_cuda(is_whole: bool) -> Iterator[Compiler]:
    """Makes torch report a Hopper GPU on which nothing runs; the ops must be imported within it.

    Args:
      is_whole: Kernels are compiled to machine code, not only parsed.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    import_module("triton").runtime.driver.set_active(Driver())
    launch, compiler = import_module("triton.runtime.jit").JITFunction.run, Compiler(is_whole)
    described = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **how: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **how)

    absent = {
        "is_available": lambda: True,
        "get_device_name": lambda *_: GPU,
        "get_device_capability": lambda *_: divmod(CAPABILITY, 10),
        "get_device_properties": lambda *_: described,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: None,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **absent))
        jit, whole = import_module("triton.runtime.jit"), import_module("triton.compiler")
        stack.enter_context(patch.object(jit.JITFunction, "run", compile_only))
        stack.enter_context(patch.object(whole, "compile", compiler))
        import_module("torch_impl.ops")
        stack.enter_context(AbsentCuda())
        stack.enter_context(torch.inference_mode())
        yield compiler


@dataclass
class _Queue:
    """Replacement of the backend's step queue."""

    machine: Any
    captures = replays = 0


class _Mail:
    """Replacement of the connection to other ranks."""

    def __init__(self, ranks: int) -> None:
        self.count = ranks

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        return [value] * self.count


@contextmanager
def _no_memory() -> Iterator[None]:
    """Makes dummy weights and symmetric buffers of ranks without memory."""
    dummy, formats, symmetric_memory = map(
        import_module,
        (
            "torch_impl.dummy_weights",
            "torch_impl.formats.fp8",
            "kernels.triton_gpu.collectives.symmetric_memory",
        ),
    )

    def parameter(wanted: Parameter, law: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return torch.empty(wanted.shape, dtype=dtype, device=device)

    def words(wanted: Parameter, codes: Any, parts: int, block: int, device: Any) -> torch.Tensor:
        shape = (*wanted.shape[:-1], wanted.shape[-1] // parts)
        return torch.empty(shape, dtype=torch.int32, device=device)

    class SymmetricBuffer(symmetric_memory.SymmetricBuffer):
        def __init__(self, boxes: Any, rank: int, device: Any) -> None:
            self.boxes, self._rank, self._device, self.handle = boxes, rank, device, b" "

        def connect(self, handles: Sequence[bytes]) -> None:
            self.use([0] * len(handles))

    made = patch.object(dummy, "parameter_array", parameter)
    packed = patch.object(formats, "word_array", words)
    with made, packed, patch.object(symmetric_memory, "SymmetricBuffer", SymmetricBuffer):
        yield


class AbsentStart:
    """Startup of a server up to the kernels of its programs, on the first rank.

    Attributes:
      programs: Programs that the startup prepares.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        """Creates the backend; within `absent_cuda`.

        Raises:
          ValueError: An option is invalid; one sentence.
        """
        platform, backend = map(import_module, ("torch_impl.platform", "torch_impl.backend"))
        device = Device("gpu", GPU, FREE_BYTES)
        begun = prepare(parse(list(flags)), replace(platform.PLATFORM, find_device=lambda: device))
        count = begun.memory.blueprint.ranks.count
        if count > 1:
            begun = begun.of_rank(TPGroup(0, count, cast(Any, _Mail(count))))
        queue = patch.object(backend, "_GPUStreamWorker", lambda machine, *_: _Queue(machine))
        with queue, _no_memory():
            made = begun.load(platform.PLATFORM, lambda num_bytes: None)
        self._machine = cast(Any, made)._queue.machine
        self.programs: tuple[Program, ...] = begun.memory.blueprint.capacity.programs

    def step(self, program: Program) -> None:
        """Runs a step of a program, which parses or compiles its kernels."""
        plan = empty_plan(program, self._machine.capacity)
        step = import_module("torch_impl.step").step
        step(self._machine, torch.from_numpy(plan.buffer).to("cuda"), program)
