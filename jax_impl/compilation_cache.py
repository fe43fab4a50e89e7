"""Persistent compilation cache for step programs.

XLA's own cache requires tracing and lowering before a hit, which takes seconds per program and
dominates startup. Here the key is a hash of the sources of this project, the versions, flags and
devices of JAX, and the configuration of the backend.
"""

import os
import platform
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.stages import Compiled
from jax.tree_util import PyTreeDef
from jaxlib.version import __version__ as jaxlib_version

from shared.boundary.program import Program
from shared.process.logs import log

ROOT = Path(__file__).parent.parent
SOURCES = ("jax_impl", "kernels", "shared")
"""Packages that determine the programs; they include the tile configs, which are data files."""
MOST_FILES = 512
"""Maximum number of stored programs; the least recently used are deleted first."""


class CompilationCache:
    """Compilation cache of one backend.

    Args:
      folder: Cache folder, shared with other backends; it need not exist.
      devices: Devices on which the programs run, all of one kind.
      made_from: Everything besides the sources that determines the programs, as text.
      takes, gives: Tree structures of a program's arguments and of its results.
    """

    def __init__(
        self,
        folder: Path,
        devices: Sequence[jax.Device],
        made_from: Sequence[object],
        takes: PyTreeDef,
        gives: PyTreeDef,
    ) -> None:
        self._folder, self._devices = folder, list(devices)
        self._takes, self._gives = takes, gives
        environment = _environment(devices[0])
        self._key = sha256(repr([len(devices), *environment, *made_from]).encode())

    def find_all(self, programs: Sequence[Program], pool: Executor) -> dict[Program, Compiled]:
        """Returns the programs that are stored, and logs how many must be compiled."""
        found = zip(programs, pool.map(self.find, programs), strict=True)
        ready = {program: each for program, each in found if each is not None}
        if missing := len(programs) - len(ready):
            log.info(
                "Compiling %d of %d programs; later starts load them from %s",
                missing,
                len(programs),
                self._folder,
            )
        return ready

    def find(self, program: object) -> Compiled | None:
        """Returns a cached program, ready to run, or None if there is no readable one."""
        path = self._path(program)
        try:
            kept = path.read_bytes()
        except OSError:
            return None
        with suppress(OSError):  # the folder may be read-only
            os.utime(path)
        try:
            return deserialize_and_load(
                kept,
                self._takes,
                self._gives,
                backend=self._devices[0].client,
                execution_devices=self._devices,
            )
        except Exception as error:  # any kind: the program is recompiled
            log.warning("%s is not a valid compiled program; compiling it again: %s", path, error)
            return None

    def keep(self, program: object, compiled: Compiled) -> None:
        """Writes a compiled program atomically."""
        path = self._path(program)
        begun = path.with_suffix(f".{os.getpid()}")
        try:
            kept, *_ = serialize(compiled)
            path.parent.mkdir(parents=True, exist_ok=True)
            begun.write_bytes(kept)
            begun.replace(path)
        except (OSError, ValueError, NotImplementedError) as error:
            with suppress(OSError):
                begun.unlink()
            reason = error.strerror if isinstance(error, OSError) else error
            log.warning(
                "%s cannot store a compiled program; later starts compile it again: %s",
                self._folder,
                reason,
            )

    def drop_old(self) -> None:
        """Deletes the least recently used files beyond `MOST_FILES`.

        Other processes may do the same concurrently.
        """
        last_used = {}
        for path in self._folder.glob("*.bin"):
            with suppress(OSError):
                last_used[path] = path.stat().st_mtime
        for path in sorted(last_used, key=lambda path: -last_used[path])[MOST_FILES:]:
            with suppress(OSError):
                path.unlink()

    def _path(self, program: object) -> Path:
        key = self._key.copy()
        key.update(repr(program).encode())
        return self._folder / f"{key.hexdigest()}.bin"


def _environment(device: jax.Device) -> list[object]:
    """Returns the properties of the environment that affect compilation."""
    versions = (jax.__version__, jaxlib_version, device.client.platform_version)
    processor = _processor() if device.platform == "cpu" else None
    flags = sorted(jax.config.values.items()), os.environ.get("XLA_FLAGS")
    return [*versions, device.device_kind, processor, *flags, _digest_of_sources()]


def _processor() -> str:
    """Returns the CPU model and its instruction sets, as reported by the system."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    wanted = ("model name", "flags", "Features")
    return " ".join([platform.processor(), *sorted({x for x in lines if x.startswith(wanted)})])


def _digest_of_sources() -> str:
    digest = sha256()
    for package in SOURCES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()
