"""Ticket of a published record: its address, size, checksum and header."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shared.cluster.transfer.errors import TransferError

ID_BYTES = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class RecordAddress:
    """Address of a record server.

    Attributes:
      boot_id: Boot id of its kernel, equal for all processes of a host.
      socket_name: Name of its abstract Unix socket, which only processes of its host reach.
      host: Name or address of the host, as the client knows it; empty in a ticket.
      port: Port of its TCP listener.
    """

    boot_id: str
    socket_name: str
    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """Ticket of a record; it is valid once, and for a limited time.

    Attributes:
      ticket_id: Random id in hexadecimal digits; a client without it cannot fetch the record.
      address: Address of the server that holds the record.
      num_bytes: Bytes of the body.
      checksum: Checksum of header and body (`TransferRecord.checksum`).
      header: Fields of the record's header.
    """

    ticket_id: str
    address: RecordAddress
    num_bytes: int
    checksum: int
    header: dict[str, Any]

    def to_fields(self) -> dict[str, Any]:
        """Returns the fields for JSON or MessagePack."""
        return {**vars(self), "address": vars(self.address)}  # `asdict` would copy each token

    @classmethod
    def from_fields(cls, fields: Any, host: str) -> Self:
        """Restores a ticket from the response of the server on `host`.

        Raises:
          TransferError: The fields are not those of a ticket.
        """
        try:
            address = RecordAddress(**{**fields["address"], "host": host})
            ticket = cls(**{**fields, "address": address})
            is_valid = (
                len(bytes.fromhex(ticket.ticket_id)) == ID_BYTES
                and min(ticket.num_bytes, ticket.checksum) >= 0
            )
        except (TypeError, KeyError, ValueError) as error:
            raise TransferError("ticket", f"the ticket is invalid: {error}") from error
        if not is_valid or not isinstance(ticket.header, dict):
            raise TransferError("ticket", "the ticket is invalid")
        return ticket


def boot_id() -> str:
    """Returns the boot id of this kernel; empty if it has none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
