"""JAX programs compiled for an absent GPU.

The CUDA plugin of JAX compiles for the GPU of a description, without driver or device. The result
cannot run, and nothing is autotuned.
"""

import inspect
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from subprocess import run
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding
from jax.stages import Lowered

from bench.kernels.compiled import (
    Kernel,
    Thunk,
    misaligned_access,
    read_mosaic,
    read_ptxas,
    read_thunks,
)
from jax_impl import ops, platform
from jax_impl.backend import JaxBackend
from jax_impl.mesh import RankMesh
from jax_impl.ops.collectives.all_gather import AXIS
from kernels.rooms import module_in
from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.options.command_line import parse
from shared.process.device import Device
from shared.process.start import prepare
from tests.support.op_case import OpCase, changed
from tests.support.op_records import mapped

SHAPES = Path(__file__).parents[1] / "shapes"
DESCRIPTION = Path(__file__).parents[1] / "targets" / "nvidia_h200.txtpb"
ARCHITECTURE = "sm_90a"
CALLS = ("__gpu$xla.gpu.triton", "mosaic_gpu")
"""Calls of Pallas kernels in the text of a program."""


@dataclass(frozen=True)
class Compiled:
    """Output of XLA for a program.

    Attributes:
      kernels: All of them, XLA's own too, each once.
      thunks: What the host does to run it, in order.
      text: The optimized HLO.
      temp_bytes: What it takes beside its arguments and results.
    """

    kernels: list[Kernel]
    thunks: list[Thunk]
    text: str
    temp_bytes: int


class AbsentGpu:
    """GPU given by its description, or several of one host.

    Attributes:
      name: Name that its driver would report.
      devices: Devices of JAX; they hold no arrays and run nothing.
      free_bytes: Memory that XLA assumes: 80 % of the described memory.
    """

    def __init__(self, description: Path, count: int) -> None:
        target = description.read_text(encoding="utf-8")
        topology = topologies.get_topology_desc(
            "absent", "cuda", target_config=target, topology=f"1x1x{count}"
        )
        self.devices: list[jax.Device] = list(topology.devices)
        self._describe(target)

    def _describe(self, target: str) -> None:
        named = re.search(r'device_description_str: "(.*)"', target)
        assert named is not None, "a description names its GPU"
        self.name = named[1]
        self.free_bytes = _number(target, "device_memory_size") * 4 // 5
        self._cores = _number(target, "core_count")
        self._made: dict[str, Compiled] = {}

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Within it programs are traced with the kernels of this GPU."""
        described = AbstractDevice(self.name, self._cores, "gpu")
        how = {"axis_types": (AxisType.Auto,), "abstract_device": described}
        mesh = AbstractMesh((len(self.devices),), (AXIS,), **how)
        with ops.compiled_for(self.name), jax.sharding.use_abstract_mesh(mesh):
            yield

    def shape_of(self, value: np.ndarray, dtype: np.dtype | str) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of an array in its memory."""
        where = SingleDeviceSharding(self.devices[0])
        return jax.ShapeDtypeStruct(value.shape, dtype, sharding=where)

    def compiled(self, lowered: Lowered) -> Compiled:
        """Compiles a program; one of the same text is compiled once.

        Raises:
          jax.errors.JaxRuntimeError: XLA fails, for example if a kernel requires more shared memory
            than there is.
        """
        text = lowered.as_text()
        if text not in self._made:
            self._made[text] = _compiled(lowered)
        return self._made[text]


def _compiled(lowered: Lowered) -> Compiled:
    with TemporaryDirectory() as folder:
        flags, mosaic = (
            {"xla_dump_to": folder, "xla_dump_hlo_as_text": True},
            Path(folder, "mosaic"),
        )
        mosaic.mkdir()
        # Only ptxas reports registers and spills, so its input is dumped. Mosaic GPU runs ptxas
        # itself and dumps its output.
        with patch.dict(os.environ, {"MOSAIC_GPU_DUMP_TO": str(mosaic)}):
            made = lowered.compile({**flags, "xla_dump_emitter_re": "ptx"})
        # The passes over the thunks make command buffers. A program that they leave as it is has
        # one dump; of two, theirs has the longer name.
        dumps = Path(folder).glob("*thunk_sequence*.txt")
        last = max(dumps, key=lambda path: len(path.name))
        thunks = read_thunks(last.read_text(encoding="utf-8"))
        with ThreadPoolExecutor() as pool:
            reports = list(pool.map(_assembled, sorted(Path(folder).glob("*.ptx"))))
            kernels = [kernel for text in reports for kernel in read_ptxas(text, thunks)]
        kernels += [_of_mosaic(path) for path in sorted(mosaic.glob("*.ptxas"))]
    memory, text = made.memory_analysis(), made.as_text()
    assert memory is not None
    assert text is not None, "XLA reports the text of a compiled program"
    return Compiled(kernels, thunks, text, memory.temp_size_in_bytes)


def _of_mosaic(path: Path) -> Kernel:
    passes, ptx = (path.with_suffix(each) for each in (".mlir-passes.log", ".ptx"))
    text, passes, ptx = (x.read_text(encoding="utf-8") for x in (path, passes, ptx))
    return replace(read_mosaic(text, passes), misaligned=misaligned_access(ptx))


def compiled_case(gpu: AbsentGpu, case: OpCase) -> Compiled | None:
    """Compiles the operation of a case; None where it is no kernel.

    Arrays are made for their shapes alone, and the arguments that are none are the program's own.
    """
    module = module_in("jax_impl.ops", case.op)
    operation, made = getattr(module, case.function), case.make(0)
    placed = [
        mapped(made[name], leaf=partial(_shape, gpu, case.dtype_of(name)), module=module)
        for name in inspect.signature(operation).parameters
        if name in made
    ]
    leaves, tree = jax.tree.flatten(placed)
    shapes = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]

    def call(*arrays: jax.Array) -> Any:
        given = iter(arrays)
        rest = [next(given) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
        return operation(*jax.tree.unflatten(tree, rest))

    with gpu.traced(), case.order():
        bound = ops.KERNELS
        assert bound is not None
        table = case.table_in(bound.tiles)
        tiles = changed(bound.tiles, table, case.tiles) if case.tiles else bound.tiles
        with patch.object(ops, "KERNELS", replace(bound, tiles=tiles)):
            lowered = jax.jit(call).lower(*shapes)
    return gpu.compiled(lowered) if any(call in lowered.as_text() for call in CALLS) else None


def _shape(gpu: AbsentGpu, floats: str, value: Any) -> Any:
    """An array's shape, its floats in a dtype; anything else as it is."""
    if not isinstance(value, np.ndarray):
        return value
    kinds = {"f": floats, "i": value.dtype if value.itemsize == 1 else np.int32}
    return gpu.shape_of(value, kinds.get(value.dtype.kind, value.dtype))


class AbsentStart:
    """A server's start as far as the lowering of its programs, on GPUs that are not here.

    Attributes:
      programs: Those that the start would make ready.
    """

    def __init__(self, gpu: AbsentGpu, flags: Sequence[str]) -> None:
        """Reads the files' headers and makes the backend of shapes alone; nothing is lowered yet.

        Args:
          gpu: One GPU for each rank.
          flags: Flags of the server; `--tp-size` equals the number of GPUs.

        Raises:
          ValueError: An option is invalid; one sentence.
        """
        device = Device("gpu", gpu.name, gpu.free_bytes)
        absent = {"find_device": lambda: device, "take_devices": lambda count: None}
        begun = prepare(parse(list(flags)), replace(platform.PLATFORM, **absent))
        blueprint, files = begun.memory.blueprint, (begun.opened.checkpoint, begun.draft_files)
        self._gpu, self.programs = gpu, blueprint.capacity.programs
        with gpu.traced():
            together = RankMesh.of(gpu.devices[0], blueprint.ranks)
            each = list(zip(together.devices, together.ranks, strict=True))
            read = partial(platform.read_weights, blueprint, *files)
            loaded = [
                jax.eval_shape(partial(read, device, lambda num_bytes: None, rank))
                for device, rank in each
            ]
            images, towers = blueprint.capacity.images, None
            if images is not None:
                of_tower = (begun.opened.checkpoint, images.vision, jnp.dtype(blueprint.dtype))
                tower = partial(platform.load_vision_encoder, *of_tower)
                towers = [
                    jax.eval_shape(partial(tower, device, lambda num_bytes: None))
                    for device, _ in each
                ]
            self._backend = JaxBackend(
                blueprint.config,
                [weights for weights, _ in loaded],
                blueprint.capacity,
                blueprint.drafts,
                [own for _, own in loaded if own is not None] or None,
                dtype=blueprint.dtype,
                device=gpu.devices[0],
                quick_compile=False,
                group=blueprint.ranks,
                tower=towers,
            )

    def traced(self, program: Program) -> Any:
        """A step of a program as a jaxpr, which `lower` takes to StableHLO."""
        with self._gpu.traced():
            return self._backend.traced(program)

    def lowered(self, program: Program) -> Lowered:
        """A step of a program, as StableHLO with its kernels."""
        with self._gpu.traced():
            return self.traced(program).lower(lowering_platforms=("cuda",))

    def workspace(self, program: Program) -> int:
        """Bytes that the memory plan has for a step."""
        return self._backend.workspace(program)


def lowered_step(
    gpu: AbsentGpu, flags: Sequence[str], batch: int, tokens: int, scores: bool
) -> tuple[Lowered, int]:
    """A step of a start, and the bytes that the memory plan has for it.

    Args:
      gpu: One GPU for each rank.
      flags: Of the server.
      batch: Requests at once.
      tokens: Of a prompt; 0: it decodes.
      scores: Whether a prompt's tokens are all scored.
    """
    start = AbsentStart(gpu, flags)
    fitting = (
        program
        for program in start.programs
        if program.work is (StepKind.PREFILL if tokens else StepKind.DECODE)
        if (program.batch, program.tokens, program.has(ProgramFeature.PROMPT_LOGPROBS))
        == (batch, tokens, scores)
        if program.has(ProgramFeature.LOGPROBS) is scores
    )
    # Two sources have programs of one each beside that of both.
    program = max(fitting, key=lambda each: each.shape.nodes)
    return start.lowered(program), start.workspace(program)


def _number(text: str, name: str) -> int:
    found = re.search(rf"\b{name}: (\d+)", text)
    if found is None:
        raise ValueError(f"{DESCRIPTION.name} has no {name}")
    return int(found[1])


def _assembled(source: Path) -> str:
    """Returns the report of ptxas on a file."""
    line = [_ptxas(), "-v", f"-arch={ARCHITECTURE}", source, "-o", source.with_suffix(".cubin")]
    return run(line, capture_output=True, text=True, check=True).stderr


@cache
def _ptxas() -> Path:
    """Returns the ptxas of jax's CUDA plugin or, without that plugin, the first of PATH.

    Raises:
      FileNotFoundError: There is none.
    """
    spec = find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    for path in (path for folder in folders or () for path in Path(folder).glob("*/bin/ptxas")):
        return path
    if found := which("ptxas"):
        return Path(found)
    raise FileNotFoundError("no ptxas was found: install jax[cuda13], or put CUDA's on PATH")
