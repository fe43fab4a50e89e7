"""A target's own greedy answers to prompts, made once by the engine and kept for all its heads.

A head learns what its target says, so it is trained on the target's words rather than on those of
the data. The file is JSONL: one line about the target, then a line for each prompt with its
`prompt_ids` and `output_ids`; a run that was broken off goes on after the last whole line. An
answer is of use to every run that asks for this prompt, and for so many tokens of it.
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
"""Requests that the engine holds at once: more than it decodes, so that a slot never waits."""

REPORT_S = 10.0


def fingerprint(checkpoint: Checkpoint) -> str:
    """Tells one training of a model from another, by a tensor that each training changes."""
    return hashlib.sha256(checkpoint.tensor("norm.weight").tobytes()).hexdigest()[:16]


def make_engine(
    config: ModelConfig,
    model: ModelModule,
    slots: int,
    context: int,
    dtype: str,
    quick_compile: bool,
) -> Engine:
    """An engine that decodes `slots` requests at once, with one program each for its two works.

    Args:
      context: Most tokens of prompt and answer.
      quick_compile: See `JaxBackend`.

    Raises:
      ValueError: It does not fit into the device's memory.
    """
    values = {"max_running_requests": slots, "context_length": context, "dtype": dtype}
    device = jax.devices()[0]
    made_for = (
        config,
        DrafterSpec.none(),
        _memory(device),
        ProgramCosts(workspace, are_compiled=True),
    )
    capacity = _capacity(plan(Options.from_values(values), *made_for).capacity, slots)
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
    """With the widest program of each work alone, as nobody waits for a single answer."""
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
    """Answers the prompts that have no line yet, and prints how fast.

    Args:
      target: See `fingerprint`.

    Raises:
      ValueError: The file is that of another target, or the model fails; one sentence.
    """
    wanted = missing(path, target, prompts, sampling)
    num_known = len(prompts) - len(wanted)
    began = reported = time.monotonic()
    num_tokens = num_done = 0
    with path.open("a", encoding="utf-8") as file:
        if not path.stat().st_size:
            file.write(json.dumps({"target": target}) + "\n")
        for place, output in _answers(engine, prompts, wanted, sampling):
            line = {"prompt_ids": prompts[place], "output_ids": output}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            num_tokens, num_done = num_tokens + len(output), num_done + 1
            if num_done == len(wanted) or time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                speed = num_tokens / (reported - began)
                print(
                    f"answers {num_known + num_done}/{len(prompts)}  {speed:,.0f} tokens/s",
                    flush=True,
                )


def _answers(
    engine: Engine, prompts: Sequence[list[int]], wanted: list[int], sampling: SamplingParams
) -> Iterator[tuple[int, list[int]]]:
    """Places of prompts and their answers, in the order in which they end."""
    waiting, outputs = deque(wanted), {}
    while waiting or engine.busy:
        while waiting and len(outputs) < MAX_QUEUED:
            place = waiting.popleft()
            outputs[place] = []
            engine.add(Request(request_id=place, prompt=tuple(prompts[place]), sampling=sampling))
        for event in engine.step():
            outputs[event.request_id] += event.tokens
            if event.finish_reason is FinishReason.ERROR:
                raise ValueError(
                    f"the target cannot answer prompt {event.request_id}: {event.error}"
                )
            if event.finish_reason is not None:
                yield event.request_id, outputs.pop(event.request_id)


def missing(
    path: Path, target: str, prompts: Sequence[list[int]], sampling: SamplingParams
) -> list[int]:
    """Places of the prompts that the file has no answer to; of equal prompts the last one's.

    Raises:
      ValueError: The file is that of another target; one sentence.
    """
    _cut_off_broken_line(path)
    known = _known(path, target, sampling)
    place_of = {_key(prompt): place for place, prompt in enumerate(prompts)}
    return [place for key, place in place_of.items() if key not in known]


def read_outputs(
    path: Path,
    target: str,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    max_tokens: int,
) -> RaggedRows:
    """Token rows of prompts with their answers, in the order of the prompts.

    Raises:
      ValueError: The file is that of another target, or has no row; one sentence.
    """
    known = _known(path, target, sampling)

    def row(prompt: list[int]) -> Row:
        output = known[_key(prompt)]
        return Row(prompt + output, [False] * len(prompt) + [True] * len(output))

    rows = RaggedRows.of(map(row, prompts), max_tokens)
    if not rows.lengths.size:
        raise ValueError(f"{path} holds no answer of at most {max_tokens} tokens with its prompt")
    return rows


def _known(path: Path, target: str, sampling: SamplingParams) -> dict[bytes, list[int]]:
    """Answers by their prompts: those that ended, and of longer ones what is asked for."""
    most, known = sampling.max_tokens, dict[bytes, list[int]]()
    for line in _lines(path, target):
        output = line["output_ids"]
        if len(output) >= most or output[-1] in sampling.stop_token_ids:
            known[_key(line["prompt_ids"])] = output[:most]
    return known


def _key(prompt: list[int]) -> bytes:
    return np.array(prompt, np.int32).tobytes()


def _cut_off_broken_line(path: Path) -> None:
    """Takes off a line that was not written to its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_bytes() if path.is_file() else b""
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:  # a whole file is not touched: another head's run may be reading it
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
                    f"{path} holds the outputs of another model; name another file as --outputs"
                )


def frequent_tokens(rows: RaggedRows, vocab: int, count: int) -> Int32[np.ndarray, " draft_vocab"]:
    """The `count` most frequent tokens of the answers, ascending.

    Raises:
      ValueError: There are no so many tokens.
    """
    return most_frequent(np.bincount(rows.tokens[rows.is_answer], minlength=vocab), count)
