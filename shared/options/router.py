"""Options of replicas and of the router in front of them."""

from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import urlsplit

from shared.options.flags import ConfigError, check_rules, flag

LOCAL, RAY = "local", "ray"
CACHE_AWARE, LEAST_LOAD, ROUND_ROBIN = POLICIES = ("cache_aware", "least_load", "round_robin")


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """Options of replicas and of the router in front of them."""

    replicas: int = flag(
        1,
        "number of complete servers, each with --tp-size GPUs; from 2 on this process is the "
        "router in front of them",
        aliases=("--dp-size", "--data-parallel-size"),
        old_names=("--dp",),
        low=1,
        high=64,
    )
    replica_launcher: str = flag(
        LOCAL,
        "how replicas are started; local: child processes on this host; ray: a deployment of "
        "Ray Serve in a running Ray cluster",
        choices=(LOCAL, RAY),
        metavar="NAME",
        aliases=("--data-parallel-backend",),
        values={"mp": LOCAL},
    )
    servers: str | None = flag(
        None,
        "URLs of running servers, separated by commas; only for `tandem route` (default: none)",
        is_list=True,
    )
    routing_policy: str = flag(
        CACHE_AWARE,
        "choice of the replica; cache_aware: longest known prefix, with bounded load; "
        "least_load: fewest open requests; round_robin: in turn",
        choices=POLICIES,
        metavar="NAME",
    )
    health_check_interval: int = flag(
        1,
        "seconds between two health checks of a replica",
        low=1,
        high=3600,
    )
    health_check_timeout: int = flag(
        3,
        "seconds until a health check fails; after two failures in a row a replica is down",
        low=1,
        high=3600,
    )

    def __post_init__(self) -> None:
        check_rules(self)
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path:
                raise ConfigError(
                    f"--servers contains {url!r}, which is not the URL of a server; give scheme, "
                    "host and port without a path, such as http://127.0.0.1:8001"
                )

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of `servers`, without a slash at the end."""
        named = (url.strip().rstrip("/") for url in (self.servers or "").split(","))
        return tuple(dict.fromkeys(filter(None, named)))

    def launcher_fault(self) -> str | None:
        """Returns the lack of the package of the replica launcher."""
        if self.replica_launcher != RAY or find_spec("ray") is not None:
            return None
        return (
            "--replica-launcher ray requires Ray Serve; install the extra ray, or remove the flag"
        )
