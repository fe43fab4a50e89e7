"""Replicas as child processes of the router (`--replica-launcher local`)."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence

from shared.cluster.server_process import ServerProcess, reserve_port
from shared.options.command_line import words_of
from shared.options.flags import ConfigError
from shared.options.options import Options
from shared.process import logs
from shared.process.address import LOOPBACK
from shared.process.logs import log
from shared.process.tp.launchers import GPUS, gpu_of, gpus_on_host
from shared.router.aggregation import AggregateRoutes
from shared.router.replicas import Replica, Replicas, ReplicaState

LOOK_S = 0.1
HUNG_S = 5.0
"""Seconds after which a server that is down and has not ended is killed."""

END_S = 10.0
"""Seconds for an idle server to end."""

FIRST_DELAY_S, MAX_DELAY_S = 1.0, 30.0
EXIT_REFUSED = 2

ROUTER_FLAGS = ("admin_host", "admin_port", "allowed_hosts", "allowed_origins")
"""Options of listeners that only the router has."""


class RefusedError(Exception):
    """A server does not accept its configuration; it has printed the reason."""


class LocalReplicas:
    """Servers as child processes on ports of the loopback interface.

    A server that ends is started again: at once if it was ready, else after a delay that doubles.

    Args:
      module: Module with the command line of a server.
      options: Options of the router and of the servers.

    Raises:
      ConfigError: There are too few GPUs.
    """

    def __init__(self, module: str, options: Options) -> None:
        count, self._module = options.router.replicas, module
        gpus = gpus_of_replicas(os.environ, gpus_on_host(), count, options.ranks.tp_size)
        self._environments = [{} if names is None else {GPUS: names} for names in gpus]
        self._ports = [reserve_port(LOOPBACK) for _ in range(count)]
        self._words = [_words(options, port) for port in self._ports]
        self.urls = [f"http://{LOOPBACK}:{port.getsockname()[1]}" for port in self._ports]
        self._processes: dict[int, ServerProcess] = {}

    async def run(self, replicas: Replicas, routes: AggregateRoutes) -> None:
        """Starts all servers and keeps them running.

        Raises:
          RefusedError: A server does not accept its configuration, and none was ever ready.
        """
        replicas.set_urls(self.urls)
        found = {each.pool.url: each for each in replicas}
        async with asyncio.TaskGroup() as group:
            for place, url in enumerate(self.urls):
                group.create_task(self._keep(place, found[url], replicas, routes))

    async def stop(self, at_once: bool) -> None:
        """Ends all servers; the task of `run` is cancelled before."""
        for process in self._processes.values():
            process.signal(signal.SIGINT if at_once else signal.SIGTERM)
        until = time.monotonic() + END_S
        while time.monotonic() < until and any(p.ending() is None for p in self._running):
            await asyncio.sleep(LOOK_S)
        for process in self._running:
            process.kill()
        for port in self._ports:
            port.close()

    @property
    def _running(self) -> list[ServerProcess]:
        return [*self._processes.values()]

    async def _keep(
        self, place: int, replica: Replica, replicas: Replicas, routes: AggregateRoutes
    ) -> None:
        delay, has_served = 0.0, False
        while True:
            process = ServerProcess(self._module, self._words[place], self._environments[place])
            self._processes[place] = process
            was_ready = await _end_of(process, replica)
            has_served |= was_ready
            process.kill()  # the rest of its group, which may still hold the port
            reason = f"its process {process.ending()}"
            if process.exit_code == EXIT_REFUSED and not has_served:
                raise RefusedError(reason)
            replicas.mark_down(replica, reason)
            delay = 0.0 if was_ready else min(MAX_DELAY_S, max(FIRST_DELAY_S, 2 * delay))
            log.warning("replica %s: %s; it starts again in %g s", replica.name, reason, delay)
            routes.num_restarts += 1
            await asyncio.sleep(delay)


async def _end_of(process: ServerProcess, replica: Replica) -> bool:
    """Waits for the end of a server, and kills one that hangs; returns True if it was ready."""
    was_ready, down_since = False, math.inf
    while process.ending() is None:
        await asyncio.sleep(LOOK_S)
        if replica.state is ReplicaState.READY:
            was_ready = True
        if not was_ready or replica.state is not ReplicaState.DOWN:
            down_since = math.inf
        elif time.monotonic() - (down_since := min(down_since, time.monotonic())) > HUNG_S:
            logs.info(f"replica {replica.name} does not respond; killing it")
            process.kill()
    return was_ready


def gpus_of_replicas(
    environment: Mapping[str, str], on_host: int, count: int, tp_size: int
) -> Sequence[str | None]:
    """Returns CUDA_VISIBLE_DEVICES of each replica; None on a host without usable GPUs.

    Args:
      environment: Environment of the router.
      on_host: Number of GPUs of this host.
      count, tp_size: Number of replicas, and of GPUs of each.

    Raises:
      ConfigError: There are fewer GPUs than the replicas need.
    """
    try:
        gpus = [gpu_of(environment, on_host, index) for index in range(count * tp_size)]
    except ConfigError as error:
        raise ConfigError(
            f"--replicas {count} with --tp-size {tp_size} requires {count * tp_size} GPUs, and "
            "fewer are available; lower one of them"
        ) from error
    of_each = [gpus[place : place + tp_size] for place in range(0, len(gpus), tp_size)]
    return [None if None in names else ",".join(map(str, names)) for names in of_each]


def _words(options: Options, port: socket.socket) -> list[str]:
    """Returns the command line of a server."""
    none = dict.fromkeys(ROUTER_FLAGS)
    number = port.getsockname()[1]
    return words_of(options, **none, host=LOOPBACK, port=number, replicas=1)
