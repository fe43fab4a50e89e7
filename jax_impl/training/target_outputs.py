"""Greedy outputs of a target for prompts, generated once by the engine and shared by all heads.

A head learns to predict its target, so its training data are outputs of the target and not the
answers of the data. The file is JSONL: one line about the target, then one line per prompt with
`prompt_ids` and `output_ids`. An interrupted run resumes after the last complete line. Every run
with the same prompt reuses its output, if the output is long enough or has ended.
"""

import hashlib
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from jax_impl.backend import JaxBackend
from jax_impl.training.examples import RaggedRows, Row
from jax_impl.training.nnx_modules import ModelModule, loaded_of
from jax_impl.workspace import workspace
from shared.boundary.backend import BackendLimits
from shared.boundary.program import ProgramFeature, StepKind
from shared.drafts.drafter_spec import DrafterSpec
from shared.drafts.token_map import most_frequent
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.request import FinishReason, Request, SamplingParams
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.options.options import Options
from shared.process.buckets import ProgramCosts
from shared.process.device import Device
from shared.process.memory_plan import plan
from shared.spec.draft_tree import TreeShape

MAX_PREFILL_ROWS = 64
MAX_QUEUED = 512
"""Requests in the engine: more than it decodes at once, so that no slot is idle."""

REPORT_S = 10.0


def fingerprint(checkpoint: Checkpoint) -> str:
    """Returns an identifier of a trained model, from a tensor that each training changes."""
    return hashlib.sha256(checkpoint.tensor("norm.weight").tobytes()).hexdigest()[:16]


def make_engine(
    config: ModelConfig,
    model: ModelModule,
    slots: int,
    context: int,
    dtype: str,
    quick_compile: bool,
) -> Engine:
    """Returns an engine for `slots` requests with one prefill and one decode program.

    Args:
      context: Maximum number of tokens of prompt and output.
      quick_compile: See `JaxBackend`.

    Raises:
      ValueError: The engine does not fit into device memory.
    """
    values = {"max_running_requests": slots, "context_length": context, "dtype": dtype}
    device = jax.devices()[0]
    memory_plan = plan(
        Options.from_values(values),
        config,
        DrafterSpec.none(),
        _memory(device),
        ProgramCosts(workspace, are_compiled=True),
    )
    capacity = _capacity(memory_plan.capacity, slots)
    settings = {"dtype": dtype, "device": device, "quick_compile": quick_compile}
    loaded = loaded_of(model, config)
    backend = JaxBackend(config, loaded, capacity, DrafterSpec.none(), None, **settings)
    backend.prepare(capacity.programs, lambda program: None)
    shape = TreeShape.plain(slots)
    controller = StaticController(capacity, nodes=shape.nodes, depth=shape.depth, width=shape.width)
    chunk = capacity.token_sizes[-1]
    return Engine(
        backend, controller, overlap=capacity.overlap, chunked_prefill_size=chunk, cache=NO_CACHE
    )


def _memory(device: jax.Device) -> Device:
    if device.platform == "cpu":
        return Device.cpu()
    stats = device.memory_stats()
    return Device("gpu", device.device_kind, stats["bytes_limit"] - stats["bytes_in_use"])


def _capacity(capacity: BackendLimits, slots: int) -> BackendLimits:
    """Keeps only the widest program of each step kind, because latency does not matter here."""
    widest = {
        program.work: program.with_features({ProgramFeature.LOGPROBS: False})
        for program in capacity.programs
    }
    batch = min(slots, MAX_PREFILL_ROWS)
    prefill = replace(widest[StepKind.PREFILL], batch=batch, shape=TreeShape.plain(batch))
    return replace(capacity, programs=(prefill, widest[StepKind.DECODE]))


def write_outputs(
    path: Path, engine: Engine, target: str, prompts: Sequence[list[int]], sampling: SamplingParams
) -> None:
    """Generates outputs for the prompts without a line, and prints the progress.

    Args:
      target: See `fingerprint`.

    Raises:
      ValueError: The file has outputs of another target, or a request fails.
    """
    pending = missing(path, target, prompts, sampling)
    num_known = len(prompts) - len(pending)
    began = reported = time.monotonic()
    num_tokens = num_done = 0
    with path.open("a", encoding="utf-8") as file:
        if not path.stat().st_size:
            file.write(json.dumps({"target": target}) + "\n")
        for index, output in _answers(engine, prompts, pending, sampling):
            line = {"prompt_ids": prompts[index], "output_ids": output}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            num_tokens, num_done = num_tokens + len(output), num_done + 1
            if num_done == len(pending) or time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                speed = num_tokens / (reported - began)
                print(
                    f"target outputs {num_known + num_done}/{len(prompts)}  {speed:,.0f} tokens/s",
                    flush=True,
                )


def _answers(
    engine: Engine, prompts: Sequence[list[int]], pending: list[int], sampling: SamplingParams
) -> Iterator[tuple[int, list[int]]]:
    """Yields indices of prompts with their outputs, in the order in which they finish."""
    waiting, outputs = deque(pending), {}
    while waiting or engine.busy:
        while waiting and len(outputs) < MAX_QUEUED:
            index = waiting.popleft()
            outputs[index] = []
            engine.add(Request(request_id=index, prompt=tuple(prompts[index]), sampling=sampling))
        for event in engine.step():
            outputs[event.request_id] += event.tokens
            if event.finish_reason is FinishReason.ERROR:
                raise ValueError(
                    f"the target failed on prompt {event.request_id} of the data: {event.error}"
                )
            if event.finish_reason is not None:
                yield event.request_id, outputs.pop(event.request_id)


def missing(
    path: Path, target: str, prompts: Sequence[list[int]], sampling: SamplingParams
) -> list[int]:
    """Returns indices of the prompts without an output in the file; the last of equal prompts.

    Raises:
      ValueError: The file has outputs of another target.
    """
    _cut_off_broken_line(path)
    known = _known(path, target, sampling)
    index_of = {_key(prompt): index for index, prompt in enumerate(prompts)}
    return [index for key, index in index_of.items() if key not in known]


def read_outputs(
    path: Path,
    target: str,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    max_tokens: int,
) -> RaggedRows:
    """Returns token rows of prompts with their outputs, in the order of the prompts.

    Raises:
      ValueError: The file has outputs of another target, or no row of at most `max_tokens`.
    """
    known = _known(path, target, sampling)

    def row(prompt: list[int]) -> Row:
        output = known[_key(prompt)]
        return Row(prompt + output, [False] * len(prompt) + [True] * len(output))

    rows = RaggedRows.of(map(row, prompts), max_tokens)
    if not rows.lengths.size:
        raise ValueError(
            f"{path} has no prompt and output of at most {max_tokens} tokens together; raise "
            "--max-tokens or use other --data"
        )
    return rows


def _known(path: Path, target: str, sampling: SamplingParams) -> dict[bytes, list[int]]:
    """Returns outputs by prompt: finished ones, and longer ones cut to `sampling.max_tokens`."""
    most, known = sampling.max_tokens, dict[bytes, list[int]]()
    for line in _lines(path, target):
        output = line["output_ids"]
        if len(output) >= most or output[-1] in sampling.stop_token_ids:
            known[_key(line["prompt_ids"])] = output[:most]
    return known


def _key(prompt: list[int]) -> bytes:
    return np.array(prompt, np.int32).tobytes()


def _cut_off_broken_line(path: Path) -> None:
    """Removes an incomplete last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_bytes() if path.is_file() else b""
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:  # a complete file is not touched: another run may be reading it
        path.write_bytes(whole)


def _lines(path: Path, target: str) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file):
            line = json.loads(text)
            if number:
                yield line
            elif line.get("target") != target:
                raise ValueError(
                    f"{path} has outputs of another model; set --outputs to another file"
                )


def frequent_tokens(rows: RaggedRows, vocab: int, count: int) -> Int32[np.ndarray, " draft_vocab"]:
    """Returns the `count` most frequent tokens of the answers, ascending.

    Raises:
      ValueError: `count` exceeds the vocabulary.
    """
    return most_frequent(np.bincount(rows.tokens[rows.is_answer], minlength=vocab), count)
