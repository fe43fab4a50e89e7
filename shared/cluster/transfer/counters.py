"""Counters of transferred records for `/metrics`; any thread may count."""

from __future__ import annotations

import threading
from collections import defaultdict


class TransferCounters:
    """Records, bytes and seconds by direction and backend, and failures by reason."""

    def __init__(self) -> None:
        self._lock, self._values = threading.Lock(), defaultdict[str, float](float)

    def sent(self, backend: str, num_bytes: int, seconds: float) -> None:
        """Counts a record that another server has fetched."""
        self._transferred("sent", backend, num_bytes, seconds)

    def received(self, backend: str, num_bytes: int, seconds: float) -> None:
        """Counts a record that was fetched from another server."""
        self._transferred("received", backend, num_bytes, seconds)

    def fail(self, reason: str) -> None:
        """Counts a failure."""
        self.add(f'kv_transfer_failures_total{{reason="{reason}"}}', 1)

    def add(self, name: str, count: float) -> None:
        """Adds to a counter, by its name with labels."""
        with self._lock:
            self._values[name] += count

    def snapshot(self) -> dict[str, float]:
        """Returns the values by name."""
        with self._lock:
            return dict(self._values)

    def _transferred(self, direction: str, backend: str, num_bytes: int, seconds: float) -> None:
        labels = f'{{direction="{direction}",backend="{backend}"}}'
        self.add(f"kv_transfer_records_total{labels}", 1)
        self.add(f"kv_transfer_bytes_total{labels}", num_bytes)
        self.add(f"kv_transfer_seconds_total{labels}", seconds)
