"""Mutual authentication of a connection with a shared secret that is never sent.

Each side sends a nonce and proves by an HMAC over both nonces that it has the secret.
"""

from __future__ import annotations

import hmac
import secrets
import socket

from shared.cluster.transfer.deadline import Deadline, receive, send
from shared.cluster.transfer.errors import SECRET, TransferError

NONCE_BYTES = PROOF_BYTES = 32


def accept(connection: socket.socket, secret: bytes, deadline: Deadline) -> None:
    """Authenticates a client.

    Raises:
      TransferError: The client has another secret, or see `Deadline.on`.
    """
    theirs, ours = receive(connection, NONCE_BYTES, deadline), secrets.token_bytes(NONCE_BYTES)
    send(connection, ours + _proof(secret, b"server", theirs, ours), deadline)
    _check(receive(connection, PROOF_BYTES, deadline), _proof(secret, b"client", theirs, ours))


def connect(connection: socket.socket, secret: bytes, deadline: Deadline) -> None:
    """Authenticates a server, then this process to it; raises the errors of `accept`."""
    ours = secrets.token_bytes(NONCE_BYTES)
    send(connection, ours, deadline)
    answer = receive(connection, NONCE_BYTES + PROOF_BYTES, deadline)
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    _check(proof, _proof(secret, b"server", ours, theirs))
    send(connection, _proof(secret, b"client", ours, theirs), deadline)


def _proof(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(secret, role + client_nonce + server_nonce, "sha256")


def _check(given: bytes, wanted: bytes) -> None:
    if not hmac.compare_digest(given, wanted):
        message = "the other server has another secret (--disaggregation-secret-file)"
        raise TransferError(SECRET, message)
