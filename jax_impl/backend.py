"""JAX backend: one jitted step per program over one donated state."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jax.stages import Compiled, Lowered, Traced
from jaxtyping import Int, Shaped

from jax_impl import device_state, drafters, ops, weights
from jax_impl.adapters import Adapters
from jax_impl.compilation_cache import CompilationCache
from jax_impl.device_state import DeviceState
from jax_impl.drafters import heads
from jax_impl.drafters.assistant import AssistantDrafter
from jax_impl.drafters.dflash import BlockDrafter
from jax_impl.drafters.eagle import EagleDrafter
from jax_impl.drafters.standalone import StandaloneDrafter
from jax_impl.kernel_limits import KERNEL_LIMITS
from jax_impl.mesh import Leaf, RankMesh, leaves_of
from jax_impl.model import Model
from jax_impl.model_weights import AssistantWeights, BlockWeights
from jax_impl.pinned_results import has_pinned_memory, is_pinned, pinned, read_pinned
from jax_impl.step import step
from jax_impl.step_context import StepContext
from jax_impl.symmetric_memory import AllGather, connect
from jax_impl.weights import Loaded
from jax_impl.workspace import workspace
from kernels.peer_buffers import BLOCK_BYTES, MAX_POLLS, BufferLayout
from shared.boundary.backend import BackendLimits, BackendSpec, StepPlan, StepResult
from shared.boundary.buffers import empty_plan, plan_layout, read_result
from shared.boundary.checks import check_capacity, check_plan, to_prepare
from shared.boundary.kernel_coverage import fallback_ops
from shared.boundary.program import LaunchMode, Program, StepKind
from shared.boundary.shm_allgather import AllGatherTimeout
from shared.boundary.tp_group import SINGLE_RANK, TPGroup
from shared.drafts.config import DraftHead
from shared.drafts.drafter_spec import DrafterSpec
from shared.models.config import ModelConfig
from shared.models.tp_sharding import shard_config

Arrays = Mapping[str, Shaped[np.ndarray, "..."]]
Shape = jax.Array | jax.ShapeDtypeStruct | np.ndarray
StepInputs = tuple[list[Leaf], AllGather | None]
Words = Int[jax.Array, " words"]
CompiledStep = Callable[..., tuple[DeviceState, jax.Array]]

MOST_COMPILERS = 8
"""Maximum number of programs compiled in parallel; each takes up to a gigabyte meanwhile."""


class JaxBackend:
    """A `shared.boundary.backend.Backend` on one JAX device.

    Attributes:
      capacity: Programs, and numbers of slots, pages and snapshots.
      compiles: Number of programs compiled so far; only `prepare` compiles.
    """

    def __init__(
        self,
        config: ModelConfig,
        arrays: Arrays | Loaded | Sequence[Loaded],
        capacity: BackendLimits,
        drafts: DrafterSpec,
        draft_arrays: Arrays | Loaded | Sequence[Loaded] | None,
        *,
        dtype: str,
        device: jax.Device | str,
        quick_compile: bool,
        kept_in: Path | None = None,
        group: TPGroup = SINGLE_RANK,
        tower: Loaded | Sequence[Loaded] | None = None,
    ) -> None:
        """Allocates the pools of `capacity`; compiles nothing yet.

        If the weights are shapes only, the pools are shapes too, and the device may be absent. Such
        a backend lowers programs and runs none.

        Args:
          config: Config of the target model.
          arrays: Loaded weights or their shapes, with TP one per rank; or whole arrays by the names
            of `shared.models.parameters`.
          capacity: Programs, and numbers of slots, pages and snapshots.
          drafts: Drafter configuration.
          draft_arrays: Weights of a draft head or draft model, loaded or as arrays; None for other
            drafters.
          dtype: Dtype of weights, activations and KV, float32 or bfloat16. Loaded weights keep
            their own.
          device: A device, or the name of a platform for its first device.
          quick_compile: On a CPU, compile in a third of the time to code of a quarter of the speed,
            for runs of few steps. It has no effect on a GPU.
          kept_in: Folder of the compilation cache; None disables it.
          group: TP group: consecutive devices of this process from `device` on, one per rank, which
            run every step together.
          tower: Loaded vision encoder; None for a text-only model. Replicated on all ranks.

        Raises:
          ValueError: There are fewer devices than ranks, or the model cannot be sharded evenly. See
            also `shared.boundary.checks.check_capacity` and `shared.boundary.kernel_coverage`.
        """
        where = jax.devices(device)[0] if isinstance(device, str) else device
        kind = jnp.dtype(dtype)
        self._together = RankMesh.of(where, group)
        read = partial(weights.from_arrays, config=config, dtype=kind, token_map=drafts.token_map)
        models = _of_ranks(arrays, read, self._together)
        own = _of_ranks(draft_arrays, partial(_placed, drafts=drafts, dtype=kind), self._together)
        towers, model = _of_ranks(tower, read, self._together), models[0]
        assert model is not None  # there are arrays
        check_capacity(capacity, drafts, model.has_mtp, tower is not None)
        config, drafts = shard_config(config, group.count), drafts.local(group.count)
        in_stacks = weights.are_read_in_stacks(model, where)
        self.capacity, self.compiles = capacity, 0
        on_gpu = where.platform == "gpu"
        self._blueprint = BackendSpec(
            config=config, drafts=drafts, capacity=capacity, dtype=dtype, on_gpu=on_gpu
        )
        kernels = ops.kernels_on(where)
        if kernels is not None:
            fallback_ops(self._blueprint, KERNEL_LIMITS)
        self._has_pinned = group.is_single and has_pinned_memory(where)
        self._group, self._bind = group, _binding(config, drafts, in_stacks)
        devices = self._together.devices
        self._tree = jax.tree.structure((model, own[0], towers[0]))
        loaded = zip(devices, models, own, towers, strict=True)
        each = [leaves_of(on, x) for on, *x in loaded]
        allocate = partial(device_state.allocate, config, capacity, drafts.sizes, kind)
        is_here = all(isinstance(leaf, jax.Array | list) for leaf in each[0])
        if is_here:
            states = [allocate(device, group.count) for device in devices]
        else:
            states = [jax.eval_shape(partial(allocate, device, group.count)) for device in devices]
            each, states = jax.tree.map(partial(_shape_on, where), (each, states))
        self._leaves, self._state = self._together.joined(each), self._together.joined(states)
        self._exchange = self._meet = None
        if kernels is not None and not group.is_single:
            boxes, join = BufferLayout(group.count, BLOCK_BYTES), self._together.joined
            memory = kernels.symmetric_memory.SymmetricBuffer(boxes, devices) if is_here else None
            self._meet = partial(connect, kernels, devices, join, memory, boxes)
            self._exchange = self._meet(MAX_POLLS)
        self._options = _step_options(where, quick_compile)
        self._programs: dict[Program, CompiledStep] = {}
        self._kept = None if kept_in is None else self._keeping(kept_in)
        self._clock = _CompletionTimer()
        self._last: JaxFuture | None = None

    @property
    def state(self) -> DeviceState:
        """Returns the device state after the last queued step; for tests."""
        return self._state

    def workspace(self, program: Program) -> int:
        """Returns the workspace of a step of the program: bytes beyond weights and pools."""
        return workspace(program, self._blueprint)

    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        """Loads programs from the compilation cache and compiles the others.

        Raises:
          ValueError: `capacity` does not list a program.
        """
        wanted = list(to_prepare(programs, self.capacity, self._programs))
        kept = self._kept
        workers = min(os.cpu_count() or 1, MOST_COMPILERS)
        with ThreadPoolExecutor(workers) as pool, ThreadPoolExecutor(1) as tracer:
            ready = kept.find_all(wanted, pool) if kept else {}

            def compiling(program: Program) -> Future[Compiled]:
                return pool.submit(self._compiled, program, self.traced(program).lower())

            # One thread traces a program while XLA compiles those before it.
            making = {p: tracer.submit(compiling, p) for p in wanted if p not in ready}
            try:
                for program in wanted:
                    progress(program)
                    made = making.get(program)
                    self._programs[program] = made.result().result() if made else ready[program]
            finally:
                tracer.shutdown(wait=False, cancel_futures=True)
        if self._meet is not None:
            self._load(wanted, self._meet(0))
        if kept:
            kept.drop_old()

    def traced(self, program: Program) -> Traced:
        """Traces a program of `capacity`, to be lowered for any platform."""
        step = jax.jit(
            partial(self._step, program), donate_argnums=1, compiler_options=self._options
        )
        words = np.zeros(plan_layout(program, self.capacity).size, np.int32)
        of_words = jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=self._together.all)
        return step.trace((self._leaves, self._exchange), self._state, of_words)

    def launch(self, program: Program) -> LaunchMode:
        """Returns how a step of the program is launched."""
        return LaunchMode.COMPILED

    def submit(self, plan: StepPlan) -> "JaxFuture":
        """Queues one step and returns at once.

        Raises:
          ValueError: See `shared.boundary.checks.check_plan`.
        """
        check_plan(plan, self._programs)
        # The one upload of a step goes with the call, and below is its one download; a guard that
        # forbids transfers finds no other.
        with jax.transfer_guard_host_to_device("allow"):
            ready = self._programs[plan.program]
            given = (self._leaves, self._exchange)
            self._state, result = ready(given, self._state, plan.buffer)
        assert isinstance(result, ReadyArray)
        if not is_pinned(result):
            with jax.transfer_guard_device_to_host("allow"):
                result.copy_to_host_async()
        self._last = JaxFuture(plan.program, self.capacity, result, self._clock, self._exchange)
        return self._last

    def close(self) -> None:
        """Waits for the steps in flight and frees the device memory."""
        if self._last is not None:
            with suppress(AllGatherTimeout):  # already reported by the step's future
                self._last.result()
        self._leaves, self._programs, self._last = [], {}, None
        self._exchange = self._meet = None
        del self._state

    def _load(self, programs: Sequence[Program], idle: AllGather) -> None:
        """Runs each program over padding, without waiting for ranks that load their kernels.

        Values that no rank sent read as NaN; only reserved rows receive them.
        """
        for program in programs:
            plan, run = empty_plan(program, self.capacity), self._programs[program]
            ran = run((self._leaves, idle), self._state, plan.buffer)
            self._state, _ = jax.block_until_ready(ran)

    def _keeping(self, folder: Path) -> CompilationCache:
        """Returns the compilation cache, keyed by everything that determines a program."""
        arrays = ((self._leaves, self._exchange), self._state)
        words = jax.ShapeDtypeStruct((), jnp.int32)
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), arrays)
        made_from = (self._blueprint, shapes, self._options, ops.kernel_names())
        takes = jax.tree.structure(((*arrays, words), {}))
        gives = jax.tree.structure((self._state, words))
        return CompilationCache(folder, self._together.devices, made_from, takes, gives)

    def _compiled(self, program: Program, lowered: Lowered) -> Compiled:
        compiled = lowered.compile()
        if self._kept:
            self._kept.keep(program, compiled)
        return compiled

    def _step(
        self, program: Program, given: StepInputs, state: DeviceState, words: Words
    ) -> tuple[DeviceState, Int[jax.Array, " result_words"]]:
        """Step function that JAX traces once per compilation."""
        self.compiles += 1

        def of_rank(
            given: StepInputs, state: DeviceState, words: Words
        ) -> tuple[DeviceState, Words]:
            leaves, exchange = given
            context = self._context(leaves, state.adapters, exchange)
            state, result = step(context, state, words, program)
            if exchange is not None:
                result = jnp.append(result, exchange.error(result))
            if program.work is StepKind.EXPORT_KV and self._has_pinned:
                result = pinned(result)
            return state, result

        return self._together.run(of_rank, given, state, words)

    def _context(
        self, leaves: list[Leaf], adapters: Adapters, exchange: AllGather | None
    ) -> StepContext:
        """Builds the context of a step from the leaves of a trace."""
        leaves = [jnp.stack(leaf) if isinstance(leaf, list) else leaf for leaf in leaves]
        loaded, own, seeing = jax.tree.unflatten(self._tree, leaves)
        tower = seeing and weights.vision_encoder_of(seeing)
        model, drafter = self._bind(loaded, own, adapters, self._group.on(exchange))
        return StepContext(model, drafter, tower, self.capacity)


def _of_ranks(
    given: Arrays | Loaded | Sequence[Loaded] | None,
    read: Callable[..., Loaded | None],
    together: RankMesh,
) -> list[Loaded | None]:
    """Returns each rank's weights on its device."""
    if given is None or isinstance(given, Loaded):
        return [given] * len(together.devices)
    if not isinstance(given, Mapping):
        return list(given)
    ranks = zip(together.devices, together.ranks, strict=True)
    return [read(given, device=device, group=rank) for device, rank in ranks]


def _shape_on(device: jax.Device, array: Shape) -> jax.ShapeDtypeStruct:
    """Returns the placeholder of a device array for compilation."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=SingleDeviceSharding(device))


def _placed(
    arrays: Arrays, drafts: DrafterSpec, dtype: np.dtype, device: jax.Device, group: TPGroup
) -> Loaded | None:
    if drafts.head is not None:
        return weights.head_from_arrays(DraftHead(drafts.head, arrays), dtype, device, group)
    if drafts.model is not None:
        return weights.from_arrays(arrays, drafts.model, dtype, device, group)
    return None


def _binding(
    config: ModelConfig, drafts: DrafterSpec, in_stacks: bool
) -> Callable[[Loaded, Loaded | None, Adapters, TPGroup], tuple[Model, drafters.Drafter | None]]:
    """Returns a function that builds the model and the drafter of a trace from its arrays."""

    def bind(
        loaded: Loaded, own: Loaded | None, adapters: Adapters, group: TPGroup
    ) -> tuple[Model, drafters.Drafter | None]:
        model = Model.of(config, weights.weights_of(config, loaded, in_stacks), group, adapters)
        if drafts.with_mtp:
            return model, EagleDrafter(heads.mtp(model))
        if own is None:
            return model, None
        if (small := drafts.model) is not None:
            read = weights.weights_of(small, own, in_stacks)
            return model, StandaloneDrafter(Model.of(small, read, group))
        assert drafts.head is not None  # the arrays are of one
        head = weights.head_of(drafts.head, own, in_stacks)
        if isinstance(head, BlockWeights):
            return model, BlockDrafter.of(model, head)
        if isinstance(head, AssistantWeights):
            return model, AssistantDrafter.of(model, head)
        return model, EagleDrafter(heads.HEADS[drafts.kind](model, head))

    return bind


def compiler_options(device: jax.Device, quick_compile: bool) -> dict[str, bool | int]:
    """Returns XLA's options for a platform.

    On a CPU, unoptimised code takes half the time to compile and twice the time to run. As one LLVM
    module and by the older emitters (newer versions of XLA have no others) it compiles faster. With
    optimisation the MLIR emitters compile faster by a quarter, and steps have the same speed.
    """
    if device.platform != "cpu":
        return {}
    wanted: dict[str, bool | int] = {"xla_backend_optimization_level": 0 if quick_compile else 1}
    if quick_compile:
        wanted |= {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
    return {name: value for name, value in wanted.items() if _is_known(name, value, device)}


def _step_options(device: jax.Device, quick_compile: bool) -> dict[str, bool | int]:
    """Returns XLA's options for steps; on a GPU they disable its memory limit.

    XLA counts the donated pools twice, as inputs and as outputs. It would exceed the limit and
    rematerialise values that fit in memory.
    """
    if device.platform == "cpu":
        return compiler_options(device, quick_compile)
    name, percent = "xla_gpu_memory_limit_slop_factor", 100_000
    return {name: percent} if _is_known(name, percent, device) else {}


@cache
def _is_known(name: str, value: bool | int, device: jax.Device) -> bool:
    try:
        one = _shape_on(device, np.zeros((), np.float32))
        jax.jit(jnp.negative, compiler_options={name: value}).lower(one).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


@runtime_checkable
class ReadyArray(Protocol):
    """Array that may not be computed yet; `jax.Array` does not declare `is_ready`."""

    def is_ready(self) -> bool: ...


class JaxFuture:
    """Future result of a submitted step."""

    def __init__(
        self,
        program: Program,
        capacity: BackendLimits,
        words: ReadyArray,
        clock: "_CompletionTimer",
        exchange: AllGather | None,
    ) -> None:
        self._program, self._capacity, self._clock = program, capacity, clock
        self._exchange = exchange
        self._words: ReadyArray | None = words
        self._submitted = time.perf_counter()
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Waits for the copy to the host."""
        if self._result is None:
            assert self._words is not None, "the words stay until they are read"
            is_late = self._words.is_ready()
            assert isinstance(self._words, jax.Array)
            with jax.transfer_guard_device_to_host("allow"):  # both wait
                is_in_place = is_pinned(self._words)
                words = read_pinned(self._words) if is_in_place else np.asarray(self._words)
            if self._exchange is not None:
                words, (error,) = words[:-1], words[-1:]
                self._exchange.check(int(error))
            # Freed so that the next result may reuse the address: a command buffer with unchanged
            # addresses is not updated.
            self._words = None
            seconds = self._clock.seconds_since_last(self._submitted, is_late)
            self._result = read_result(self._program, self._capacity, words, seconds)
        return self._result


class _CompletionTimer:
    """Time between completions of steps, measured on the host."""

    def __init__(self) -> None:
        self._completed: float | None = None

    def seconds_since_last(self, submitted: float, is_late: bool) -> float | None:
        """Returns the seconds of the step that has just completed, or None if they are unknown.

        Args:
          submitted: Time at which the step was queued. If it is after the last completion, the
            device was idle in between.
          is_late: True if the step completed before the host checked it.
        """
        last, self._completed = self._completed, None if is_late else time.perf_counter()
        if last is None or self._completed is None or submitted >= last:
            return None
        return self._completed - last
