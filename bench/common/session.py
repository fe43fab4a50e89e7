"""Session of one drafter on one backend: rounds of a batch with timed decode steps.

A round serves a whole batch from prompt to end. It counts the steps in which every row decodes,
without the first few. All rounds have the same requests, so their outputs are equal. Simulated
acceptance is an exception if the drafts depend on earlier rounds, as those of n-gram drafters.
"""

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Self

import numpy as np

from bench.common.draft_config import Draft
from bench.common.dummy_adapters import adapter_name, add_adapters
from bench.common.environment import nothing_waits
from bench.common.step_bytes import step_bytes, step_products
from shared.boundary.backend import BackendSpec
from shared.engine.request import Request, SamplingParams
from shared.process import gc_freeze
from shared.process.buckets import draft_shape
from shared.spec.draft_tree import TreeShape
from tests.support.gpu_activity import Activity, traced
from tests.support.in_process_engine import Served, made_programs, start

WARM_UP_STEPS = 3
CONTEXT_MULTIPLE = 64
PROMPT_SEED = 1


@dataclass(frozen=True, kw_only=True)
class Load:
    """Batch of requests to serve.

    Attributes:
      batch: Requests at once.
      prompt, output: Tokens of each request.
      temperature, top_p: Sampling parameters.
      adapters: LoRA adapters that requests take in turn; 0: they have none.
    """

    batch: int
    prompt: int
    output: int
    temperature: float
    top_p: float
    adapters: int = 0

    def requests(self, vocab: int) -> list[Request]:
        """Returns requests with random prompts; only the length ends an output."""
        rng = np.random.default_rng(PROMPT_SEED)
        return [
            Request(
                request_id=index,
                prompt=tuple(rng.integers(2, vocab, self.prompt).tolist()),
                sampling=SamplingParams(
                    temperature=self.temperature,
                    top_p=self.top_p,
                    seed32=index,
                    max_tokens=self.output,
                    lora=adapter_name(index % self.adapters) if self.adapters else "",
                ),
            )
            for index in range(self.batch)
        ]


@dataclass(frozen=True)
class Round:
    """One batch from prompt to end.

    Attributes:
      texts: The outputs.
      prompt_s: Seconds until every row decoded.
      step_s: Seconds of each step that counts.
      tokens: Tokens of those steps, over all rows.
    """

    texts: list[list[int]]
    prompt_s: float
    step_s: list[float]
    tokens: int

    def blocks(self, steps: int) -> list[float]:
        """Returns the mean milliseconds of a step for each block of steps; a rest is dropped."""
        whole = len(self.step_s) // steps * steps
        return [
            1e3 * statistics.mean(self.step_s[first : first + steps])
            for first in range(0, whole, steps)
        ]


@dataclass(frozen=True)
class Session:
    """A started engine.

    Attributes:
      backend: "torch" or "jax".
      draft: Drafter with its settings.
      batch: Most requests at once.
    """

    backend: str
    draft: Draft
    batch: int
    served: Served

    @classmethod
    def begin(
        cls,
        backend: str,
        model: Path,
        draft: Draft,
        folders: dict[str, Path],
        flags: Sequence[str],
        load: Load,
        wait: Callable[[], None] = lambda: None,
        batches: Sequence[int] = (),
    ) -> Self:
        """Starts an engine.

        Args:
          folders: Folders of drafters, by algorithm; see `folders_of`.
          flags: Flags of the server, without model and drafter.
          load: The longest load that will be served.
          wait: Called when all programs are ready, before the first step.
          batches: Smaller batches that will be served, in programs of their own.

        Raises:
          ValueError: An option is invalid; one sentence.
        """
        reset_peak(backend)
        context = -(-(load.prompt + load.output) // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
        line = ["--model-path", str(model), *draft.flags(folders), *flags]
        served = start(
            backend,
            line,
            batch=load.batch,
            context=context,
            radix_cache=False,
            chunk=load.batch * load.prompt,
            batches=batches,
            wait=wait,
        )
        add_adapters(served)
        return cls(backend, draft, load.batch, served)

    def shape_of(self, batch: int) -> TreeShape:
        """Returns the draft tree of a batch's step."""
        return draft_shape(self.served.memory.settled, batch)

    @property
    def made(self) -> int:
        """Programs that were compiled or captured so far."""
        return made_programs(self.served.backend)

    def round(self, load: Load) -> Round:
        """Serves a batch to its end; a step that waits for the device is an error.

        Raises:
          ValueError: The outputs are too short for a step that counts.
        """
        requests, began = self._decoding(load)
        stamps, tokens = [time.perf_counter()], [_count(requests)]
        with nothing_waits(self.backend, self.served.device == "gpu"):
            while all(request.finish_reason is None for request in requests):
                tokens.append(self._step(requests))
                stamps.append(time.perf_counter())
        while self.served.engine.busy:
            self.served.engine.step()
        # The last steps may have been submitted without a row that was about to end.
        until = len(stamps) - 1 - (self.served.backend.capacity.overlap + 1)
        if until <= WARM_UP_STEPS:
            raise ValueError(f"{load.output} output tokens are too few steps; raise --output")
        step_s = np.diff(stamps)[WARM_UP_STEPS:until].tolist()
        grown = tokens[until] - tokens[WARM_UP_STEPS]
        texts = [list(request.output) for request in requests]
        return Round(texts, stamps[0] - began, step_s, grown)

    def activity(self, load: Load, steps: int) -> Activity:
        """Returns the GPU activity of a step."""
        few, many = (traced(self.backend, self.steps_of(load, n)) for n in (steps, 2 * steps))
        return many.per_step(few, steps)

    def steps_of(self, load: Load, steps: int) -> Callable[[], None]:
        """Returns a function that runs `steps` decode steps between two waits for the device."""
        self._abort_all()
        requests, _ = self._decoding(load)
        for _ in range(WARM_UP_STEPS):
            self._step(requests)
        self.served.last.wait()

        def run() -> None:
            for _ in range(steps):
                self._step(requests)
            self.served.last.wait()
            assert all(request.finish_reason is None for request in requests), "too few tokens"
            self._abort_all()

        return run

    def _step(self, requests: Sequence[Request]) -> int:
        """Runs the engine until a step has produced tokens; returns the number of all tokens.

        A call of the engine may do no more than submit a step.
        """
        before = _count(requests)
        while _count(requests) == before and self.served.engine.busy:
            self.served.engine.step()
        return _count(requests)

    def _decoding(self, load: Load) -> tuple[list[Request], float]:
        """Returns requests after their prefill, and the time at which they were submitted."""
        engine, began = self.served.engine, time.perf_counter()
        requests = load.requests(self.served.backend.capacity.vocab)
        for request in requests:
            engine.add(request)
        while not all(request.decodes for request in requests):
            engine.step()
        return requests, began

    def _abort_all(self) -> None:
        engine = self.served.engine
        for index in range(self.batch):
            engine.abort(index)
        while engine.busy:
            engine.step()

    def bytes_of(self, load: Load, routed: float | None = None) -> int:
        """Returns the bytes that a step must move in the middle of the outputs.

        See `step_bytes` for `routed`. Each adapter of the batch is read once.
        """
        pool = self.served.backend.capacity.adapters
        adapters = 0 if pool is None else pool.adapter_bytes * min(load.adapters, load.batch)
        return step_bytes(*self._in_the_middle(load), routed) + adapters

    def products_of(self, load: Load) -> int:
        """Returns the multiplications of a step in the middle of the outputs."""
        return step_products(*self._in_the_middle(load))

    def _in_the_middle(self, load: Load) -> tuple[BackendSpec, TreeShape, int, int]:
        context = load.prompt + load.output // 2
        shape = self.shape_of(load.batch)
        return self.served.memory.blueprint, shape, load.batch, context

    def end(self) -> None:
        """Closes the engine and frees the device's memory."""
        self.served.engine.close()


def _count(requests: Sequence[Request]) -> int:
    return sum(len(request.output) for request in requests)


def reset_peak(backend: str) -> None:
    """Frees the memory of earlier sessions and resets torch's peak; JAX cannot reset its peak."""
    gc_freeze.unfreeze_gc()
    if backend == "torch" and (cuda := import_module("torch").cuda).is_available():
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()


def peak_bytes(backend: str) -> int:
    """Returns the peak bytes of the framework; on a CPU, of the process."""
    if backend == "torch":
        cuda = import_module("torch").cuda
        found = cuda.max_memory_reserved() if cuda.is_available() else 0
    else:
        stats = import_module("jax").devices()[0].memory_stats() or {}
        found = stats.get("peak_bytes_in_use", 0)
    return found or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
