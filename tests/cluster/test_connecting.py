"""Ray connection errors: no Ray, another version, or a rejected process."""

import socket

import pytest

from shared.cluster.connecting import connection_fault

FLAG = "--distributed-executor-backend ray"


class AuthenticationError(Exception):
    """Same name as the error of Ray."""


ABSENT = ConnectionError("Could not find any running Ray instance. Please specify the one ...")
VERSIONS = RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.40.0\n")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            ABSENT,
            "--distributed-executor-backend ray found no running Ray on this host; start one",
        ),
        (
            VERSIONS,
            "--distributed-executor-backend ray found another version of Ray (Version mismatch:",
        ),
        (
            AuthenticationError("Token ..."),
            "--distributed-executor-backend ray found no authentication token for Ray",
        ),
        (
            ValueError("no\n such thing"),
            "--distributed-executor-backend ray could not join Ray: no such thing",
        ),
    ],
)
def test_connection_fault_names_each_cause(error, sentence):
    found = connection_fault(error, FLAG)
    assert found.startswith(sentence)
    assert "\n" not in found


def test_connection_fault_distinguishes_rejected_from_absent_ray():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        error = ConnectionError(f"Failed to connect to Ray cluster at 127.0.0.1:{port}")
        found = connection_fault(error, FLAG)
        assert f"the Ray at 127.0.0.1:{port} runs and did not accept this process" in found
        assert "RAY_AUTH_TOKEN" in found
    assert f"no Ray runs at 127.0.0.1:{port}; start one" in connection_fault(error, FLAG)
