"""Replicas as a deployment of Ray Serve (`--replica-launcher ray`).

Ray Serve starts, restarts, scales and drains replicas, and carries no requests. A replica owns the
process of one complete server and publishes its URL in an actor, from which the router reads it.
Nothing remains when the deployment ends: the actor ends with the replica that created it, and
another replica creates it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from shared import children
from shared.cluster.connecting import connection_fault
from shared.cluster.server_process import ServerProcess, reserve_port
from shared.options.command_line import parse, words_of
from shared.options.flags import ConfigError
from shared.options.options import Options

ray: Any = import_module("ray")
ray_util: Any = import_module("ray.util")
serve: Any = import_module("ray.serve")

APPLICATION = "tandem"
REGISTRY = "tandem-replicas"
SERVE = "serve"
"""Namespace of the actors of Ray Serve."""

FLAG = "--replica-launcher ray"
HEALTH_S = 2.0
"""Seconds between two health checks of Ray Serve; each publishes the URL again."""

EXPIRY_S = 5 * HEALTH_S
ANSWER_S = 5.0
LOOK_S = 0.2
END_S = 5.0
"""Seconds that a server may need to end after its graceful shutdown timeout."""

ROUTER_FLAGS = ("admin_host", "admin_port", "allowed_hosts", "allowed_origins")
EXIT_LOST = 1


class _Registry:
    """Actor with the URLs of all replicas."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def publish(self, url: str) -> None:
        """Records that a replica is alive."""
        self._seen[url] = time.monotonic()

    def remove(self, url: str) -> None:
        """Removes a replica that ends."""
        self._seen.pop(url, None)

    def urls(self) -> list[str]:
        """Returns the URLs of replicas that were alive within the last `EXPIRY_S`."""
        since = time.monotonic() - EXPIRY_S
        return sorted(url for url, seen in self._seen.items() if seen > since)


def _registry() -> Any:
    actor = ray.remote(_Registry).options(
        name=REGISTRY,
        namespace=APPLICATION,
        get_if_exists=True,
        num_cpus=0,
        runtime_env={"env_vars": {"PYTHONPATH": str(children.FOLDER)}},
    )
    return actor.remote()


class ServerReplica:
    """Replica of the deployment: owns one server process.

    Args:
      module: Module with the command line of a server, such as `torch_impl.serve`.
      words: Command line of the server, without listeners.
    """

    def __init__(self, module: str, words: Sequence[str]) -> None:
        options = parse(words)
        host = ray_util.get_node_ip_address()
        self._port = reserve_port(host)
        number = self._port.getsockname()[1]
        self._url, key = f"http://{host}:{number}", options.server.api_key
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._end_s = options.server.graceful_shutdown_timeout + END_S
        none = dict.fromkeys(ROUTER_FLAGS)
        flags = words_of(options, **none, host=host, port=number, replicas=1)
        self._process = ServerProcess(module, flags, {})
        while not self._is_up("/health", LOOK_S * 5):
            if (how := self._process.ending()) is not None:
                raise RuntimeError(f"the server {how}; its log has the reason")
            time.sleep(LOOK_S)
        self._registry = _registry()
        ray.get(self._registry.publish.remote(self._url), timeout=ANSWER_S)
        threading.Thread(target=self._end_with_server, daemon=True).start()

    def check_health(self) -> None:
        """Called by Ray Serve: raises an exception if the server does not respond."""
        if not self._is_up("/live", ANSWER_S):
            raise RuntimeError(f"the server at {self._url} does not respond")
        try:
            ray.get(self._registry.publish.remote(self._url), timeout=ANSWER_S)
        except ray.exceptions.RayError:
            self._registry = _registry()  # its owner has ended; the next check publishes

    def __del__(self) -> None:
        """Called by Ray Serve at the end of the replica: drains the server."""
        process, self._process = getattr(self, "_process", None), None
        if process is None:
            return
        with contextlib.suppress(Exception):
            ray.get(self._registry.remove.remote(self._url), timeout=ANSWER_S)
        process.stop(self._end_s)
        self._port.close()

    def _end_with_server(self) -> None:
        """Ends this replica when its server has ended, so that Ray Serve starts another one."""
        while (process := self._process) is not None:
            if process.ending() is not None:
                process.kill()
                os._exit(EXIT_LOST)
            time.sleep(LOOK_S)

    def _is_up(self, path: str, timeout_s: float) -> bool:
        request = urllib.request.Request(self._url + path, headers=self._headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=timeout_s):  # noqa: S310 - an own URL
                return True
        except (OSError, urllib.error.URLError):
            return False


def application(module: str, options: Options, num_gpus: int | None) -> Any:
    """Returns the application of Ray Serve.

    Args:
      module: Module with the command line of a server.
      options: Options of the router and of the servers.
      num_gpus: GPUs of each replica, which are reserved in one bundle on one node; None:
        `--tp-size`, or 0 in a cluster without GPUs.
    """
    if num_gpus is None:
        num_gpus = options.ranks.tp_size if ray.cluster_resources().get("GPU") else 0
    resources = {"CPU": 1.0, **({"GPU": float(num_gpus)} if num_gpus else {})}
    deployment = serve.deployment(
        name=ServerReplica.__name__,
        num_replicas=options.router.replicas,
        placement_group_bundles=[resources],
        placement_group_strategy="STRICT_PACK",
        ray_actor_options={
            "num_cpus": 1.0,
            "num_gpus": num_gpus,
            "runtime_env": {"env_vars": {"PYTHONPATH": str(children.FOLDER)}},
        },
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=2 * ANSWER_S,
        graceful_shutdown_wait_loop_s=LOOK_S,
        graceful_shutdown_timeout_s=options.server.graceful_shutdown_timeout + 2 * END_S,
    )(ServerReplica)
    words = words_of(options, replicas=None, replica_launcher=None)
    return deployment.bind(module, words)


class RunningReplicas:
    """Replicas of a deployed application; see `shared.router.service.ReplicaSource`.

    Raises:
      ConfigError: No Ray runs here.
    """

    def __init__(self) -> None:
        self._is_own = not ray.is_initialized()
        self._calls: set[asyncio.Task[Any]] = set()
        try:
            if self._is_own:
                ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise ConfigError(connection_fault(error, FLAG)) from error

    async def run(self, replicas: Any, routes: Any) -> None:
        """See `ReplicaSource`: reads the URLs every second.

        A URL remains for `EXPIRY_S`, because a new actor has no URLs at first. Health checks find
        replicas that have ended meanwhile.
        """
        seen: dict[str, float] = {}
        while True:
            urls, now = await self._in_thread(_published), time.monotonic()
            seen |= dict.fromkeys(urls, now)
            seen = {url: at for url, at in seen.items() if at > now - EXPIRY_S}
            replicas.set_urls(seen.keys())
            await asyncio.sleep(HEALTH_S / 2)

    async def stop(self, at_once: bool) -> None:
        """See `ReplicaSource`; the deployment continues."""
        if self._calls:
            await asyncio.wait(self._calls)  # a later call would connect to Ray again
        if self._is_own:
            await asyncio.to_thread(ray.shutdown)

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        """Returns the result of a call that blocks; a cancelled one ends before `stop` returns."""
        task = asyncio.create_task(asyncio.to_thread(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await asyncio.shield(task)


class DeployedReplicas(RunningReplicas):
    """Replicas of an application that this process deploys, and deletes at its end."""

    def __init__(self, module: str, options: Options) -> None:
        super().__init__()
        self._application = application(module, options, None)
        names = ray_util.list_named_actors(all_namespaces=True)
        self._starts_serve = all(each["namespace"] != SERVE for each in names)

    async def run(self, replicas: Any, routes: Any) -> None:
        """See `ReplicaSource`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._in_thread(self._deploy))
            group.create_task(super().run(replicas, routes))

    async def stop(self, at_once: bool) -> None:
        """See `ReplicaSource`; Ray Serve drains the servers."""
        end = serve.shutdown if self._starts_serve else partial(serve.delete, APPLICATION)
        await asyncio.to_thread(end)
        await super().stop(at_once)

    def _deploy(self) -> None:
        """Deploys the application, and returns when all replicas are ready."""
        serve.start(proxy_location="Disabled")
        serve.run(self._application, name=APPLICATION, route_prefix=None, blocking=False)


def _published() -> list[str]:
    """Returns the published URLs; none if the actor does not exist or does not answer in time."""
    try:
        actor = ray.get_actor(REGISTRY, namespace=APPLICATION)
        return ray.get(actor.urls.remote(), timeout=ANSWER_S)
    except (ValueError, ray.exceptions.RayError):
        return []
