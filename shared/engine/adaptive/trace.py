"""A line for each decode step: what was chosen, and what came of it.

The first line of a file names the tiers and what their steps cost at the start. Lines are written
when results arrive, while the device runs the next step, into the file's buffer. Where a line
cannot be written, as on a full disk, the trace says so and ends; serving goes on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from shared.boundary.backend import StepResult
from shared.engine.rows import Rows

BUFFER_BYTES = 1 << 16


class Trace:
    """Writes down the steps of a controller.

    Args:
      path: The file; what it holds is replaced.
      tiers: Names of the tiers, off first.
      table: Seconds of a step at the start for each batch bucket, by tier.

    Raises:
      OSError: The file cannot be made.
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
        rows: Rows,
        result: StepResult,
        hopes: Sequence[float],
        seconds: float | None,
    ) -> None:
        """Writes a decode step.

        Args:
          batch, tier: Its batch bucket, and the number of its tier.
          hopes: The evidence: for each row, the drafts that were expected to be accepted if all
            that could be were verified.
          seconds: That it took; None where that is not known.
        """
        count = len(rows.requests)
        self._write(
            {
                "time": round(time.time(), 4),
                "batch": batch,
                "tier": tier,
                "requests": [request.request_id for request in rows.requests],
                "drafted": (result.num_nodes[:count] - 1).tolist(),
                "accepted": (result.counts[:count] - 1).tolist(),  # -1 of a row that failed
                "evidence": [round(hope, 3) for hope in hopes],
                "seconds": seconds,
            }
        )

    def flush(self) -> None:
        """Writes what is left in the buffer."""
        self._guard(lambda file: file.flush())

    def _write(self, line: dict[str, Any]) -> None:
        self._guard(lambda file: file.write(json.dumps(line, separators=(",", ":")) + "\n"))

    def _guard(self, action: Callable[[IO[str]], Any]) -> None:
        try:
            if self._file is not None:
                action(self._file)
        except OSError as error:
            self._file = None  # its buffer cannot be written either
            message = f"the trace {self._path} ends here: {error.strerror}; serving goes on"
            print(message, file=sys.stderr, flush=True)
