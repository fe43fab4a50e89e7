"""An engine in this process, without HTTP: its start from the server's flags, and a timed run."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import numpy as np

from shared.boundary.backend import Backend, BackendLimits, BackendSpec, StepFuture, StepPlan
from shared.boundary.program import ProgramFeature, StepKind
from shared.boundary.transfer_spec import TransferSpec
from shared.engine.engine import Engine
from shared.engine.request import Event, FinishReason, Request, SamplingParams
from shared.options.command_line import parse
from shared.options.flags import NONE
from shared.process import engines, gc_freeze
from shared.process.adapters import AdapterReader
from shared.process.memory_plan import MemoryPlan
from shared.process.tp.startup import tp_startup

WARM_UP_TOKENS = 4
TORCH = "torch_impl.platform"


GRAMMARS = "--grammar-backend"


@dataclass(frozen=True)
class Served:
    """A started engine.

    Attributes:
      last: The step that was submitted last.
      eos_ids: Tokens that end a text.
      device: "cpu" or "gpu".
      max_depth: Most drafts that a step can accept.
      memory: The memory plan.
      load_s, prepare_s: Seconds that the weights took, and the programs.
      adapter_reader: Reader of LoRA adapters; None without LoRA.
    """

    backend: Backend
    engine: Engine
    last: "LastStep"
    eos_ids: tuple[int, ...]
    device: str
    max_depth: int
    memory: MemoryPlan
    load_s: float
    prepare_s: float
    adapter_reader: AdapterReader | None

    def keeps_text_at(self, temperature: float) -> bool:
        """Returns whether the output must equal plain decoding's at a temperature."""
        capacity = self.backend.capacity
        if capacity.accept_rates is not None:
            return not capacity.accept_rates[0]  # without a first draft none is accepted
        return capacity.accept_rule == "exact" or not temperature


class LastStep:
    """A backend that remembers the step that was submitted last."""

    def __init__(self, backend: Backend, capacity: BackendLimits) -> None:
        """Stores the backend; `capacity` has those of its programs that are ready."""
        self.capacity, self.workspace = capacity, backend.workspace
        self.prepare, self.launch, self.close = backend.prepare, backend.launch, backend.close
        self._backend, self._future = backend, None

    def submit(self, plan: StepPlan) -> StepFuture:
        self._future = self._backend.submit(plan)
        return self._future

    def wait(self) -> None:
        """Waits until the device has done every step."""
        if self._future is not None:
            self._future.result()


@dataclass
class Outcome:
    """Sum of the events of one request.

    Attributes:
      tokens: Its output.
      accepted: Drafts that each of its verify steps accepted, before the end trimmed any.
    """

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """Adds an event.

        Raises:
          RuntimeError: The engine failed at the request.
        """
        if event.finish_reason is FinishReason.ERROR:
            raise RuntimeError(f"request {event.request_id}: {event.error}")
        self.tokens += event.tokens
        self.accepted += [] if event.accepted is None else [event.accepted]


def acceptance(outcomes: Sequence[Outcome], max_depth: int) -> dict[str, Any]:
    """Tokens per verify step with the bonus token, and how often each draft position is accepted.

    A position counts once all before it were accepted.
    """
    accepted = [count for outcome in outcomes for count in outcome.accepted]
    histogram = np.bincount(np.array(accepted, np.int64), minlength=max_depth + 1)
    reached = histogram[::-1].cumsum()[::-1].tolist()  # steps that accepted at least i drafts
    shares = [after / before if before else 0.0 for before, after in itertools.pairwise(reached)]
    return {
        "accept_length": round(1 + float(np.mean(accepted)), 4) if accepted else 1.0,
        "per_position": [round(share, 4) for share in shares],
        "accept_length_histogram": histogram.tolist(),
    }


@dataclass(frozen=True)
class Answer:
    """One prompt: seconds until its first token, and all that was answered."""

    seconds: float
    outcome: Outcome


def ask(served: Served, request: Request) -> Answer:
    """Serves one prompt to its end."""
    outcome, first, began = Outcome(), 0.0, time.perf_counter()
    served.engine.add(request)
    while served.engine.busy:
        for event in served.engine.step():
            outcome.take(event)
        if outcome.tokens and not first:
            first = time.perf_counter() - began
    return Answer(first, outcome)


@dataclass(frozen=True)
class Run:
    """A timed run: outcomes in the order of the requests, and programs made meanwhile."""

    outcomes: list[Outcome]
    seconds: float
    compiles: int


def start(
    framework: str,
    flags: Sequence[str],
    *,
    batch: int,
    context: int,
    radix_cache: bool,
    chunk: int | None = None,
    batches: Sequence[int] = (),
    rank_module: str = TORCH,
    wait: Callable[[], None] = lambda: None,
) -> Served:
    """Starts an engine that serves `batch` requests at once, and warms it up.

    Structured output is off unless the flags have it: its programs take memory and time, and its
    controller wraps the one that is measured.

    Args:
      framework: "torch" or "jax"; only this one is imported.
      flags: Of the server.
      context: Most tokens of prompt and output.
      radix_cache: Texts are kept for later requests; without, each prompt costs its whole time.
      chunk: Keeps only the prefill program with this number of tokens; None: all.
      batches: Also decodes in programs of the smallest batch bucket that holds each of these.
      rank_module: Has the platform of torch's other ranks.
      wait: Called when all programs are ready, before the first step.

    Raises:
      ValueError: An option that a server's start would reject, in one sentence.
    """
    stated = any(flag.partition("=")[0] == GRAMMARS for flag in flags)
    begun = [*flags] if stated else [GRAMMARS, NONE, *flags]
    bounds = ["--max-running-requests", str(batch), "--context-length", str(context)]
    cached = [] if radix_cache else ["--disable-radix-cache"]

    def narrow(capacity: BackendLimits) -> BackendLimits:
        return one_bucket(capacity, chunk, batches)

    return started(framework, [*begun, *bounds, *cached], narrow, rank_module, wait)


def started(
    framework: str,
    flags: Sequence[str],
    narrow: Callable[[BackendLimits], BackendLimits],
    rank_module: str = TORCH,
    wait: Callable[[], None] = lambda: None,
    has_transfer: bool = False,
) -> Served:
    """Starts an engine of any programs, and warms it up; see `start`.

    Args:
      framework, flags, rank_module, wait: See `start`.
      narrow: Returns the programs of a server that are made ready.
      has_transfer: Adds the programs of KV transfer, beyond the memory plan.
    """
    gc_freeze.unfreeze_gc()
    module = rank_module if framework == "torch" else None
    platform = import_module(f"{framework}_impl.platform").PLATFORM
    with tp_startup(parse(flags), lambda: platform, module, print) as ranks:
        begun = ranks.prepare()
        memory, blueprint = begun.memory, begun.memory.blueprint
        capacity, clock = narrow(blueprint.capacity), [time.perf_counter()]
        capacity = _with_transfer(capacity, blueprint) if has_transfer else capacity
        blueprint = replace(blueprint, capacity=capacity)
        narrowed = replace(begun, memory=replace(memory, blueprint=blueprint))
        # Processes of ranks call a program by its number among all that there are.
        is_led = module is not None and blueprint.ranks.count > 1
        backend = ranks.load(begun if is_led else narrowed, lambda num_bytes: None)
        clock.append(time.perf_counter())
        backend.prepare(capacity.programs, lambda program: None)
        clock.append(time.perf_counter())
    last = LastStep(backend, capacity)
    adapters = begun.read_adapters()
    engine = engines.make_engine(last, memory, "in process", adapters)
    wait()
    _warm_up(engine, capacity)
    gc_freeze.freeze_gc()
    return Served(
        backend=backend,
        engine=engine,
        last=last,
        eos_ids=blueprint.config.eos_ids,
        device=memory.device.kind,
        max_depth=capacity.max_depth,
        memory=replace(memory, blueprint=blueprint),
        load_s=clock[1] - clock[0],
        prepare_s=clock[2] - clock[1],
        adapter_reader=begun.adapter_reader,
    )


def _with_transfer(capacity: BackendLimits, blueprint: BackendSpec) -> BackendLimits:
    windows = [pool.window for pool in capacity.window_pools]
    config, drafts, size = blueprint.config, blueprint.drafts, capacity.page_size
    spec = TransferSpec.of(config, drafts, blueprint.dtype, size, windows)
    return replace(capacity, transfer=spec, programs=(*capacity.programs, *spec.programs()))


def one_bucket(
    capacity: BackendLimits, chunk: int | None = None, batches: Sequence[int] = ()
) -> BackendLimits:
    """Keeps the widest program of each kind of step, so that none is compiled in a timed run.

    They are without logprobs, which no timed run requests.

    Args:
      chunk, batches: See `start`.
    """
    widest = {}
    for program in capacity.programs:
        size = (program.batch, program.pages)
        widest[program.work] = max(size, widest.get(program.work, size))
    buckets = sorted({p.batch for p in capacity.programs if p.work is StepKind.DECODE})
    wanted = {next(bucket for bucket in buckets if bucket >= batch) for batch in batches}
    kept = [
        program.with_features({ProgramFeature.LOGPROBS: False})
        for program in capacity.programs
        if (program.batch, program.pages) == widest[program.work]
        or (program.work is StepKind.DECODE and program.batch in wanted)
        and program.pages == widest[StepKind.DECODE][1]
    ]
    if chunk is not None:
        sizes = sorted({p.tokens for p in kept if p.work is StepKind.PREFILL})
        size = next((size for size in sizes if size >= chunk), sizes[-1])
        kept = [p for p in kept if p.work is not StepKind.PREFILL or p.tokens == size]
    return replace(capacity, programs=tuple(dict.fromkeys(kept)))


def _warm_up(engine: Engine, capacity: BackendLimits) -> None:
    """Serves a prompt for every size of prefill, so that all programs are compiled."""
    sizes = sorted({p.tokens for p in capacity.programs if p.work is StepKind.PREFILL})
    sampling = SamplingParams(temperature=0.0, max_tokens=WARM_UP_TOKENS)
    for index, size in enumerate(sizes):
        length = min(size, capacity.context_length - WARM_UP_TOKENS)
        serve_all(engine, [Request(request_id=-1 - index, prompt=(0,) * length, sampling=sampling)])


def serve_all(engine: Engine, requests: Sequence[Request]) -> list[Outcome]:
    """Adds all requests and steps until the last has ended."""
    outcomes = {request.request_id: Outcome() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.busy:
        for event in engine.step():
            outcomes[event.request_id].take(event)
    return list(outcomes.values())


def made_programs(backend: Backend) -> int:
    """Programs that were compiled, in JAX, or captured, in torch, so far."""
    return sum(getattr(backend, name, 0) for name in ("compiles", "captures"))


def timed(served: Served, requests: Sequence[Request]) -> Run:
    """Serves the requests with continuous batching."""
    made, began = made_programs(served.backend), time.perf_counter()
    outcomes = serve_all(served.engine, requests)
    seconds = time.perf_counter() - began
    return Run(outcomes, seconds, made_programs(served.backend) - made)
