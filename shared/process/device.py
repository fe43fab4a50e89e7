"""Device of a server, and its free memory."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shared.options.flags import ConfigError

HIDDEN = ("", "none", "void", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs, in addition to negative numbers."""

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
"""Linux paths of the control group limits, and of the groups of this process."""


@dataclass(frozen=True)
class Device:
    """Device that runs the model.

    Attributes:
      kind: "cpu" or "gpu".
      name: Name for messages.
      free_bytes: Memory that can be allocated.
    """

    kind: str
    name: str
    free_bytes: int

    @classmethod
    def cpu(cls) -> Self:
        """Returns the CPU with the free main memory, within the limits of the container."""
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        groups = OWN_CGROUPS.read_text(encoding="ascii") if OWN_CGROUPS.is_file() else ""
        return cls(
            "cpu", "CPU", min([_available_bytes() or pages, *cgroup_free_bytes(CGROUPS, groups)])
        )


def check_gpu_environment(environment: Mapping[str, str]) -> None:
    """Checks that the environment does not name a GPU when the server would run on the CPU.

    Raises:
      ConfigError: It names one, and no GPU is usable.
    """
    named = environment.get("CUDA_VISIBLE_DEVICES", "")
    first = named.partition(",")[0].strip()  # CUDA ignores entries after an invalid one
    if first not in HIDDEN and not first.startswith("-"):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={named} contains a GPU that is not available; correct "
            "it, or unset it to serve on the CPU"
        )


@dataclass(frozen=True)
class _Version:
    """File names of a version of control groups."""

    limit: str
    used: str
    reclaimable: str


_FIRST = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Version("memory.max", "memory.current", "inactive_file")


def cgroup_free_bytes(root: Path, groups: str) -> Iterator[int]:
    """Yields the free memory of each control group with a limit that contains this process.

    Args:
      root: Mount point of the groups.
      groups: Lines `number:controllers:group` of the process; parent groups apply too.
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
            if folder == mounted:  # in a container this is the group of the container
                break


def _free_in(folder: Path, version: _Version) -> Iterator[int]:
    try:
        limit, used, numbers = (
            (folder / name).read_text(encoding="ascii")
            for name in (version.limit, version.used, "memory.stat")
        )
    except OSError:
        return
    if not limit.strip().isdigit():  # "max" means no limit
        return
    # The page cache is reclaimable, so it counts as free.
    cached = dict(line.split() for line in numbers.splitlines()).get(version.reclaimable, "0")
    yield max(0, int(limit) - int(used) + int(cached))


def _available_bytes() -> int:
    """Returns Linux's estimate of memory available without swapping; 0 on other systems."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    available = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(available[0]) if available else 0
