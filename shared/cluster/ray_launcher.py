"""Launcher that starts ranks on the hosts of a running Ray cluster.

Ray reserves a placement group with a bundle for every rank and starts an actor in each bundle. The
actor starts the process of its rank, which connects to the engine process. Ray reports how a rank
has ended and is not in the path of a step. When an actor ends, Linux ends the process of its rank;
when the engine process ends, Ray ends the actors.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from shared import children
from shared.cluster.connecting import connection_fault
from shared.cluster.rank_connection import accept_rank_connection
from shared.options.flags import ConfigError

ray: Any = import_module("ray")
ray_util: Any = import_module("ray.util")
scheduling: Any = import_module("ray.util.scheduling_strategies")

ROOM_S = 60.0
"""Limit of the time in which Ray reserves resources and starts actors."""

ANSWER_S = 2.0
GPUS = "CUDA_VISIBLE_DEVICES"
FLAG = "--distributed-executor-backend ray"


class _Place:
    """Actor that starts a rank. Calls run on its main thread, so the rank ends with the actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def where(self) -> tuple[str, str]:
        """Returns the name of its host, and the GPUs that Ray has assigned to it."""
        node = ray.get_runtime_context().get_node_id()
        return f"{socket.gethostname()} (Ray's node {node[:8]})", os.environ.get(GPUS, "")

    def start(self, words: Sequence[str], folder: str, secret: str) -> None:
        """Starts a process and sends the secret to its standard input: process lists lack it."""
        self._process = subprocess.Popen(
            [sys.executable, *words], cwd=folder, stdin=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(f"{secret}\n".encode())
        self._process.stdin.close()

    def state(self) -> tuple[int | None, str]:
        """Returns the exit code of the process, None while it runs, and its Linux state letter."""
        process = self._process
        if process is None or process.poll() is not None:
            return None if process is None else process.returncode, ""
        text = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii")
        return None, text.rsplit(")", 1)[1].split()[0]


class RayLauncher:
    """Starts ranks on the hosts of a running Ray; see `shared.process.tp.launchers.Launcher`."""

    def __init__(self, count: int, follower: str, with_gpus: bool) -> None:
        """Reserves resources for all ranks; rank 0 is this process.

        Args:
          count: Number of ranks.
          follower: Module that the process of a rank runs.
          with_gpus: Each rank needs a GPU.

        Raises:
          ConfigError: No Ray runs here, or it lacks resources.
        """
        self._follower, self._is_own = follower, not ray.is_initialized()
        self._connect()
        self.address: str = ray_util.get_node_ip_address()
        self._group: Any = None
        try:
            self._reserve(count, with_gpus)
        except BaseException:
            self.close()
            raise

    def start(self, rank: int, count: int, module: str) -> tuple[socket.socket, RayProcess]:
        """See `shared.process.tp.launchers.Launcher`."""
        actor, secret = self._actors[rank], secrets.token_hex(16)
        try:
            host, _ = ray.get(actor.where.remote(), timeout=ROOM_S)
            with socket.create_server((self.address, 0)) as listener:
                address = ":".join(map(str, listener.getsockname()[:2]))
                words = ["-m", self._follower, module, str(rank), str(count), "--connect", address]
                ray.get(actor.start.remote(words, str(children.FOLDER), secret), timeout=ROOM_S)
                process = RayProcess(actor, host)
                connection = accept_rank_connection(
                    listener, secret.encode(), host, lambda: process.ending(0.0)
                )
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection, process
        except ray.exceptions.RayError as error:
            raise ConfigError(
                f"--distributed-executor-backend ray could not start rank {rank} (every host "
                f"needs this program in {children.FOLDER} and its packages): "
                f"{str(error).strip().splitlines()[-1]}"
            ) from error

    def close(self) -> None:
        """See `shared.process.tp.launchers.Launcher`."""
        if self._group is not None:
            ray_util.remove_placement_group(self._group)
            self._group = None
        if self._is_own and ray.is_initialized():
            ray.shutdown()

    def _connect(self) -> None:
        try:
            if self._is_own:
                ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise ConfigError(connection_fault(error, FLAG)) from error

    def _reserve(self, count: int, with_gpus: bool) -> None:
        each = {"CPU": 1.0, **({"GPU": 1.0} if with_gpus else {})}
        bundles = [dict(each) for _ in range(count)]
        bundles[0][f"node:{self.address}"] = 0.001  # rank 0 is this process
        self._group = ray_util.placement_group(bundles, strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=ROOM_S)
        except ray.exceptions.GetTimeoutError as error:
            what = "a CPU and a GPU" if with_gpus else "a CPU"
            raise ConfigError(
                f"--distributed-executor-backend ray: Ray reserved no resources for {count} "
                f"ranks within {ROOM_S:g} s; each rank needs {what}; lower --tp-size or add hosts"
            ) from error
        self._actors = [self._actor(rank, with_gpus) for rank in range(count)]
        if with_gpus:
            os.environ[GPUS] = ray.get(self._actors[0].where.remote(), timeout=ROOM_S)[1]

    def _actor(self, rank: int, with_gpus: bool) -> Any:
        strategy = scheduling.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=rank
        )
        made = ray.remote(_Place).options(
            num_cpus=1,
            num_gpus=int(with_gpus),
            max_restarts=0,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": {"PYTHONPATH": str(children.FOLDER)}},
        )
        return made.remote()


class RayProcess:
    """Process of a rank, with its actor; see `shared.process.tp.launchers.WorkerProcess`."""

    def __init__(self, actor: Any, host: str) -> None:
        self.host = host
        self._actor, self._letter, self._pending = actor, "", None

    def ending(self, timeout_s: float) -> str | None:
        """See `shared.process.tp.launchers.WorkerProcess`."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                code, _ = ray.get(self._actor.state.remote(), timeout=ANSWER_S)
            except ray.exceptions.GetTimeoutError:
                return None
            except ray.exceptions.RayError:
                return "was lost with its Ray actor"
            if code is not None:
                by = f"was ended by {signal.Signals(-code).name}" if code < 0 else ""
                return by or f"exited with code {code}"
            if time.monotonic() >= until:
                return None
            time.sleep(0.05)

    def is_stopped(self) -> bool:
        """See `shared.process.tp.launchers.WorkerProcess`; returns the last known state."""
        if self._pending is not None and ray.wait([self._pending], timeout=0)[0]:
            try:
                self._letter = ray.get(self._pending)[1]
            except ray.exceptions.RayError:
                self._letter = ""  # the end of its socket reports its end
            self._pending = None
        if self._pending is None:
            self._pending = self._actor.state.remote()
        return self._letter in ("T", "t")

    def kill(self) -> None:
        """See `shared.process.tp.launchers.WorkerProcess`."""
        ray.kill(self._actor)
