"""Torch backend: queues plans, runs them as steps, and returns the results.

On a CPU a worker thread runs the steps, so `submit` returns at once there too. On a GPU everything
is queued on one stream; programs are captured as CUDA graphs before they are used.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from shared.boundary.backend import BackendLimits, BackendSpec, StepFuture, StepPlan, StepResult
from shared.boundary.buffers import plan_layout, read_result, result_layout
from shared.boundary.checks import check_capacity, check_plan, to_prepare
from shared.boundary.kernel_coverage import fallback_ops
from shared.boundary.kv_transfer import copy_words
from shared.boundary.program import CAPTURED, LaunchMode, Program, StepKind
from shared.boundary.tp_group import SINGLE_RANK, TPGroup
from shared.drafts.config import DraftHead
from shared.drafts.drafter_spec import DrafterSpec
from shared.models.config import ModelConfig
from shared.models.tp_sharding import shard_config
from torch_impl import drafters
from torch_impl import weights as weights_module
from torch_impl.cuda_graphs import CapturedGraph, CapturedGraphs
from torch_impl.device_state import DeviceState, allocate
from torch_impl.drafters import heads
from torch_impl.drafters.assistant import AssistantDrafter
from torch_impl.drafters.dflash import BlockDrafter
from torch_impl.drafters.eagle import EagleDrafter
from torch_impl.drafters.standalone import StandaloneDrafter
from torch_impl.kernel_limits import KERNEL_LIMITS
from torch_impl.model import Model
from torch_impl.model_weights import (
    AssistantWeights,
    BlockWeights,
    HeadWeights,
    VisionEncoderWeights,
    Weights,
)
from torch_impl.ops import kernels_on
from torch_impl.step import step
from torch_impl.step_context import StepContext
from torch_impl.symmetric_memory import AllGather, connect
from torch_impl.workspace import workspace

Arrays = Mapping[str, Shaped[np.ndarray, "..."]]
DraftWeights = Weights | HeadWeights | BlockWeights | AssistantWeights


class TorchBackend:
    """A `shared.boundary.backend.Backend` in torch.

    Attributes:
      capacity: Programs, and numbers of slots, pages and snapshots.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Arrays | Weights,
        capacity: BackendLimits,
        drafts: DrafterSpec,
        draft_weights: Arrays | DraftWeights | None,
        *,
        dtype: str,
        device: torch.device | str,
        captured: Collection[StepKind] = (),
        group: TPGroup = SINGLE_RANK,
        tower: VisionEncoderWeights | None = None,
    ) -> None:
        """Allocates a rank's shard of the pools of `capacity` on the device.

        Args:
          config: Config of the target model.
          weights: Loaded weights of this rank, or whole arrays by the names of
            `shared.models.parameters`.
          capacity: Programs, and numbers of slots, pages and snapshots.
          drafts: Drafter configuration.
          draft_weights: Weights of a draft head or draft model, loaded or as arrays; None for other
            drafters.
          dtype: Dtype of weights, activations and KV, float32 or bfloat16. Loaded weights keep
            their own.
          device: Device of this rank. Loaded weights keep their own.
          captured: Step kinds that run as CUDA graphs.
          group: TP group of this rank. All ranks receive the same plans in the same order and
            return the same results.
          tower: Loaded vision encoder; None for a text-only model. Replicated on all ranks.

        Raises:
          ValueError: The model cannot be sharded evenly, or CUDA graphs are requested without a
            GPU. See also `shared.boundary.checks.check_capacity` and
            `shared.boundary.kernel_coverage`.
        """
        if not isinstance(weights, Weights):
            where = torch.device(device)
            given, token_map = dict(weights), drafts.token_map
            weights = weights_module.from_arrays(config, given, dtype, where, group, token_map)
        device = weights.embed.device
        check_capacity(capacity, drafts, weights.mtp is not None, tower is not None)
        if captured and device.type != "cuda":
            raise ValueError(
                f"CUDA graphs require a GPU, but the weights are on {device}; "
                "use --disable-cuda-graph"
            )
        if isinstance(draft_weights, Mapping):
            draft_weights = _placed(drafts, draft_weights, dtype, device, group)
        config, drafts = shard_config(config, group.count), drafts.local(group.count)
        kept = drafts.sizes
        self.capacity = capacity
        self._blueprint = BackendSpec(
            config=config,
            drafts=drafts,
            capacity=capacity,
            dtype=dtype,
            on_gpu=device.type == "cuda",
        )
        if kernels_on(device) is not None:
            fallback_ops(self._blueprint, KERNEL_LIMITS)
        self._ready: set[Program] = set()
        torch.cuda.empty_cache()  # temporary memory of loading
        group = connect(group, kernels_on(device), device)
        kind = weights.embed.dtype
        self._state = allocate(config, capacity, kept, kind, device, group.count)
        model = Model.of(config, weights, group, self._state.adapters)
        drafter = _drafter(model, drafts, draft_weights)
        context = StepContext(model, drafter, tower, capacity, self._state)
        self._queue = (
            _GPUStreamWorker(context, device, captured, self.workspace)
            if device.type == "cuda"
            else _Worker(context)
        )

    @property
    def state(self) -> DeviceState:
        """Returns the device state after the completed steps; for tests."""
        return self._state

    @property
    def captures(self) -> int:
        """Returns the number of captured CUDA graphs."""
        return self._queue.captures

    @property
    def replays(self) -> int:
        """Returns the number of steps that ran as a CUDA graph."""
        return self._queue.replays

    def workspace(self, program: Program) -> int:
        """Returns the workspace of a step of the program: bytes beyond weights and pools."""
        return workspace(program, self._blueprint)

    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        """Captures programs on a GPU and runs the others once; does nothing on a CPU.

        Raises:
          ValueError: `capacity` does not list a program.
        """
        # All graphs share a pool; the largest is captured first, so that the others fit.
        wanted = sorted(
            to_prepare(programs, self.capacity, self._ready), key=self.workspace, reverse=True
        )
        self._queue.prepare(wanted, progress)
        self._ready.update(wanted)

    def launch(self, program: Program) -> LaunchMode:
        """Returns how a step of the program is launched."""
        return self._queue.launch(program)

    def submit(self, plan: StepPlan) -> StepFuture:
        """Queues one step and returns at once.

        Raises:
          ValueError: See `shared.boundary.checks.check_plan`.
        """
        check_plan(plan, self._ready)
        return self._queue.submit(plan)

    def close(self) -> None:
        """Waits for the steps in flight."""
        self._queue.close()


def _placed(
    drafts: DrafterSpec, arrays: Arrays, dtype: str, device: torch.device, group: TPGroup
) -> DraftWeights | None:
    if drafts.head is not None:
        head = DraftHead(drafts.head, arrays)
        return weights_module.head_from_arrays(head, dtype, device, group)
    if drafts.model is not None:
        return weights_module.from_arrays(drafts.model, dict(arrays), dtype, device, group)
    return None


def _drafter(
    model: Model, drafts: DrafterSpec, weights: DraftWeights | None
) -> drafters.Drafter | None:
    """Builds the drafter from its weights and the target, or returns None without one."""
    if drafts.with_mtp:
        return EagleDrafter(heads.mtp(model))
    if drafts.model is not None:
        assert isinstance(weights, Weights)
        small = Model.of(drafts.model, weights, model.group)
        return StandaloneDrafter(small)
    if drafts.head is None:
        return None
    if drafts.block is not None:
        assert isinstance(weights, BlockWeights)
        return BlockDrafter.of(model, weights)
    if isinstance(weights, AssistantWeights):
        return AssistantDrafter.of(model, weights)
    assert isinstance(weights, HeadWeights)
    return EagleDrafter(heads.HEADS[drafts.kind](model, weights))


class _Worker:
    """Runs steps on a CPU sequentially in a worker thread."""

    captures = replays = 0

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="steps")

    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        """Does nothing: reference operations need no compilation and no capture."""
        for program in programs:
            progress(program)

    def launch(self, program: Program) -> LaunchMode:
        return LaunchMode.EAGER

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        return self._thread.submit(self._run, plan)

    def close(self) -> None:
        self._thread.shutdown()

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        words = step(self._context, torch.from_numpy(plan.buffer), plan.program)
        seconds = time.perf_counter() - began
        return read_result(plan.program, self._context.capacity, words.numpy(), seconds)


@dataclass
class _SubmittedStep:
    """Step queued on the GPU; `words` and `error` are pinned buffers of rings.

    An export has pinned memory of its own, because its words are read after later steps.
    """

    program: Program
    capacity: BackendLimits
    words: Int[Tensor, " words"]
    began: torch.cuda.Event
    ended: torch.cuda.Event
    copied: torch.cuda.Event
    exchange: AllGather | None
    error: Int[Tensor, " 1"]
    _result: StepResult | None = None

    def result(self) -> StepResult:
        if self._result is None:
            self.copied.synchronize()
            if self.exchange is not None:
                self.exchange.check(int(self.error))
            seconds = self.began.elapsed_time(self.ended) / 1000
            words = self.words.numpy()
            if self.program.work is not StepKind.EXPORT_KV:
                words = words.copy()
            self._result = read_result(self.program, self.capacity, words, seconds)
        return self._result


class _GPUStreamWorker:
    """Runs steps on a GPU, in the order of one CUDA stream.

    Plans and results use rings of pinned memory. A ring has one entry more than the maximum number
    of steps in flight, including the planned step. An entry in use is waited for.
    """

    def __init__(
        self,
        context: StepContext,
        device: torch.device,
        captured: Collection[StepKind],
        workspace: Callable[[Program], int],
    ) -> None:
        self.replays, self._context = 0, context
        capacity = context.capacity
        self._compute, self._copy = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._compute.wait_stream(torch.cuda.current_stream(device))
        max_plan = max(plan_layout(p, capacity).size for p in capacity.programs)
        max_result = max(result_layout(p, capacity).size for p in capacity.programs)
        self._plans = [_pinned(max_plan) for _ in range(capacity.overlap + 2)]
        others = (p for p in capacity.programs if p.work is not StepKind.EXPORT_KV)
        max_copied = max(result_layout(p, capacity).size for p in others)
        self._results = [_pinned(max_copied) for _ in range(capacity.overlap + 2)]
        self._on_device = [
            torch.zeros(max_result, dtype=torch.int32, device=device) for _ in self._results
        ]
        self._exchange: AllGather | None = context.model.group.on_device
        self._errors = [_pinned(1) for _ in self._results]
        self._flights: list[_SubmittedStep | None] = [None] * len(self._plans)
        self._graphs = CapturedGraphs(context, device, self._compute, captured, workspace)
        self._count, self._device = 0, device

    @property
    def captures(self) -> int:
        return len(self._graphs.captured)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> _SubmittedStep:
        place = self._count % len(self._plans)
        self._count += 1
        earlier = self._flights[place]
        if earlier is not None:
            earlier.result()  # frees its entries of the rings
        staged = self._plans[place][: len(plan.buffer)]
        # Torch would wake a thread for every core, which takes longer than a copy of megabytes.
        copy_words(staged.numpy(), plan.buffer)
        flight = self._launch(plan.program, self._graphs.captured.get(plan.program), staged, place)
        self._flights[place] = flight
        return flight

    def launch(self, program: Program) -> LaunchMode:
        if program in self._graphs.captured:
            return LaunchMode.CUDA_GRAPH
        return LaunchMode.DISABLED if program.work in CAPTURED else LaunchMode.EAGER

    def close(self) -> None:
        self._compute.synchronize()
        self._copy.synchronize()
        if self._exchange is not None:
            self._exchange.close()

    def _launch(
        self,
        program: Program,
        graph: CapturedGraph | None,
        staged: Int[Tensor, " words"],
        place: int,
    ) -> _SubmittedStep:
        events = [torch.cuda.Event(enable_timing=i < 2) for i in range(3)]
        began, ended, copied = events
        size = result_layout(program, self._context.capacity).size
        held, words = self._on_device[place][:size], self._results[place][:size]
        if program.work is StepKind.EXPORT_KV:  # torch keeps freed pinned memory for later ones
            words = torch.empty(size, dtype=torch.int32, pin_memory=True)
        with torch.cuda.stream(self._compute):
            began.record()
            held.copy_(self._run(program, graph, staged))
            ended.record()
        with torch.cuda.stream(self._copy):
            self._copy.wait_event(ended)
            words.copy_(held, non_blocking=True)
            if self._exchange is not None:
                self._errors[place].copy_(self._exchange.error, non_blocking=True)
            copied.record()
        return _SubmittedStep(
            program=program,
            capacity=self._context.capacity,
            words=words,
            began=began,
            ended=ended,
            copied=copied,
            exchange=self._exchange,
            error=self._errors[place],
        )

    def _run(
        self, program: Program, graph: CapturedGraph | None, staged: Int[Tensor, " words"]
    ) -> Int[Tensor, " out"]:
        if graph is None:
            on_device = staged.to(self._device, non_blocking=True)
            return step(self._context, on_device, program)
        graph.plan.copy_(staged, non_blocking=True)
        graph.graph.replay()
        self.replays += 1
        return graph.result

    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        self._graphs.prepare(programs, progress)


def _pinned(size: int) -> Int[Tensor, " words"]:
    return torch.zeros(size, dtype=torch.int32, pin_memory=True)
