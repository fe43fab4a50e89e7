"""What the server tells of its work: log lines and traces."""

from dataclasses import dataclass
from importlib.util import find_spec

from shared.options.flags import ConfigError, check_rules, flag

LOG_FORMATS = ("text", "json")
TRACE_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class ObservingOptions:
    """What the server tells of its work."""

    log_format: str = flag(
        "text", "how the lines of the log are written", choices=LOG_FORMATS, metavar="FORMAT"
    )
    log_level: str = flag(
        "info",
        "the least that is logged; info has a line for each request that ends",
        choices=LOG_LEVELS,
        metavar="LEVEL",
    )
    log_requests: bool = flag(
        False, "log what requests ask and are answered too, which is never logged else"
    )
    otlp_traces_endpoint: str | None = flag(
        None,
        "address of an OpenTelemetry collector that takes OTLP over HTTP, for a span of each "
        "request, say http://127.0.0.1:4318/v1/traces (default: no spans)",
        metavar="URL",
    )

    def __post_init__(self) -> None:
        check_rules(self)
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"--otlp-traces-endpoint must begin with http:// or https://, got {endpoint}"
            )

    def check_exporter(self) -> None:
        """Looks for the packages of the extra: the server's process would find out too late.

        Raises:
          ConfigError: They are needed, and are not there.
        """
        if self.otlp_traces_endpoint is None:
            return
        try:
            missing = find_spec(TRACE_EXPORTER) is None
        except ModuleNotFoundError:  # of a package above it
            missing = True
        if missing:
            raise ConfigError(
                "--otlp-traces-endpoint needs OpenTelemetry, which is not installed; install the "
                "extra otel, or leave the flag out"
            )
