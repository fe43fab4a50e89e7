"""A server with closed standard streams serves requests."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.support.http_fixtures import ROOT
from tests.support.tiny_models import write_tiny

CLOSED = [each for count in (1, 2, 3) for each in itertools.combinations((0, 1, 2), count)]
START_S = 120
SHOW = """
import os, socket, subprocess, sys
from shared.process.descriptors import open_standard_streams
open_standard_streams()
taken = socket.socket().fileno()
for stream in (sys.stdin, sys.stdout, sys.stderr):
    stream.fileno()
print("to a stream that may be closed", flush=True)
print("so may this one", file=sys.stderr, flush=True)
child = "import os; [os.fstat(number) for number in (0, 1, 2)]"
code = subprocess.run([sys.executable, "-c", child]).returncode
with open(sys.argv[1], "w") as file:
    file.write(f"{taken > 2} {code}")
"""


def closing(command: list[str], closed: tuple[int, ...]) -> list[str]:
    """A shell command that closes the given standard streams."""
    redirections = " ".join(f"{number}>&-" for number in closed)
    return ["/bin/sh", "-c", f'exec "$@" {redirections}', "sh", *command]


@pytest.mark.parametrize("closed", CLOSED, ids=str)
def test_sockets_never_get_standard_stream_numbers(tmp_path: Path, closed: tuple[int, ...]):
    result = tmp_path / "result"
    command = closing([sys.executable, "-c", SHOW, str(result)], closed)
    subprocess.run(command, cwd=ROOT, check=True, timeout=60, capture_output=True)
    assert result.read_text() == "True 0"


# The test before this one has all combinations; the start of a server takes seconds.
@pytest.mark.parametrize(
    "closed",
    [*(pytest.param(x, marks=pytest.mark.matrix) for x in ((0,), (0, 2))), (0, 1, 2)],
    ids=str,
)
def test_server_without_standard_streams_serves(tmp_path: Path, closed: tuple[int, ...]):
    write_tiny(tmp_path, "qwen3", 0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.support.serve_reference", "--model-path", str(tmp_path)]
    command += ["--port", str(port), "--max-running-requests", "2", "--context-length", "64"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(closing(command, closed), cwd=ROOT, env=environment)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while not is_up(url):
            assert process.poll() is None, "the server exited"
            assert time.monotonic() < deadline
            time.sleep(0.1)
        body = {"prompt": [1, 2, 3], "max_tokens": 2}
        answer = httpx.post(url + "/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 2
    finally:
        process.terminate()
        assert process.wait(10) == 0


def is_up(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
