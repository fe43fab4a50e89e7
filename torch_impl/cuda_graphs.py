"""CUDA graph capture of steps, and the warm-up of all programs on a GPU."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from shared.boundary.buffers import empty_plan
from shared.boundary.program import Program, StepKind
from torch_impl.step import step
from torch_impl.step_context import StepContext
from torch_impl.triton_precompile import compile_kernels


@dataclass(frozen=True)
class CapturedGraph:
    """Captured program with its static input, the plan, and its static output."""

    graph: torch.cuda.CUDAGraph
    plan: Int[Tensor, " words"]
    result: Int[Tensor, " out"]


class CapturedGraphs:
    """Captured programs of a step context.

    All graphs share one memory pool, because only one runs at a time.

    Attributes:
      captured: Graph of each captured program.
    """

    def __init__(
        self,
        context: StepContext,
        device: torch.device,
        stream: torch.cuda.Stream,
        works: Collection[StepKind],
        workspace: Callable[[Program], int],
    ) -> None:
        """Initialises without capturing.

        Args:
          context: Context of all steps.
          device: GPU of the steps.
          stream: Stream of all steps.
          works: Step kinds to capture.
          workspace: Returns the workspace of a program's step in bytes.
        """
        self.captured: dict[Program, CapturedGraph] = {}
        self._context, self._device, self._stream = context, device, stream
        self._works, self._workspace = works, workspace
        self._pool = torch.cuda.graph_pool_handle() if works else None

    @torch.inference_mode()
    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        """Compiles the kernels of all programs in parallel, runs each once, and then captures.

        The runs have padded plans, which touch reserved rows and pages only. A first run
        initialises libraries before capture and serving. Its memory is freed before the graphs
        allocate theirs.
        """
        captured = [program for program in programs if program.work in self._works]
        others = [program for program in programs if program.work not in self._works]
        with torch.cuda.stream(self._stream):
            self._reserve(programs)
            self._run(programs, progress)
            torch.cuda.empty_cache()
            for program in captured:
                self.captured[program] = self._capture(program, captured)
            self._reserve(others)

    def _run(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        """Compiles the kernels of all programs, then runs each program once."""

        def steps() -> None:
            for program in programs:
                progress(program)
                step(self._context, self._padding(program), program)

        group = self._context.model.group
        compile_kernels(steps, group.count)
        exchange = group.on_device
        for program in programs:
            if exchange is not None:
                exchange.meet()  # compilation may exceed the timeout of waits on the GPU
            step(self._context, self._padding(program), program)
            self._stream.synchronize()

    def _reserve(self, programs: Sequence[Program]) -> None:
        """Lets torch's allocator cache one segment of the largest workspace of the programs.

        The allocator splits cached segments. With one segment per array, larger arrays of another
        program would fit in none of them.
        """
        most = max(map(self._workspace, programs), default=0)
        torch.empty(most, dtype=torch.uint8, device=self._device)

    def _padding(self, program: Program) -> Int[Tensor, " words"]:
        plan = empty_plan(program, self._context.capacity)
        return torch.from_numpy(plan.buffer).to(self._device)

    def _capture(self, program: Program, captured: Sequence[Program]) -> CapturedGraph:
        """Captures a program; the first capture reserves the memory pool of all."""
        plan, graph = self._padding(program), torch.cuda.CUDAGraph()
        # Another thread of the process, for example of a JAX backend, may allocate meanwhile.
        options = {
            "pool": self._pool,
            "stream": self._stream,
            "capture_error_mode": "thread_local",
        }
        with torch.cuda.graph(graph, **options):
            if not self.captured:
                self._reserve(captured)
            result = step(self._context, plan, program)
        return CapturedGraph(graph, plan, result)
