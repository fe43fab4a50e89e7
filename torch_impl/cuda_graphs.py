"""Steps that are captured as CUDA graphs, and how all programs are made ready on a GPU."""

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
    """A captured program: where it reads its plan and leaves its result."""

    graph: torch.cuda.CUDAGraph
    plan: Int[Tensor, " words"]
    result: Int[Tensor, " out"]


class CapturedGraphs:
    """The captured programs of a context.

    What a graph works on is of the pool of all graphs, of which one runs at a time.

    Attributes:
      captured: By program.
    """

    def __init__(
        self,
        context: StepContext,
        device: torch.device,
        stream: torch.cuda.Stream,
        works: Collection[StepKind],
        workspace: Callable[[Program], int],
    ) -> None:
        """Captures nothing yet.

        Args:
          stream: Of all steps.
          works: Whose programs are captured.
          workspace: Bytes that a step of a program works on.
        """
        self.captured: dict[Program, CapturedGraph] = {}
        self._context, self._device, self._stream = context, device, stream
        self._works, self._workspace = works, workspace
        self._pool = torch.cuda.graph_pool_handle() if works else None

    @torch.inference_mode()
    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        """Compiles the kernels of all programs side by side, runs each, and then captures them.

        They run over plans of padding, which touch the sinks only. A first run sets up libraries,
        outside of the capture and of serving. What first runs took is given back before a graph
        takes as much.
        """
        captured = [program for program in programs if program.work in self._works]
        others = [program for program in programs if program.work not in self._works]
        with torch.cuda.stream(self._stream):
            self._take(programs)
            self._run(programs, progress)
            torch.cuda.empty_cache()
            for program in captured:
                self.captured[program] = self._capture(program, captured)
            self._take(others)

    def _run(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        """Compiles the kernels of all programs, and then runs each."""

        def steps() -> None:
            for program in programs:
                progress(program)
                step(self._context, self._padding(program), program)

        group = self._context.model.group
        compile_kernels(steps, group.count)
        exchange = group.on_device
        for program in programs:
            if exchange is not None:
                exchange.meet()  # on the GPU ranks wait less long than one may compile
            step(self._context, self._padding(program), program)
            self._stream.synchronize()

    def _take(self, programs: Sequence[Program]) -> None:
        """Has torch take what any of the programs works on, in one piece, and keep it.

        It cuts what is asked for from what it has. Had it taken a piece for each array, the larger
        arrays of another program would fit in none of them.
        """
        most = max(map(self._workspace, programs), default=0)
        torch.empty(most, dtype=torch.uint8, device=self._device)

    def _padding(self, program: Program) -> Int[Tensor, " words"]:
        plan = empty_plan(program, self._context.capacity)
        return torch.from_numpy(plan.buffer).to(self._device)

    def _capture(self, program: Program, captured: Sequence[Program]) -> CapturedGraph:
        """Captures one of some programs; the first takes the pool of all."""
        plan, graph = self._padding(program), torch.cuda.CUDAGraph()
        # Another thread of the process (a JAX backend, say) may allocate meanwhile.
        options = {
            "pool": self._pool,
            "stream": self._stream,
            "capture_error_mode": "thread_local",
        }
        with torch.cuda.graph(graph, **options):
            if not self.captured:
                self._take(captured)
            result = step(self._context, plan, program)
        return CapturedGraph(graph, plan, result)
