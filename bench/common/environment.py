"""Environment of a bench: versions, source revision, and checks against hidden waits."""

import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from shared.revision import git


@cache
def provenance() -> dict[str, str | None]:
    """Returns the revision of the sources and the date, for result files.

    The revision is None outside a git checkout, and ends with `+` if tracked files have changes.
    """
    revision = git("rev-parse", "--short=7", "HEAD")
    if revision and git("status", "--porcelain", "--untracked-files=no", "--", ":!bench/results"):
        revision += "+"
    return {"revision": revision or None, "date": datetime.now(UTC).date().isoformat()}


def write_results(path: Path, found: dict[str, Any]) -> None:
    """Writes a result file with the revision and the date of the measurement."""
    text = json.dumps({**provenance(), **found}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def versions(framework: str, device: str) -> dict[str, str]:
    """Returns versions and the device name; imports only the measured framework."""
    found = {"python": platform.python_version(), "numpy": np.__version__}
    module = import_module(framework)
    if framework == "jax":
        return found | {"jax": module.__version__, "device": module.devices()[0].device_kind}
    name = module.cuda.get_device_name() if device == "cuda" else platform.processor()
    return found | {"torch": module.__version__, "device": name}


@contextmanager
def nothing_waits(framework: str, on_gpu: bool) -> Iterator[None]:
    """Raises an error for every hidden wait or transfer of a step."""
    if framework == "jax":
        with import_module("jax").transfer_guard("disallow"):
            yield
    elif on_gpu:
        cuda = import_module("torch").cuda
        cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            cuda.set_sync_debug_mode("default")
    else:
        yield
