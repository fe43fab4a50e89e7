"""Entry of the memory plan."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryPlanEntry:
    """One part of the plan."""

    name: str
    detail: str
    num_bytes: int
