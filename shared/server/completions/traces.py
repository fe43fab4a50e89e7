"""Step traces of requests: JSON of each step, and the store of recent traces."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from shared.engine.request import PLAIN, PREFILL, StepTrace
from shared.server.completions.logprobs import TokenNames

MAX_TRACES = 64
"""Maximum number of stored traces."""

MAX_TRACE_BYTES = 32 << 20
"""Maximum JSON bytes of all traces; a step of a 16-node tree takes about 1.5 KB."""

TARGET, BONUS = "target", "bonus"


class TraceRecorder:
    """Step trace of one HTTP request.

    Args:
      store: Store that limits the memory of all traces.
      head: First fields of the JSON, before the choices.
      num_choices: Number of choices of all prompts.
    """

    def __init__(self, store: Traces, head: dict[str, Any], num_choices: int) -> None:
        self._store, self._head = store, head
        self._finish_reasons: list[str | None] = [None] * num_choices
        self._steps: deque[tuple[int, bytes]] = deque()
        self._num_dropped = 0

    @property
    def num_bytes(self) -> int:
        """JSON bytes of the steps."""
        return sum(len(step) for _, step in self._steps)

    def add(self, choice: int, step: dict[str, Any], finish_reason: str | None) -> None:
        """Adds a step of a choice, and the finish reason of the choice if it ended."""
        self._finish_reasons[choice] = finish_reason
        written = json.dumps(step, separators=(",", ":")).encode()
        self._steps.append((choice, written))
        self._store.bound(self, len(written))

    def clear(self) -> None:
        """Frees the steps of a trace that was evicted."""
        self._steps.clear()

    def drop_step(self) -> int:
        """Drops the oldest step, and returns its bytes."""
        _, step = self._steps.popleft()
        self._num_dropped += 1
        return len(step)

    def end(self, reason: str) -> None:
        """Sets the finish reason of unfinished choices."""
        self._finish_reasons = [known or reason for known in self._finish_reasons]

    def to_json(self) -> bytes:
        """Returns the response of `/v1/requests/ID/trace`."""
        choices = [
            b'{"index":%d,"finish_reason":%s,"steps":[%s]}'
            % (
                index,
                json.dumps(reason).encode(),
                b",".join(step for choice, step in self._steps if choice == index),
            )
            for index, reason in enumerate(self._finish_reasons)
        ]
        head = json.dumps({**self._head, "dropped_steps": self._num_dropped}).encode()
        return b'%s,"choices":[%s]}' % (head[:-1], b",".join(choices))


class Traces:
    """Store of the traces of recent requests.

    If a limit is exceeded, the oldest trace is evicted; a single trace loses its oldest steps.

    Args:
      max_traces: Maximum number of requests.
      max_bytes: Maximum JSON bytes of all steps.
    """

    def __init__(self, max_traces: int = MAX_TRACES, max_bytes: int = MAX_TRACE_BYTES) -> None:
        self._max_traces, self._max_bytes = max_traces, max_bytes
        self._kept: OrderedDict[str, TraceRecorder] = OrderedDict()
        self._num_bytes = 0

    def open(self, name: str, head: dict[str, Any], num_choices: int) -> TraceRecorder:
        """Starts the trace of a request.

        Args:
          name: The `id` of the response.
          head: Further fields of the trace.
          num_choices: Number of choices of all prompts.
        """
        trace = TraceRecorder(self, {"id": name, "object": "request.trace", **head}, num_choices)
        self._kept[name] = trace
        if len(self._kept) > self._max_traces:
            self._drop_oldest()
        return trace

    def find(self, name: str) -> TraceRecorder | None:
        """Returns the trace of a request; None if it is not stored."""
        return self._kept.get(name)

    def bound(self, trace: TraceRecorder, num_bytes: int) -> None:
        """Counts a step that was added to a trace, and evicts traces or steps above the limit."""
        if trace not in self._kept.values():
            trace.clear()
            return
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            if len(self._kept) > 1:
                self._drop_oldest()
            else:
                self._num_bytes -= trace.drop_step()

    def _drop_oldest(self) -> None:
        _, oldest = self._kept.popitem(last=False)
        self._num_bytes -= oldest.num_bytes


def step_json(
    step: StepTrace, tokens: Sequence[int], texts: Sequence[str], names: TokenNames
) -> dict[str, Any]:
    """Returns the JSON of a step.

    Args:
      step: Step of the engine.
      tokens: Output tokens of the step, up to the end of the text.
      texts: Text that each token added.
      names: Text of single tokens.
    """
    origins, depths = _origins(step), _depths(step.parents)
    accepted = set(step.path)
    drafts = [
        {
            "node": node,
            "parent": step.parents[node - 1],
            "depth": depths[node],
            "token": token,
            "text": names.name(token),
            "origin": origins[node],
            "accepted": node in accepted,
        }
        for node, token in enumerate(step.drafts, start=1)
    ]
    emitted = []
    for place, (token, text) in enumerate(zip(tokens, texts, strict=True)):
        node = step.path[place] if place < len(step.path) else 0
        emitted.append(
            {
                "token": token,
                "text": text,
                "name": names.name(token),
                "origin": origins[node],
                "node": node,
                "depth": depths[node],
            }
        )
    return {
        "step": step.number,
        "source": step.source,
        "batch_size": step.num_rows,
        "time_ms": round(step.at_ms, 3),
        "host_ms": round(step.host_ms, 3),
        "device_ms": None if step.device_ms is None else round(step.device_ms, 3),
        "drafts": drafts,
        "tokens": emitted,
    }


def _origins(step: StepTrace) -> list[str]:
    """Returns the origin of each node; entry 0 is the target's own token."""
    origin = TARGET if step.source in (PREFILL, PLAIN) else BONUS
    return [origin, *step.origins]


def _depths(parents: Sequence[int]) -> list[int]:
    """Returns the depth of each node; 0 for the root."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths
