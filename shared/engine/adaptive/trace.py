"""Trace of the adaptive controller: one JSON line per decode step with the choice and its result.

The first line of a file contains the tiers and their costs at startup. Lines are written to a
buffered file when results arrive, while the device runs the next step. If writing fails, as on a
full disk, the trace ends with a message and serving continues.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from shared.boundary.backend import StepResult
from shared.engine.rows import ScheduledRows

BUFFER_BYTES = 1 << 16


class TraceWriter:
    """Writes the steps of a controller to a file.

    Args:
      path: The file, which is overwritten.
      tiers: Names of the tiers, plain decoding first.
      table: Seconds of a step at startup for each batch bucket, by tier.

    Raises:
      OSError: The file cannot be created.
    """

    def __init__(
        self, path: Path, tiers: Sequence[object], table: Mapping[int, Sequence[float]]
    ) -> None:
        self._path = path
        self._file: IO[str] | None = path.open("w", encoding="utf-8", buffering=BUFFER_BYTES)
        seconds = {str(batch): list(each) for batch, each in table.items()}
        self._write({"tiers": list(map(str, tiers)), "seconds": seconds})

    def step(
        self,
        batch: int,
        tier: int,
        rows: ScheduledRows,
        result: StepResult,
        hopes: Sequence[float],
        seconds: float | None,
    ) -> None:
        """Writes a decode step.

        Args:
          batch, tier: Its batch bucket, and the index of its tier.
          rows, result: Rows and result of the step.
          hopes: Per row, the expected accepted draft tokens if all candidates were verified.
          seconds: Time of the step; None if unknown.
        """
        count = len(rows.requests)
        self._write(
            {
                "time": round(time.time(), 4),
                "batch": batch,
                "tier": tier,
                "requests": [request.request_id for request in rows.requests],
                "drafted": (result.num_nodes[:count] - 1).tolist(),
                "accepted": (result.counts[:count] - 1).tolist(),  # -1 for a failed row
                "evidence": [round(hope, 3) for hope in hopes],
                "seconds": seconds,
            }
        )

    def flush(self) -> None:
        """Flushes the file's buffer."""
        self._guard(lambda file: file.flush())

    def _write(self, line: dict[str, Any]) -> None:
        self._guard(lambda file: file.write(json.dumps(line, separators=(",", ":")) + "\n"))

    def _guard(self, action: Callable[[IO[str]], Any]) -> None:
        try:
            if self._file is not None:
                action(self._file)
        except OSError as error:
            self._file = None  # its buffer cannot be flushed either
            message = (
                f"cannot write the trace {self._path}: {error.strerror}; tracing ends, serving "
                "continues"
            )
            print(message, file=sys.stderr, flush=True)
