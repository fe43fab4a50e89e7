"""The torch backend: queues plans, runs them as steps, and brings the results back.

On a CPU a worker thread runs the steps, so `submit` returns at once there too. On a GPU everything
is queued on one stream; a decode program is captured as a CUDA graph on its first use.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from shared.boundary.backend import (
    Limits,
    Program,
    StepFuture,
    StepPlan,
    StepResult,
    Work,
)
from shared.boundary.buffers import empty_plan, plan_layout, read_result, result_layout
from shared.drafts.config import DraftHead
from shared.models.config import ModelConfig
from shared.spec.standalone import SmallModel
from torch_impl import drafters
from torch_impl import weights as weights_module
from torch_impl.device_state import allocate
from torch_impl.drafters import heads
from torch_impl.drafters.dflash import BlockDrafter
from torch_impl.drafters.eagle import EagleDrafter
from torch_impl.drafters.standalone import StandaloneDrafter
from torch_impl.machine import Machine
from torch_impl.model import Model
from torch_impl.ops import attention
from torch_impl.step import step
from torch_impl.weights import BlockWeights, HeadWeights, Weights

Drafter = Literal["none", "NEXTN"] | DraftHead | HeadWeights | BlockWeights | SmallModel | Model


class TorchBackend:
    """A `shared.boundary.backend.Backend` in torch.

    Attributes:
      limits: What exists.
      compiles: Programs that were compiled; plain torch compiles none.
    """

    compiles = 0

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Shaped[np.ndarray, "..."]] | Weights,
        limits: Limits,
        drafter: Drafter,
        *,
        dtype: str,
        device: torch.device | str,
        cuda_graphs: bool,
    ) -> None:
        """Allocates the pools of `limits` on the device.

        Args:
          weights: Loaded already, or arrays under the names of `shared.models.checkpoint`.
          drafter: How drafts are made: not at all, by the checkpoint's MTP layer, or by a head with
            a checkpoint of its own, loaded already or as arrays.
          dtype: Of weights, KV and activations, float32 or bfloat16. Loaded weights have theirs and
            their device already.
          cuda_graphs: Whether decode steps are captured and replayed.

        Raises:
          ValueError: A drafter is asked for that the weights do not hold, graphs where there is no
            GPU, `limits` lists a program that does not exist, or attention on a GPU does not take
            the head size.
        """
        if not isinstance(weights, Weights):
            weights = weights_module.from_arrays(config, weights, dtype, torch.device(device))
        embed = weights.embed
        _check(weights, limits, drafter, cuda_graphs, embed.device)
        model = Model.of(config, weights)
        self.limits = limits
        self._programs = frozenset(limits.programs)
        made = _drafter(model, drafter, dtype)
        kept = made.sizes if made else None
        for sizes in (config, kept.model if kept else config):
            attention.check_head_size(sizes.head_size, embed.device)
        state = allocate(config, limits, kept, embed.dtype, embed.device)
        machine = Machine(model, made, limits, state)
        self._queue = (
            _Stream(machine, embed.device, cuda_graphs)
            if embed.device.type == "cuda"
            else _Worker(machine)
        )

    @property
    def captures(self) -> int:
        """CUDA graphs that were captured."""
        return self._queue.captures

    @property
    def replays(self) -> int:
        """Steps that ran as a CUDA graph."""
        return self._queue.replays

    def submit(self, plan: StepPlan) -> StepFuture:
        """Queues one step and returns at once.

        Raises:
          ValueError: The plan asks for a program that `limits` does not list.
        """
        if plan.program not in self._programs:
            raise ValueError(f"there is no program {plan.program}")
        return self._queue.submit(plan)

    def close(self) -> None:
        """Waits for the steps in flight."""
        self._queue.close()


def _check(
    weights: Weights, limits: Limits, drafter: Drafter, cuda_graphs: bool, device: torch.device
) -> None:
    if isinstance(drafter, str) and drafter not in ("none", "NEXTN"):
        raise ValueError(f"the drafter must be none, NEXTN or a draft head, got {drafter}")
    if drafter == "NEXTN" and weights.mtp is None:
        raise ValueError("the drafter NEXTN needs a checkpoint with mtp.* tensors")
    if cuda_graphs and device.type != "cuda":
        raise ValueError(f"CUDA graphs need a GPU, the weights are on {device}")
    for program in limits.programs:
        if program.mask:
            raise ValueError(f"grammar masks are not supported, asked for by {program}")
        drafts = program.work in (Work.DECODE, Work.DRAFT) and not program.host_draft
        if drafts and drafter == "none" and not program.shape.is_plain:
            raise ValueError(f"a drafter is needed by {program}")
        if drafts and isinstance(drafter, DraftHead | BlockWeights) and drafter.config.block:
            drafter.config.block.check_shape(program.shape.nodes, program.shape.width)


def _drafter(model: Model, drafter: Drafter, dtype: str) -> drafters.Drafter | None:
    if drafter == "none":
        return None
    if drafter == "NEXTN":
        return EagleDrafter(heads.mtp(model))
    device = model.weights.embed.device
    if isinstance(drafter, SmallModel):
        small = weights_module.from_arrays(drafter.config, drafter.weights, dtype, device)
        drafter = Model.of(drafter.config, small)
    if isinstance(drafter, Model):
        return StandaloneDrafter(drafter, model.config.vocab)
    if isinstance(drafter, DraftHead):
        drafter = weights_module.head_from_arrays(drafter, dtype, device)
    if isinstance(drafter, BlockWeights):
        return BlockDrafter.of(model, drafter)
    return EagleDrafter(heads.HEADS[drafter.config.kind](model, drafter))


class _Worker:
    """Runs steps on a CPU, one after the other, on a thread of its own."""

    captures = replays = 0

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        return self._thread.submit(self._run, plan)

    def close(self) -> None:
        self._thread.shutdown()

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        words = step(self._machine, torch.from_numpy(plan.buffer), plan.program)
        seconds = time.perf_counter() - began
        return read_result(plan.program, self._machine.limits, words.numpy(), seconds)


@dataclass
class _Launched:
    """A step that was queued on the GPU; `words` is pinned and belongs to a ring."""

    program: Program
    limits: Limits
    words: Int[Tensor, " words"]
    began: torch.cuda.Event
    ended: torch.cuda.Event
    copied: torch.cuda.Event
    _result: StepResult | None = None

    def done(self) -> bool:
        return self._result is not None or self.copied.query()

    def result(self) -> StepResult:
        if self._result is None:
            self.copied.synchronize()
            seconds = self.began.elapsed_time(self.ended) / 1000
            words = self.words.numpy().copy()
            self._result = read_result(self.program, self.limits, words, seconds)
        return self._result


@dataclass(frozen=True)
class _Graph:
    """A captured program: where it reads its plan and leaves its result."""

    graph: torch.cuda.CUDAGraph
    plan: Int[Tensor, " words"]
    result: Int[Tensor, " out"]


class _Stream:
    """Runs steps on a GPU, in the order of one stream.

    Plans and results go through rings of pinned memory. A ring of plans has two more entries than
    steps may be in flight, a ring of results one more; an entry that is still read is waited for.
    """

    def __init__(self, machine: Machine, device: torch.device, cuda_graphs: bool) -> None:
        self.captures = self.replays = 0
        self._machine, self._cuda_graphs = machine, cuda_graphs
        limits = machine.limits
        self._compute, self._copy = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._compute.wait_stream(torch.cuda.current_stream(device))
        most_plan = max(plan_layout(p, limits).size for p in limits.programs)
        most_result = max(result_layout(p, limits).size for p in limits.programs)
        self._plans = [_pinned(most_plan) for _ in range(limits.overlap + 2)]
        self._results = [_pinned(most_result) for _ in range(limits.overlap + 2)]
        self._on_device = [
            torch.zeros(most_result, dtype=torch.int32, device=device) for _ in self._results
        ]
        self._flights: list[_Launched | None] = [None] * len(self._plans)
        self._graphs: dict[Program, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if cuda_graphs else None
        self._count, self._device = 0, device

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> _Launched:
        place = self._count % len(self._plans)
        self._count += 1
        earlier = self._flights[place]
        if earlier is not None:
            earlier.result()  # frees its entries of the rings
        staged = self._plans[place][: len(plan.buffer)]
        staged.copy_(torch.from_numpy(plan.buffer))
        graph = self._graph_of(plan.program)
        flight = self._launch(plan.program, graph, staged, place)
        self._flights[place] = flight
        return flight

    def close(self) -> None:
        self._compute.synchronize()
        self._copy.synchronize()

    def _launch(
        self, program: Program, graph: _Graph | None, staged: Int[Tensor, " words"], place: int
    ) -> _Launched:
        events = [torch.cuda.Event(enable_timing=i < 2) for i in range(3)]
        began, ended, copied = events
        size = result_layout(program, self._machine.limits).size
        held, words = self._on_device[place][:size], self._results[place][:size]
        with torch.cuda.stream(self._compute):
            began.record()
            held.copy_(self._run(program, graph, staged))
            ended.record()
        with torch.cuda.stream(self._copy):
            self._copy.wait_event(ended)
            words.copy_(held, non_blocking=True)
            copied.record()
        return _Launched(program, self._machine.limits, words, began, ended, copied)

    def _run(
        self, program: Program, graph: _Graph | None, staged: Int[Tensor, " words"]
    ) -> Int[Tensor, " out"]:
        if graph is None:
            on_device = staged.to(self._device, non_blocking=True)
            return step(self._machine, on_device, program)
        graph.plan.copy_(staged, non_blocking=True)
        graph.graph.replay()
        self.replays += 1
        return graph.result

    def _graph_of(self, program: Program) -> _Graph | None:
        """The program's graph, captured on first use; prompts run without one."""
        if not self._cuda_graphs or program.work is not Work.DECODE:
            return None
        if program not in self._graphs:
            self._graphs[program] = self._capture(program)
            self.captures += 1
        return self._graphs[program]

    def _capture(self, program: Program) -> _Graph:
        """Captures a step over a plan of padding, whose runs touch the sinks only."""
        padding = empty_plan(program, self._machine.limits, None).buffer
        with torch.cuda.stream(self._compute):
            plan = torch.from_numpy(padding).to(self._device)
            step(self._machine, plan, program)  # libraries set themselves up outside the capture
        self._compute.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Another thread of the process (a JAX backend, say) may allocate meanwhile.
        how = {"pool": self._pool, "stream": self._compute, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graph, **how):
            result = step(self._machine, plan, program)
        return _Graph(graph, plan, result)


def _pinned(size: int) -> Int[Tensor, " words"]:
    return torch.zeros(size, dtype=torch.int32, pin_memory=True)
