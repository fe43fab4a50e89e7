"""Listening sockets of the server, and the host names that it accepts."""

import errno
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from shared.options.flags import ConfigError
from shared.options.server import ANY, ServerOptions

NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
LOOPBACK = "127.0.0.1"
MAX_NAMES = 128  # parsed names of Host headers, each of which takes 15 us


@dataclass(frozen=True)
class Listeners:
    """Listening sockets.

    Attributes:
      clients: Sockets of the API.
      admin: Sockets of the admin routes; empty if they share the API's sockets.
    """

    clients: list[socket.socket]
    admin: list[socket.socket]

    def close(self) -> None:
        """Closes all sockets."""
        for listener in chain(self.clients, self.admin):
            listener.close()


def open_listeners(options: ServerOptions) -> Listeners:
    """Binds the addresses of both listeners.

    Raises:
      ValueError: An address is not available, or other machines could reach it without a key.
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
    """Returns the host of the admin listener, by default the loopback address."""
    return options.admin_host or LOOPBACK


def bind(
    host: str, port: int, host_flag: str = "--host", port_flag: str = "--port"
) -> list[socket.socket]:
    """Binds a listener's addresses before the model is loaded; clients that connect wait for the
    server.

    A name may have several addresses, as localhost has an IPv4 and an IPv6 one, and the client
    chooses among them. All are bound, except addresses that this machine does not have, if it has
    another one.

    Args:
      host: Name or address to listen on.
      port: TCP port; 0 selects a free one.
      host_flag, port_flag: Flags for messages.

    Raises:
      ValueError: The addresses are not available.
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
    """Returns family and address of each distinct address."""
    resolved = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in resolved))


def _listening(family: int, address: tuple) -> socket.socket | None:
    """Returns a listening socket; None if the machine does not have the address.

    Two sockets may share one address as long as neither listens, so this one listens at once. A
    second server on the same address then fails here, not after loading its model.
    """
    listener = None
    try:
        # asyncio disables Nagle's algorithm only for sockets with an explicit protocol.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
    """Checks that other machines cannot reach the server without a key, unless that is allowed.

    Raises:
      ConfigError: They could; the listeners are closed.
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
    """Returns the host names that requests may use besides the machine's own; None for any.

    A listener on the loopback address accepts no other names by default. Otherwise a site whose DNS
    name resolves to 127.0.0.1 could make a browser on the machine send requests to it (DNS
    rebinding).

    Args:
      options: Server options.
      host: Host of the listener.
      listeners: Its sockets.
    """
    if options.allowed_hosts is not None:
        names = tuple(name.strip().lower() for name in options.allowed_hosts.split(","))
        return None if ANY in names else names
    return (host.lower(),) if _are_local(listeners) else None


def _are_local(listeners: Sequence[socket.socket]) -> bool:
    return all(is_local(listener.getsockname()[0]) for listener in listeners)


@lru_cache(MAX_NAMES)
def is_local(name: str) -> bool:
    """Returns True for a name or an address of the loopback interface."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
