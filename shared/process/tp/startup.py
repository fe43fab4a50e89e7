"""Start of one model on several ranks: all start together, and rank 0 waits for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from importlib import import_module

from shared.boundary.backend import Backend
from shared.options.flags import ConfigError, raise_fault
from shared.options.options import PARTS, Options
from shared.options.ranks import RAY
from shared.process.device import Device
from shared.process.model_check import check_early, check_model, with_whole_paths
from shared.process.start import Platform, ValidatedStartup, plan_start
from shared.process.tp.digest import digest_of
from shared.process.tp.driver_backend import DriverBackend
from shared.process.tp.launchers import (
    FOLLOWER,
    Launcher,
    LocalLauncher,
    gpu_of,
    gpus_on_host,
)
from shared.process.tp.plan_broadcast import PlanBroadcast, hosts_of
from shared.process.tp.worker_connection import boot
from shared.process.tp.workers import Workers

MORE_FREE = 1.1
"""Ratio of free memory between two ranks above which a note reports the unused memory."""

RESOLVED = ("speculative_algorithm", "speculative_draft_model_path", "grammar_backend")
"""Options that rank 0 resolves by files, and the other ranks take from it."""

Gauges = dict[str, Callable[[], float]]


class TPStartup:
    """Start of rank 0 and of all worker ranks.

    With one rank, or if one process has all devices, it is an ordinary start.

    Attributes:
      notes: Notes for the user about the ranks, filled by `prepare`.
    """

    def __init__(
        self,
        options: Options,
        find_platform: Callable[[], Platform],
        rank_module: str | None,
        on_failure: Callable[[str], None],
    ) -> None:
        """Checks flags and files, then starts the worker processes.

        They start concurrently with rank 0.

        Args:
          options: Options of the command line, with local models.
          find_platform, rank_module: See `shared.process.launch.launch`.
          on_failure: Called with the reason if a rank is lost, on a separate thread.

        Raises:
          ConfigError: A rank has no device.
          ValueError: See `shared.process.model_check.check_early`.
        """
        self._checked = check_early(options)
        self._options, self._find_platform = options, cache(find_platform)
        self._count = options.ranks.tp_size
        self.notes: list[str] = []
        self._shared: PlanBroadcast | None = None
        self._followers: Workers | None = None
        if options.ranks.distributed_executor_backend == RAY:
            raise_fault(_ray_fault(self._count, rank_module))
        if self._count > 1 and rank_module is not None:
            self._followers = Workers(_launcher(options), self._count, rank_module, on_failure)
            self._followers.send("options", _values(self._resolved()))

    def _resolved(self) -> Options:
        """Returns the options of all ranks; resolved if rank 0 has checked its files."""
        return self._checked.options if self._checked else with_whole_paths(self._options)

    def prepare(self) -> ValidatedStartup:
        """Same as `shared.process.start.prepare`, for all ranks.

        Raises:
          ValueError: A flag or a file is rejected, on any rank.
          RankError: A rank is lost.
        """
        followers, platform = self._followers, self._find_platform()
        if followers is None:
            return self._plan(replace(platform, find_device=self._shared_device))
        start = self._plan(replace(platform, find_device=self._min_device))
        followers.wait_until(lambda each: each.digest is not None, "done with its plan")
        digest = digest_of(start)
        for each in followers.ranks:
            if each.digest != digest:
                raise ConfigError(
                    f"{each.name} differs from rank 0 in its model, weights or programs; "
                    "give every host the same model folder and the same version of this "
                    "program"
                )
        self._shared = PlanBroadcast(followers, start.memory.capacity)
        return start.of_rank(self._shared.ranks)

    def _plan(self, platform: Platform) -> ValidatedStartup:
        checked = self._checked or check_model(self._options, platform.open_checkpoint)
        return plan_start(checked, platform)

    def load(self, start: ValidatedStartup, progress: Callable[[int], None]) -> Backend:
        """Same as `ValidatedStartup.load`, on all ranks; `progress` follows the slowest.

        Raises:
          RankError: A rank is lost.
        """
        followers, shared = self._followers, self._shared
        if followers is None or shared is None:
            return start.load(self._find_platform(), progress)
        own = reported = 0

        def report() -> None:
            nonlocal reported
            slowest = min(own, *(each.loaded for each in followers.ranks))
            if slowest > reported:
                progress(slowest - reported)
                reported = slowest

        def add(num_bytes: int) -> None:
            nonlocal own
            own += num_bytes
            followers.check()
            report()

        backend = start.load(self._find_platform(), add)
        followers.wait_until(lambda each: each.is_loaded, "done with loading", report)
        shared.opened()
        return DriverBackend(backend, followers, shared)

    @property
    def gauges(self) -> Gauges:
        """Gauges of the ranks on `/metrics`; empty with one rank."""
        if self._count == 1:
            return {}
        found: Gauges = {"tp_size": lambda: self._count}
        for each in self._followers.ranks if self._followers else ():
            label = f'{{rank="{each.rank}"}}'
            found[f"tp_rank_steps_total{label}"] = lambda each=each: each.ended
            found[f"tp_rank_startup_free_bytes{label}"] = lambda each=each: each.free_bytes
        return found

    def progress_report(self) -> str:
        """Describes the progress of the worker ranks; empty with one rank."""
        ranks = self._followers.ranks if self._followers else ()
        return "".join(f"; {each.name} has finished {each.ended} steps" for each in ranks)

    def kill(self) -> None:
        """Kills the worker ranks at once."""
        if self._followers is not None:
            self._followers.kill()

    def _shared_device(self) -> Device:
        """Returns the device with the free memory per rank of this process: a share of common
        memory, or the least of several devices.
        """
        platform = self._find_platform()
        found = platform.find_device()
        if found.kind == "cpu":
            return replace(found, free_bytes=found.free_bytes // self._count)
        each = platform.free_on_each(self._count) or [found.free_bytes]
        free = {f"rank {rank}": num_bytes for rank, num_bytes in enumerate(each)}
        return replace(found, free_bytes=self._least(free))

    def _min_device(self) -> Device:
        """Returns rank 0's device, with the free memory of the rank that has least."""
        followers, own = self._followers, self._find_platform().find_device()
        assert followers is not None, "this is asked where there are others"
        followers.wait_until(lambda each: each.device is not None, "done with finding its device")
        hosts = hosts_of(followers.ranks)
        free = {"rank 0": own.free_bytes // (hosts[boot()] if own.kind == "cpu" else 1)}
        for each in followers.ranks:
            assert each.device is not None
            host, kind, name, num_bytes = each.device
            if (kind, name) != (own.kind, own.name):
                raise ConfigError(
                    f"{each.name} has a {name} and rank 0 a {own.name}; ranks require "
                    "devices of one kind"
                )
            free[each.name] = each.free_bytes = num_bytes // (hosts[host] if kind == "cpu" else 1)
        free_bytes = self._least(free)
        followers.send("memory", free_bytes)
        return replace(own, free_bytes=free_bytes)

    def _least(self, free: Mapping[str, int]) -> int:
        """Returns the least free memory of all ranks; adds a note if a rank has far more."""
        least = min(free, key=lambda name: free[name])
        most = max(free, key=lambda name: free[name])
        if free[most] > MORE_FREE * free[least]:
            self.notes.append(
                f"{least} has {free[least]:,} bytes free and {most} {free[most]:,}: every "
                f"rank uses what fits on {least}"
            )
        return free[least]


@contextmanager
def tp_startup(
    options: Options,
    find_platform: Callable[[], Platform],
    rank_module: str | None,
    on_failure: Callable[[str], None],
) -> Iterator[TPStartup]:
    """Starts several ranks; their processes are killed on an error."""
    start = TPStartup(options, find_platform, rank_module, on_failure)
    try:
        yield start
    except BaseException:
        start.kill()
        raise


def _ray_fault(count: int, rank_module: str | None) -> str | None:
    """Returns the lack of worker ranks that Ray could place."""
    if rank_module is None:
        return (
            "--distributed-executor-backend ray is not supported by the JAX backend, "
            "whose ranks are devices of one process; remove the flag"
        )
    if count == 1:
        return (
            "--distributed-executor-backend ray requires --tp-size above 1; set it, "
            "or remove the flag"
        )
    return None


def _launcher(options: Options) -> Launcher:
    if options.ranks.distributed_executor_backend != RAY:
        return LocalLauncher()
    raise_fault(options.ranks.launcher_fault())
    module = import_module("shared.cluster.ray_launcher")  # imports Ray
    gpu = gpu_of(os.environ, gpus_on_host(), 0)
    return module.RayLauncher(options.ranks.tp_size, FOLLOWER, gpu is not None)


def _values(options: Options) -> dict[str, object]:
    """Returns the set and the resolved options by name, for `Options.from_values` in another
    process.
    """
    flags: dict[str, object] = {}
    for part in PARTS:
        flags |= asdict(getattr(options, part))
    return {name: flags[name] for name in options.explicit_flags.union(RESOLVED)}
