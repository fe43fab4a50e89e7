"""Ray executor on two simulated hosts: placement, equal output, shutdown without leftovers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.process.tp.startup import tp_startup
from tests.support import serve_tp
from tests.support.http_fixtures import ROOT, Server, serving
from tests.support.tp_server import ended

NEEDS_RAY = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: it is the extra ray"
)
FLAGS = ["--model-path", str(ROOT / "models" / "random"), "--port", "0", "--page-size", "64"]
FLAGS += ["--context-length", "256", "--max-running-requests", "2", "--max-total-tokens", "1024"]
BY_RAY = ["--tp-size", "2", "--distributed-executor-backend", "ray"]
MODULE = "tests.support.serve_tp"


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    """A Ray cluster of two hosts with one CPU each, found by RAY_ADDRESS."""
    from ray.cluster_utils import Cluster  # an optional dependency

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1)
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = cluster.address
    yield
    cluster.shutdown()
    del os.environ["RAY_ADDRESS"]
    if before is not None:
        os.environ["RAY_ADDRESS"] = before


def rank_1() -> int:
    """Process id of rank 1, which a Ray actor has started."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if MODULE in words and "--connect" in words:
            return int(path.parent.name)
    raise AssertionError("there is no process of rank 1")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def text_of(server: Server) -> str:
    answer = server.complete("the cat sat on", max_tokens=24, temperature=0.8, seed=7)
    return answer["choices"][0]["text"]


@NEEDS_RAY
def test_ray_hosts_output_equals_single_rank_and_exit(hosts):
    with serving(["-m", MODULE, *FLAGS]) as alone:
        wanted = text_of(alone)
    with serving(["-m", MODULE, *FLAGS, *BY_RAY]) as server:
        rank = rank_1()
        pids = [*server.pids(), rank, parent_of(rank)]
        assert text_of(server) == wanted
        server.process.send_signal(signal.SIGTERM)
        assert ended(server, pids) == 0


@NEEDS_RAY
@pytest.mark.parametrize("lost", ["rank", "actor", "stopped"])
def test_lost_ray_rank_ends_all_ranks(hosts, lost):
    reasons = {
        "rank": "was terminated by SIGKILL while serving",
        "actor": "was lost with its Ray actor while serving",
        "stopped": "is stopped by a signal while serving",
    }
    with serving(["-m", MODULE, *FLAGS, *BY_RAY]) as server:
        rank = rank_1()
        actor = parent_of(rank)
        pids = [*server.pids(), rank, actor]
        number = signal.SIGSTOP if lost == "stopped" else signal.SIGKILL
        os.kill(actor if lost == "actor" else rank, number)
        assert ended(server, pids) == 1
        (line,) = [line for line in server.lines if reasons[lost] in line][:1]
        assert "rank 1 on " in line
        assert "Ray's node" in line


@NEEDS_RAY
def test_ray_workers_exit_with_rank_0(hosts):
    with serving(["-m", MODULE, *FLAGS, *BY_RAY]) as server:
        rank = rank_1()
        pids = [*server.pids(), rank]
        os.kill(server.process.pid, signal.SIGKILL)
        assert ended(server, pids) == -signal.SIGKILL


@NEEDS_RAY
def test_ray_launcher_rejects_more_ranks_than_resources(hosts, monkeypatch):
    from shared.cluster import ray_launcher

    monkeypatch.setattr(ray_launcher, "ROOM_S", 5.0)
    with pytest.raises(
        ConfigError, match=r"Ray reserved no resources for 3 ranks within 5 s; each"
    ):
        ray_launcher.RayLauncher(3, "no.module", with_gpus=False)


def test_missing_ray_package_names_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "shared.cluster.ray_launcher", raising=False)
    options = parse([*FLAGS, *BY_RAY])
    refused = pytest.raises(
        ConfigError,
        match="^--distributed-executor-backend ray requires the package ray; install the extra ray",
    )
    with refused, tp_startup(options, lambda: serve_tp.PLATFORM, MODULE, print):
        pass


NOTHING_TO_PLACE = {
    "--distributed-executor-backend ray": (
        MODULE,
        "^--distributed-executor-backend ray requires --tp-size",
    ),
    "--tp-size 2 --distributed-executor-backend ray": (
        None,
        "not supported by the JAX backend",
    ),
}


@pytest.mark.parametrize("flags", NOTHING_TO_PLACE)
def test_ray_backend_requires_tp_and_torch(flags):
    module, sentence = NOTHING_TO_PLACE[flags]
    options = parse([*FLAGS, *flags.split()])
    refused = pytest.raises(ConfigError, match=sentence)
    with refused, tp_startup(options, lambda: serve_tp.PLATFORM, module, print):
        pass
