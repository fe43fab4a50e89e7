"""Replicas by Ray Serve on two simulated hosts: restart, drain, the config file, nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from shared.options.command_line import parse
from tests.support.http_fixtures import COMPLETIONS, ROOT, Server, serving

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: it is an extra"),
]
CONFIG = "docs/deploy/ray_serve.yaml"
KEY = "KEY"  # of the config file
HEADERS = {"authorization": f"Bearer {KEY}"}
ROUTER = ["--port", "0", "--replica-launcher", "ray", "--api-key", KEY]
START_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray cluster of two hosts, found by RAY_ADDRESS."""
    from ray.cluster_utils import Cluster  # an optional dependency

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2)
    os.environ["RAY_ADDRESS"] = made.address
    yield
    del os.environ["RAY_ADDRESS"]
    made.shutdown()


def wait(is_true: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not is_true():
        assert time.monotonic() - began < START_S
        time.sleep(0.2)
    return time.monotonic() - began


def num_ready(server: Server) -> int:
    fields = httpx.get(f"{server.url}/capabilities", timeout=30, headers=HEADERS).json()
    return [each["state"] for each in fields.get("replicas", [])].count("ready")


def servers_of(module: str) -> list[int]:
    """Returns the process ids of the servers of all replicas."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if module in words and any(word.startswith("@/dev/fd/") for word in words):
            found.append(int(path.parent.name))
    return found


def left_in_ray() -> tuple[list[str], list[str]]:
    """Returns the placement groups and the actors that remain."""
    code = (
        "import json, os, ray; ray.init(os.environ['RAY_ADDRESS'], log_to_driver=False);"
        "groups = ray.util.placement_group_table().values();"
        "print(json.dumps([[g['placement_group_id'] for g in groups if g['state'] != 'REMOVED'],"
        "[a['name'] for a in ray.util.list_named_actors(all_namespaces=True)]]))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    groups, actors = json.loads(done.stdout.splitlines()[-1])
    return groups, actors


def test_ray_replica_restarts_and_nothing_remains(cluster):
    module = "tests.support.fake_server"
    with serving(["-m", module, *ROUTER, "--replicas", "2"]) as server:
        wait(lambda: num_ready(server) == 2)
        killed, _ = servers_of(module)
        os.kill(killed, signal.SIGKILL)
        wait(lambda: num_ready(server) < 2)
        for _ in range(20):
            response = httpx.post(server.url + COMPLETIONS, json={}, headers=HEADERS, timeout=20)
            assert response.status_code == 200
        seconds = wait(lambda: num_ready(server) == 2)
        print(f"capacity is back after {seconds:.1f} s")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(90) == 0
    wait(lambda: not servers_of(module))
    assert left_in_ray() == ([], [])


DEPLOYING = """
import os, sys
import ray
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from ray import serve
ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
serve.start(proxy_location="Disabled")
replicas = {"name": "ServerReplica", "num_replicas": int(sys.argv[1])}
flags = ["--replicas=2", "--api-key=" + sys.argv[2]]
application = {"name": "tandem", "route_prefix": None, "deployments": [replicas]}
application |= {"import_path": "tests.support.ray_fake_servers:servers", "args": {"flags": flags}}
schema = ServeDeploySchema(applications=[application])
_get_global_client().deploy_apps(schema, _blocking=True)
"""
"""Deploys servers without a model as a config file does, with a number of replicas."""


def deploy(replicas: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DEPLOYING, str(replicas), KEY]
    subprocess.run(command, cwd=ROOT, env=environment, timeout=START_S, check=True)


def test_ray_scale_down_drains_replica(cluster):
    """A replica with open streams is removed: all streams end whole, and the other one stays."""
    module, events = "tests.support.fake_server", 150
    deploy(2)
    with serving(["-m", "shared.router", *ROUTER]) as server:
        wait(lambda: num_ready(server) == 2)
        before = servers_of(module)
        with ThreadPoolExecutor(8) as threads:
            streams = [threads.submit(stream_of, server, events) for _ in range(8)]
            time.sleep(1)
            deploy(1)
            wait(lambda: len(servers_of(module)) == 1)
            found = [each.result() for each in streams]
        assert [len(each) for each in found] == [events + 1] * 8
        assert {each[-1] for each in found} == {"[DONE]"}
        assert set(servers_of(module)) < set(before)
        for _ in range(5):
            response = httpx.post(server.url + COMPLETIONS, json={}, headers=HEADERS, timeout=20)
            assert response.status_code == 200
        wait(lambda: num_ready(server) == 1)
    code = "import os, ray; from ray import serve; ray.init(os.environ['RAY_ADDRESS']); "
    subprocess.run([sys.executable, "-c", code + "serve.shutdown()"], timeout=90, check=True)
    wait(lambda: not servers_of(module))


def stream_of(server: Server, events: int) -> list[str]:
    """Returns the data of all events of a stream of 50 ms an event."""
    fields = {"stream": True, "max_tokens": events, "pace_s": 0.05}
    with httpx.stream(
        "POST", server.url + COMPLETIONS, json=fields, timeout=60, headers=HEADERS
    ) as response:
        return [line[6:] for line in response.iter_lines() if line.startswith("data: ")]


def test_config_file_deploys_servers_as_it_is(cluster):
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address"]
    command += [os.environ["RAY_ADDRESS"], CONFIG]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    deployed = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        with serving(["-m", "shared.router", *ROUTER]) as server:
            wait(lambda: num_ready(server) == 2)
            fields = {"prompt": "2 + 3 =", "max_tokens": 4}
            response = httpx.post(
                server.url + COMPLETIONS, json=fields, headers=HEADERS, timeout=60
            )
            assert response.json()["usage"]["completion_tokens"] == 4
    finally:
        deployed.send_signal(signal.SIGINT)
        deployed.wait(90)
    wait(lambda: not servers_of("torch_impl.serve"))


def test_flags_of_config_file_are_options():
    import yaml  # an optional dependency

    args = yaml.safe_load((ROOT / CONFIG).read_text())["applications"][0]["args"]
    assert parse(args["flags"]).router.replicas == 2
