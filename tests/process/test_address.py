"""Listening addresses: every address of --host, or an error that names the flag."""

import socket

import pytest

from shared.options.server import ServerOptions
from shared.process import address


@pytest.fixture
def names(monkeypatch):
    """Resolves the name `here` to the given addresses."""

    def give(*addresses: str) -> None:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0)) for ip in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    return give


def accepts(ip: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((ip, port)) == 0


def test_bind_listens_on_every_address_with_one_port(names):
    names("127.0.0.1", "127.0.0.2", "127.0.0.1")
    listeners = address.bind("here", 0)
    ((first, port), (second, other)) = (taken.getsockname() for taken in listeners)
    assert (first, second, other) == ("127.0.0.1", "127.0.0.2", port)
    assert accepts(first, port)
    assert accepts(second, port)
    for taken in listeners:
        taken.close()


def test_bind_skips_addresses_of_other_machines(names):
    names("192.0.2.1", "127.0.0.1")  # the first is reserved for documentation
    (taken,) = address.bind("here", 0)
    with taken:
        assert taken.getsockname()[0] == "127.0.0.1"
    names("192.0.2.1")
    with pytest.raises(ValueError, match="--host here --port 0 cannot be .*none of its addresses"):
        address.bind("here", 0)


def test_bind_rejects_address_in_use_and_releases_others(names):
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        names("127.0.0.1", "127.0.0.2")
        with pytest.raises(ValueError, match=f"--host here --port {port} cannot be"):
            address.bind("here", port)
        assert not accepts("127.0.0.1", port)


def test_bind_rejects_address_of_another_start():
    (taken,) = address.bind("127.0.0.1", 0)
    with taken:  # held by another server, which still loads its model
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--host 127.0.0.1 --port {port} cannot be"):
            address.bind("127.0.0.1", port)


def test_bind_rejects_unknown_host_name():
    with pytest.raises(ValueError, match="--host no.such.host.invalid"):
        address.bind("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    ("ip", "flags", "names"),
    [
        ("127.0.0.1", {}, ("127.0.0.1",)),
        ("127.0.0.1", {"host": "Desk.example"}, ("desk.example",)),
        ("127.0.0.1", {"allowed_hosts": "A.example, b.example"}, ("a.example", "b.example")),
        ("127.0.0.1", {"allowed_hosts": "*"}, None),
        ("0.0.0.0", {}, None),
        ("0.0.0.0", {"allowed_hosts": "a.example"}, ("a.example",)),
    ],
)
def test_host_names_defaults_to_own_names_on_loopback(ip, flags, names):
    with socket.create_server((ip, 0)) as listener:
        options = ServerOptions(**flags)
        assert address.host_names(options, options.host, [listener]) == names


def test_host_names_none_when_any_address_is_public():
    with socket.create_server(("127.0.0.1", 0)) as near, socket.create_server(("", 0)) as far:
        assert address.host_names(ServerOptions(), "here", [near, far]) is None


@pytest.mark.parametrize("ips", [("0.0.0.0",), ("127.0.0.1", "0.0.0.0")])
@pytest.mark.parametrize("is_admin", [False, True])
def test_check_open_requires_key_for_reachable_listener(ips, is_admin):
    taken = [socket.create_server((ip, 0)) for ip in ips]
    listeners = address.Listeners(*([], taken) if is_admin else (taken, []))
    for flags in ({"api_key": "word"}, {"allow_unauthenticated": True}):
        address.check_open(ServerOptions(**flags), listeners)
    flag = "--admin-host" if is_admin else "--host"
    reason = f"^{flag} 127.0.0.1 is reachable.*--api-key.*--allow-unauthenticated"
    with pytest.raises(ValueError, match=reason):
        address.check_open(ServerOptions(), listeners)
    assert all(listener.fileno() == -1 for listener in taken)


def test_check_open_accepts_loopback_without_key():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address.check_open(ServerOptions(), address.Listeners([taken], [taken]))
        assert taken.fileno() >= 0


def test_admin_address_in_use_raises_and_releases_listeners():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options = ServerOptions(port=0, admin_port=port)
        with pytest.raises(ValueError, match=f"^--admin-host 127.0.0.1 --admin-port {port} cannot"):
            address.open_listeners(options)


def test_open_listeners_adds_admin_listener_when_requested():
    one = address.open_listeners(ServerOptions(port=0))
    two = address.open_listeners(ServerOptions(port=0, admin_port=0))
    assert (len(one.clients), one.admin) == (1, [])
    (clients,), (admin,) = two.clients, two.admin
    assert clients.getsockname() != admin.getsockname()
    for each in (one, two):
        each.close()
