"""Options of disaggregated prefill: servers that transfer KV cache records to each other."""

import re
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

from shared.options.flags import AUTO, NONE, ConfigError, check_rules, flag, spelling

NIXL = "nixl"
TRANSFER_BACKENDS = (AUTO, "shm", "tcp", NIXL)
MIN_SECRET = 16
MIB = 1 << 20
_URL = re.compile(r"(https?)://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]]+)(?::([0-9]{1,5}))?", re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class ServerAddress:
    """Address of a server.

    Attributes:
      host: Name or address.
      port: TCP port.
      is_secure: True for HTTPS.
    """

    host: str
    port: int
    is_secure: bool

    @classmethod
    def of_url(cls, url: str) -> "ServerAddress":
        """Parses a URL.

        Raises:
          ConfigError: It has another form.
        """
        found = _URL.fullmatch(url)
        if found is None or int(found[3] or 1) not in range(1, 1 << 16):
            raise ConfigError(
                f"--prefill-servers contains {url}, which is not the URL of a server; give "
                "scheme, host and port without a path, such as http://10.0.0.2:8000"
            )
        scheme = found[1].lower()
        return cls(found[2].strip("[]"), int(found[3] or _PORTS[scheme]), scheme == "https")


class DisaggregationMode(Enum):
    """Role of a server.

    Attributes:
      serves: Other servers may fetch its KV cache at `POST /kv_transfer`.
      fetches: It requests prefixes that are not cached from `--prefill-servers`.
    """

    NONE = NONE, False, False
    PREFILL = "prefill", True, False
    DECODE = "decode", False, True
    PEER = "peer", True, True

    def __init__(self, spelled: str, serves: bool, fetches: bool) -> None:
        self.spelled, self.serves, self.fetches = spelled, serves, fetches


_MODES = {mode.spelled: mode for mode in DisaggregationMode}
_OF_SERVING = ("disaggregation_transfer_port", "disaggregation_ticket_timeout")
_OF_FETCHING = ("remote_prefill_min_tokens", "remote_prefill_timeout")


@dataclass(frozen=True, kw_only=True)
class DisaggregationOptions:
    """Options of disaggregated prefill."""

    disaggregation_mode: str = flag(
        NONE,
        "role of this server; prefill: runs prompts for other servers at POST /kv_transfer; "
        "decode: has long prompts prefilled by --prefill-servers; peer: fetches cached prefixes "
        "from --prefill-servers, and serves its own cache without running prompts for others",
        choices=tuple(_MODES),
        metavar="MODE",
        values={"null": NONE},
    )
    prefill_servers: str | None = flag(
        None,
        "URLs of servers in mode prefill or peer, separated by commas, such as "
        "http://10.0.0.2:8000 (default: none)",
        metavar="URLS",
        is_list=True,
    )
    disaggregation_transfer_backend: str = flag(
        AUTO,
        "how a KV cache record is fetched; shm: shared memory of one host; tcp: a connection to "
        "the server's transfer port; nixl: NIXL reads registered host memory, and both servers "
        "require this value; auto: shm within a host, else tcp",
        choices=TRANSFER_BACKENDS,
        metavar="NAME",
    )
    disaggregation_transfer_port: int = flag(
        0,
        "TCP port of the server's KV cache records, on --host; 0 picks a free port",
        low=0,
        high=65535,
    )
    disaggregation_secret_file: str | None = flag(
        None,
        f"file with the secret of at least {MIN_SECRET} characters that servers prove to each "
        "other; required if other machines can connect (default: none)",
        metavar="FILE",
        is_path=True,
        is_file="read",
    )
    disaggregation_buffer_mib: int = flag(
        4096,
        "MiB of host memory for records that other servers have not fetched yet, and as much "
        "for records that are being received",
        low=1,
        high=1 << 20,
    )
    disaggregation_ticket_timeout: int = flag(
        30,
        "seconds for which a record is kept for the server that requested it",
        low=1,
        high=3600,
    )
    remote_prefill_min_tokens: int | None = flag(
        None,
        "prompt tokens outside the prefix cache from which a prompt is prefilled remotely "
        "(default: more than one prefill step, --chunked-prefill-size)",
        low=1,
        high=1 << 24,
    )
    remote_prefill_timeout: int = flag(
        30,
        "seconds after which a prompt is prefilled locally if its KV cache has not arrived",
        low=1,
        high=3600,
    )

    def __post_init__(self) -> None:
        check_rules(self)
        mode, servers = self.disaggregation_mode, self.servers  # parses the URLs
        if self.mode.fetches and not servers:
            raise ConfigError(
                f"--disaggregation-mode {mode} requires --prefill-servers; add it, or remove "
                "--disaggregation-mode"
            )
        if servers and not self.mode.fetches:
            raise ConfigError(
                "--prefill-servers requires --disaggregation-mode decode or peer; add it, or "
                "remove --prefill-servers"
            )

    @property
    def mode(self) -> DisaggregationMode:
        """Role of the server."""
        return _MODES[self.disaggregation_mode]

    @property
    def servers(self) -> tuple[ServerAddress, ...]:
        """Addresses of `prefill_servers`."""
        named = map(str.strip, (self.prefill_servers or "").split(","))
        return tuple(ServerAddress.of_url(url.rstrip("/")) for url in named if url)

    @property
    def buffer_bytes(self) -> int:
        """Maximum bytes of held and of received records."""
        return self.disaggregation_buffer_mib * MIB

    def unused_flag(self, explicit_flags: frozenset[str]) -> str | None:
        """Returns the first explicit flag that has no effect in this mode."""
        unused = () if self.mode.serves else _OF_SERVING
        unused += () if self.mode.fetches else _OF_FETCHING
        if self.mode is DisaggregationMode.NONE:
            unused += ("disaggregation_secret_file", "disaggregation_buffer_mib")
            unused += ("disaggregation_transfer_backend",)
        return next((spelling(name) for name in unused if name in explicit_flags), None)

    def backend_fault(self) -> str | None:
        """Returns the lack of the package of the transfer backend."""
        if self.disaggregation_transfer_backend != NIXL or find_spec(NIXL) is not None:
            return None
        return (
            "--disaggregation-transfer-backend nixl requires the package nixl; install the extra "
            "nixl, or remove the flag"
        )

    def secret(self) -> str | None:
        """Reads the secret.

        Raises:
          ConfigError: It is too short, or has characters that HTTP headers do not support.
        """
        path = self.disaggregation_secret_file
        if path is None:
            return None
        text = Path(path).read_text(encoding="utf-8", errors="replace").strip()
        if len(text) < MIN_SECRET or not (text.isascii() and text.isprintable()):
            raise ConfigError(
                f"--disaggregation-secret-file {path} must contain at least {MIN_SECRET} "
                "printable ASCII characters on one line"
            )
        return text
