"""Counters and gauges of the engine, with vLLM's names and Prometheus labels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from shared.boundary.program import LaunchMode, StepKind
from shared.engine.request import AdapterVersion, FinishReason

_NO_LABEL = re.compile(r'["\\\n]')
"""Characters of a name that a label replaces."""

MAX_ADAPTERS = 64
"""Adapters with counters of their own; further ones are counted together."""

OTHER_ADAPTERS = "other"
"""Value of the label `lora_name` of further adapters."""


class Metrics:
    """Counters and gauges of the engine.

    Names that end in `_total` are counters; the others are gauges.

    Args:
      gauges: Functions that read gauges, by name.
      max_depth: Maximum draft tokens that a step can accept per request.
    """

    def __init__(self, gauges: Mapping[str, Callable[[], float]], max_depth: int) -> None:
        self._gauges = dict(gauges)
        self._positions = [_accepted(position) for position in range(max_depth)]
        names = (*_COUNTERS, *self._positions)
        self._counters: Counter[str] = Counter(dict.fromkeys(names, 0))
        self._adapters: dict[str, str] = {}

    def show(self, gauges: Mapping[str, Callable[[], float]]) -> None:
        """Adds gauges."""
        self._gauges |= gauges

    def count(self, name: str, number: int) -> None:
        """Adds to a counter.

        Raises:
          KeyError: There is no such counter.
        """
        if name not in self._counters:
            raise KeyError(name)
        self._counters[name] += number

    def count_step(self, work: StepKind, launch: LaunchMode) -> None:
        """Counts a submitted step by kind and launch mode."""
        self._counters[_steps(work, launch)] += 1

    def count_end(self, reason: FinishReason) -> None:
        """Counts a finished request by its finish reason."""
        self._counters[_success(reason)] += 1

    def count_adapter(self, name: str, adapter: AdapterVersion, number: int) -> None:
        """Adds to a counter of an adapter; see `ADAPTER_COUNTERS`."""
        self._counters[f"{name}{{{self._label_of(adapter.name)}}}"] += number

    def count_adapter_drafts(
        self,
        adapters: Sequence[AdapterVersion | None],
        drafted: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        """Counts the draft tokens of rows with adapters; see `count_drafts`."""
        for adapter, tokens, taken in zip(adapters, drafted, accepted, strict=True):
            if adapter is not None:
                self.count_adapter(DRAFT_TOKENS, adapter, tokens)
                self.count_adapter(ACCEPTED_TOKENS, adapter, taken)

    def _label_of(self, adapter: str) -> str:
        """Returns the label of an adapter, which it keeps."""
        if adapter not in self._adapters and len(self._adapters) >= MAX_ADAPTERS:
            adapter = OTHER_ADAPTERS
        if adapter not in self._adapters:
            self._adapters[adapter] = f'lora_name="{_NO_LABEL.sub("_", adapter)}"'
        return self._adapters[adapter]

    def count_drafts(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Counts the draft tokens of several rows at once, to save host time between steps.

        Args:
          drafted: Draft tokens of each row.
          accepted: Accepted draft tokens of each row; the one at position i counts if more than i
            are.
        """
        self.count("spec_decode_num_drafts_total", len(drafted))
        self.count("spec_decode_num_draft_tokens_total", sum(drafted))
        self.count("spec_decode_num_accepted_tokens_total", sum(accepted))
        rows_of = Counter(accepted)
        for position, name in enumerate(self._positions[: max(accepted, default=0)]):
            self._counters[name] += sum(n for length, n in rows_of.items() if length > position)

    def snapshot(self) -> dict[str, float]:
        """Returns all counters and gauges by name."""
        gauges = {name: read() for name, read in self._gauges.items()}
        return {name: float(value) for name, value in (gauges | self._counters).items()}


def _success(reason: FinishReason) -> str:
    return f'request_success_total{{finished_reason="{reason.value}"}}'


def _accepted(position: int) -> str:
    return f'spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'


def _steps(work: StepKind, launch: LaunchMode) -> str:
    return f'engine_steps_total{{kind="{work.value}",launch="{launch.value}"}}'


ADAPTER_COUNTERS = REQUESTS, DRAFT_TOKENS, ACCEPTED_TOKENS = (
    "lora_requests_total",
    "lora_spec_decode_num_draft_tokens_total",
    "lora_spec_decode_num_accepted_tokens_total",
)
"""Counters by adapter: requests that ended, draft tokens and accepted draft tokens."""

_COUNTERS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "overlap_stale_rows_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    *map(_success, FinishReason),
    *(_steps(work, launch) for work in StepKind for launch in LaunchMode),
)
