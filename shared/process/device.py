"""Where a model runs, and how much memory is free there."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shared.options.flags import ConfigError

HIDDEN = ("", "none", "void", "NoDevFiles")
"""What CUDA_VISIBLE_DEVICES may say to hide every GPU, beside a number below 0."""

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
"""Where Linux shows the limits of control groups, and which groups a process is in."""


@dataclass(frozen=True)
class Device:
    """Where the model runs.

    Attributes:
      kind: "cpu" or "gpu".
      name: For the reader.
      free_bytes: Memory that can be allocated.
    """

    kind: str
    name: str
    free_bytes: int

    @classmethod
    def cpu(cls) -> Self:
        """This machine's processor and main memory, or what its container may have of it."""
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        groups = OWN_CGROUPS.read_text(encoding="ascii") if OWN_CGROUPS.is_file() else ""
        return cls(
            "cpu", "CPU", min([_available_bytes() or pages, *free_in_groups(CGROUPS, groups)])
        )


def check_no_gpu_is_named(environment: Mapping[str, str]) -> None:
    """Refuses to serve on the processor where the environment names a GPU.

    Raises:
      ConfigError: It does, and no GPU can be used.
    """
    named = environment.get("CUDA_VISIBLE_DEVICES", "")
    first = named.partition(",")[0].strip()  # CUDA reads no further than to what is not there
    if first not in HIDDEN and not first.startswith("-"):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={named} contains a GPU that is not available; correct "
            "it, or unset it to serve on the CPU"
        )


@dataclass(frozen=True)
class _Version:
    """Names of the files of a version of control groups."""

    limit: str
    used: str
    reclaimable: str


_FIRST = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Version("memory.max", "memory.current", "inactive_file")


def free_in_groups(root: Path, groups: str) -> Iterator[int]:
    """What each control group around this process leaves free; nothing of those without a limit.

    Args:
      root: Where the groups are mounted.
      groups: Lines `number:controllers:group` of the process; parent groups limit it too.
    """
    for line in groups.splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mounted, version = root, _SECOND
        elif controllers == "memory":
            mounted, version = root / "memory", _FIRST
        else:
            continue
        inner = mounted / group.strip("/")
        for folder in (inner, *inner.parents):
            yield from _free_in(folder, version)
            if folder == mounted:  # in a container this is the container's own group
                break


def _free_in(folder: Path, version: _Version) -> Iterator[int]:
    try:
        limit, used, numbers = (
            (folder / name).read_text(encoding="ascii")
            for name in (version.limit, version.used, "memory.stat")
        )
    except OSError:
        return
    if not limit.strip().isdigit():  # "max" is no limit
        return
    # Files that were read stay in memory until it is needed: they count as free.
    cached = dict(line.split() for line in numbers.splitlines()).get(version.reclaimable, "0")
    yield max(0, int(limit) - int(used) + int(cached))


def _available_bytes() -> int:
    """Linux's estimate of memory that can be had without swapping; 0 elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(available[0]) if available else 0
