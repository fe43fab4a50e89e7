"""The training loop: AdamW, a cosine learning rate schedule, and checkpoints to resume from.

The jitted step has a donated state and runs data-parallel on all devices of JAX. Each device takes
a share of the batch's rows, and the gradients are averaged. The host does not wait for a step:
metrics are read one window of steps later. A run ends after a number of steps or minutes, and the
learning rate follows the nearer limit.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jax_impl.backend import compiler_options
from jax_impl.training.checkpoints import Saved
from jax_impl.training.examples import Batches, TrainingBatch
from jax_impl.training.records import Log

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0
LAST_RATE = 0.02
"""Final learning rate as a share of the highest one."""

WINDOW = 20
"""Steps between two readings of the metrics."""

FEW_STEPS = 100
"""Runs of at most this many steps compile with `quick_compile` on a CPU."""

ROWS = "rows"
"""Axis of the mesh over which the rows of a batch are sharded."""

UNDECAYED = ("norm", "a_log", "dt_bias", "conv", "bias")
"""Suffixes of parameters without weight decay, which are no matrices."""

Metrics = dict[str, Float[Array, ""]]
Params = Any
"""A tree of float32 arrays; for a module the `nnx.State` of its parameters."""

Loss = Callable[[Any, Any, TrainingBatch, Any], tuple[Float[Array, ""], Metrics]]
"""Loss and metrics of parameters, frozen arrays, batch and random key."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Parameters to train and their loss.

    Attributes:
      params: Trained arrays, float32; the run donates them.
      frozen: Other arrays that the loss reads, such as the target of a head.
      loss: See `Loss`.
    """

    params: Params
    frozen: Any
    loss: Loss


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Length and learning rate of a run.

    Attributes:
      steps: Steps of the whole run; None for no limit.
      minutes: Wall-clock time of the whole run, including compilation; None for no limit.
      learning_rate: Highest learning rate, reached after `warmup` steps.
      save_minutes: Time between two checkpoints.
    """

    steps: int | None
    minutes: float | None
    learning_rate: float
    warmup: int
    save_minutes: float

    def progress(self, step: int, seconds: float) -> float:
        """Returns the completed share of the run, 1 at its end."""
        by_steps = step / self.steps if self.steps else 0.0
        by_clock = seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_steps, by_clock))

    def rate(self, step: int, seconds: float) -> float:
        """Returns the learning rate of a step: linear warm-up times a cosine decay."""
        warmup = min(1.0, (step + 1) / max(1, self.warmup))
        decay = 0.5 * (1 + math.cos(math.pi * self.progress(step, seconds)))
        return self.learning_rate * warmup * (LAST_RATE + (1 - LAST_RATE) * decay)


class State(NamedTuple):
    """Training state, donated to each step."""

    params: Params
    optimizer: Any
    step: Int[Array, ""]


def train(task: Task, batches: Batches, schedule: Schedule, seed: int, folder: Path) -> Params:
    """Trains to the end of the schedule; resumes from the newest checkpoint in `folder`, if any.

    Args:
      folder: Receives the checkpoints, the log `log.jsonl` and finally `curves.png`.

    Returns:
      The trained parameters.
    """
    optimizer, mesh = _optimizer(), jax.make_mesh((jax.device_count(),), (ROWS,))
    replicated = NamedSharding(mesh, PartitionSpec())
    state = State(task.params, jax.jit(optimizer.init)(task.params), jnp.zeros((), jnp.int32))
    state, frozen = jax.device_put((state, task.frozen), replicated)
    with Saved(folder / "checkpoints") as saved:
        state, seconds = saved.newest(state)
        step = int(state.step)
        with Log(folder, step) as log:
            run = _Run(replace(task, frozen=frozen), optimizer, mesh, batches, schedule, seed, log)
            state = run.go(state, step, seconds, saved)
        log.draw()
    return state.params


def _optimizer() -> optax.GradientTransformation:
    """Returns AdamW without the learning rate, which the step multiplies by."""
    return optax.chain(
        optax.clip_by_global_norm(MAX_NORM),
        optax.scale_by_adam(*BETAS),
        optax.add_decayed_weights(WEIGHT_DECAY, mask=_is_matrix),
    )


def _is_matrix(params: Params) -> Any:
    def decays(path: tuple, leaf: Any) -> bool:
        words = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        return not any(word.endswith(UNDECAYED) for word in words)

    return jax.tree_util.tree_map_with_path(decays, params)


def _norm(tree: Any) -> Float[Array, ""]:
    return jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(tree)))


class _Window(NamedTuple):
    """Metrics of consecutive steps that are read together."""

    step: int
    share: float
    num_tokens: int
    rate: float
    metrics: list[Metrics]


class _Run:
    """Training steps of one call of `train`."""

    def __init__(
        self,
        task: Task,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        batches: Batches,
        schedule: Schedule,
        seed: int,
        log: Log,
    ) -> None:
        self._task, self._optimizer, self._batches = task, optimizer, batches
        self._schedule, self._log = schedule, log
        self._mesh, self._by_rows = mesh, NamedSharding(mesh, PartitionSpec(ROWS))
        self._key = jax.random.key(seed)
        self._compiled: dict[tuple[int, ...], Callable[..., tuple[State, Metrics]]] = {}
        self._windows: deque[_Window] = deque()

    def go(self, state: State, step: int, seconds: float, saved: Saved) -> State:
        """Runs steps from `step` to the end of the schedule, after `seconds` of earlier calls."""
        began, wrote, first = time.monotonic() - seconds, time.monotonic(), step
        if self._schedule.progress(step, seconds) < 1:
            self._compile(state)
        metrics: list[Metrics] = []
        rate, num_tokens = np.float32(0), 0
        while self._schedule.progress(step, seconds) < 1:
            batch = self._batches.at(step)
            real = int(np.count_nonzero(batch.weights))
            batch = jax.device_put(batch, self._by_rows)
            rate = np.float32(self._schedule.rate(step, seconds))
            compiled = self._compiled[batch.tokens.shape]
            state, step_metrics = compiled(state, self._task.frozen, batch, rate)
            metrics.append(step_metrics)
            step, num_tokens = step + 1, num_tokens + real
            seconds = time.monotonic() - began
            if step % WINDOW == 0:
                share = self._schedule.progress(step, seconds)
                self._windows.append(_Window(step, share, num_tokens, float(rate), metrics))
                metrics, num_tokens = [], 0
                self._read(keep=1)
            if time.monotonic() - wrote > 60 * self._schedule.save_minutes:
                # A run cannot resume from NaN, so all pending metrics are checked first.
                self._read(keep=0)
                _check(step, jax.device_get(metrics))
                saved.write(state, step, seconds)
                wrote = time.monotonic()
        if metrics:
            self._windows.append(_Window(step, 1.0, num_tokens, float(rate), metrics))
        self._read(keep=0)
        if step > first:
            saved.write(state, step, time.monotonic() - began)
        return state

    def _compile(self, state: State) -> None:
        """Compiles the step for all batch shapes, in parallel."""
        replicated, rows = PartitionSpec(), PartitionSpec(ROWS)
        traced = jax.shard_map(
            self._traced,
            mesh=self._mesh,
            in_specs=(replicated, replicated, rows, replicated),
            out_specs=replicated,
            check_vma=False,  # otherwise JAX would sum the gradients itself
        )
        step, rate = jax.jit(traced, donate_argnums=0), jax.ShapeDtypeStruct((), np.float32)
        lowered = {}
        for shape in self._batches.shapes:
            empty = TrainingBatch(np.empty(shape, np.int32), np.empty(shape, np.float32))
            batch = jax.tree.map(self._placed_shape, empty)
            lowered[shape] = step.lower(state, self._task.frozen, batch, rate)
        is_short = self._schedule.steps is not None and self._schedule.steps <= FEW_STEPS
        options = compiler_options(jax.devices()[0], quick_compile=is_short)
        with ThreadPoolExecutor() as pool:
            compiled = pool.map(lambda one: one.compile(options), lowered.values())
            self._compiled = dict(zip(lowered, compiled, strict=True))

    def _placed_shape(self, array: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._by_rows)

    def _traced(
        self, state: State, frozen: Any, batch: TrainingBatch, rate: Float[Array, ""]
    ) -> tuple[State, Metrics]:
        key = jax.random.fold_in(self._key, state.step * lax.axis_size(ROWS) + lax.axis_index(ROWS))
        gradient = jax.value_and_grad(self._task.loss, has_aux=True)
        (_, metrics), grads = gradient(state.params, frozen, batch, key)
        grads, metrics = lax.pmean((grads, metrics), ROWS)
        updates, optimizer = self._optimizer.update(grads, state.optimizer, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        metrics = {**metrics, "gradient_norm": _norm(grads)}
        return State(params, optimizer, state.step + 1), metrics

    def _read(self, keep: int) -> None:
        """Logs all windows except the newest `keep`, whose steps may still run."""
        while len(self._windows) > keep:
            step, share, num_tokens, rate, metrics = self._windows.popleft()
            read = jax.device_get(metrics)
            _check(step, read)
            means = {name: float(np.mean([m[name] for m in read])) for name in read[0]}
            self._log.add(step, share, num_tokens, {**means, "learning_rate": rate})


def _check(step: int, read: Sequence[Metrics]) -> None:
    """Raises FloatingPointError if a loss or gradient norm is not finite."""
    for name in ("loss", "gradient_norm"):
        if invalid := [float(each[name]) for each in read if not np.isfinite(each[name])]:
            quantity = name.replace("_", " ")
            raise FloatingPointError(
                f"the {quantity} is {invalid[0]} by step {step}; resume from the last "
                "checkpoint with a lower --learning-rate"
            )
