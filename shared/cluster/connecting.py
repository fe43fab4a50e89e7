"""Reason why Ray could not be joined, from the exception of `ray.init`."""

import re
import socket

TOKEN = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, to its token"
ANSWER_S = 2.0
_ADDRESS = re.compile(r"\bat (?:address[: ]*)?\[?([\w.:-]+?)\]?:(\d+)")


def connection_fault(error: Exception, flag: str) -> str:
    """Returns one sentence for an exception of `ray.init`.

    Ray reports a wrong token and an absent cluster by the same exception, so the address is
    tried: if something listens, the cluster runs and did not accept this process.

    Args:
      error: The exception.
      flag: The flag that requires Ray, with its value.
    """
    message = " ".join(str(error).split())
    if type(error).__name__ == "AuthenticationError":
        return f"{flag} found no authentication token for Ray; {TOKEN}"
    if "version mismatch" in message.lower():
        return (
            f"{flag} found another version of Ray ({message}); "
            "install the cluster's versions of Ray and Python"
        )
    if found := _ADDRESS.search(message):
        host, port = found[1], int(found[2])
        if _answers(host, port):
            return (
                f"{flag}: the Ray at {host}:{port} runs and "
                f"did not accept this process; if it requires an authentication token, {TOKEN}"
            )
        return (
            f"{flag}: no Ray runs at {host}:{port}; start one "
            "there with ray start --head, or set RAY_ADDRESS"
        )
    if "could not find any running ray" in message.lower():
        return (
            f"{flag} found no running Ray on this host; start one "
            "with ray start --head, set RAY_ADDRESS, or remove the flag"
        )
    return f"{flag} could not join Ray: {message}"


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=ANSWER_S):
            return True
    except OSError:
        return False
