"""Where the server listens, and the names that it answers to."""

import errno
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from shared.options.flags import ConfigError
from shared.options.server import ANY, ServerOptions

NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Listeners:
    """Sockets that listen.

    Attributes:
      clients: For whom the model is served.
      admin: For who runs the server; empty where both come to the same.
    """

    clients: list[socket.socket]
    admin: list[socket.socket]

    def close(self) -> None:
        """Stops listening."""
        for listener in chain(self.clients, self.admin):
            listener.close()


def open_listeners(options: ServerOptions) -> Listeners:
    """Takes the addresses of both listeners.

    Raises:
      ValueError: They cannot be had, or other machines could reach them without a key.
    """
    clients, admin = bind(options.host, options.port), []
    if options.admin_port is not None:
        try:
            admin = bind(admin_host(options), options.admin_port, "--admin-host", "--admin-port")
        except ValueError:
            Listeners(clients, admin).close()
            raise
    listeners = Listeners(clients, admin)
    check_open(options, listeners)
    return listeners


def admin_host(options: ServerOptions) -> str:
    """Where who runs the server comes to: this machine, unless it is told."""
    return options.admin_host or LOOPBACK


def bind(
    host: str, port: int, host_flag: str = "--host", port_flag: str = "--port"
) -> list[socket.socket]:
    """Takes a listener's addresses, before the model is loaded; who connects waits for the server.

    A name may have several addresses, as localhost has one of IPv4 and one of IPv6, and it is the
    client that chooses among them: all are listened on, but for those that this machine does not
    have while it has another.

    Args:
      host: Name or address to listen on.
      port: TCP port; 0 takes a free one.
      host_flag, port_flag: What the user knows them by.

    Raises:
      ValueError: The addresses cannot be had; one sentence.
    """
    listeners: list[socket.socket] = []
    number = port
    try:
        for family, address in _addresses(host):
            listener = _listening(family, (address[0], number, *address[2:]))
            if listener is not None:
                listeners.append(listener)
                number = listener.getsockname()[1]
        if not listeners:
            raise OSError("none of its addresses belongs to this machine")
    except (OSError, OverflowError) as error:
        for listener in listeners:
            listener.close()
        raise ValueError(
            f"{host_flag} {host} {port_flag} {port} cannot be listened on ({error}); choose another"
        ) from error
    return listeners


def _addresses(host: str) -> list[tuple[int, tuple]]:
    """Family and address, as sockets take them; each once."""
    resolved = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in resolved))


def _listening(family: int, address: tuple) -> socket.socket | None:
    """A socket that listens; None where the machine does not have the address.

    Two sockets may have one address as long as neither listens, so this one listens at once: a
    second start is refused here, not after it has loaded its model.
    """
    listener = None
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        if listener is not None:
            listener.close()
        if error.errno in NOT_OURS:
            return None
        raise
    return listener


def check_open(options: ServerOptions, listeners: Listeners) -> None:
    """Refuses to serve other machines without a key, unless that is said to be wanted.

    Raises:
      ConfigError: The server would be open; the listeners are closed.
    """
    if options.api_key or options.allow_unauthenticated:
        return
    for flag, host, taken in (
        ("--host", options.host, listeners.clients),
        ("--admin-host", admin_host(options), listeners.admin),
    ):
        if not _are_local(taken):
            listeners.close()
            raise ConfigError(
                f"{flag} {host} is reachable from other machines, which requires --api-key; "
                "use --allow-unauthenticated to serve without authentication"
            )


def host_names(
    options: ServerOptions, host: str, listeners: Sequence[socket.socket]
) -> tuple[str, ...] | None:
    """The names that a request may call a listener by, beside the machine's own; None: any.

    One that listens on this machine alone answers to no other name, unless it is told: whoever lets
    a name of theirs stand for 127.0.0.1 could make a browser on the machine speak to it.

    Args:
      host: Where the listener listens.
      listeners: Its sockets.
    """
    if options.allowed_hosts is not None:
        names = tuple(name.strip().lower() for name in options.allowed_hosts.split(","))
        return None if ANY in names else names
    return (host.lower(),) if _are_local(listeners) else None


def _are_local(listeners: Sequence[socket.socket]) -> bool:
    return all(is_local(listener.getsockname()[0]) for listener in listeners)


def is_local(name: str) -> bool:
    """Whether a name or an address stands for the machine itself wherever it is asked."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
