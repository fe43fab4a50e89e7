"""Works of `bench.common.staggered_processes` that note what they do, or fail."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def noted(wait: Callable[[], None], log: Path, name: str, fault: str = "") -> Iterator[str]:
    """Notes when it is ready, and when it begins and ends its turn.

    Args:
      fault: "refused" or "late" before it is ready, "refused then" or "ended" in its turn.
    """

    def note(what: str) -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{what} {name}\n")

    if fault == "late":
        time.sleep(60)
    if fault == "refused":
        raise ValueError(f"{name} is too large")
    note("ready")
    wait()
    note("begin")
    yield f"{name} one"
    if fault == "ended":
        os._exit(3)
    if fault == "refused then":
        raise KeyError(name)
    yield f"{name} two"
    note("end")
