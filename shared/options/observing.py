"""Options of log lines and OpenTelemetry traces."""

from dataclasses import dataclass
from importlib.util import find_spec

from shared.options.flags import ConfigError, check_rules, flag

LOG_FORMATS = ("text", "json")
TRACE_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class ObservingOptions:
    """Options of log lines and OpenTelemetry traces."""

    log_format: str = flag(
        "text",
        "format of log lines",
        choices=LOG_FORMATS,
        metavar="FORMAT",
    )
    log_level: str = flag(
        "info",
        "minimum level of log lines; info logs one line per finished request",
        choices=LOG_LEVELS,
        metavar="LEVEL",
    )
    log_requests: bool = flag(
        False,
        "log prompts and outputs (off by default)",
    )
    otlp_traces_endpoint: str | None = flag(
        None,
        "OTLP/HTTP endpoint of an OpenTelemetry collector that receives one span per request, "
        "such as http://127.0.0.1:4318/v1/traces (default: none)",
        metavar="URL",
    )

    def __post_init__(self) -> None:
        check_rules(self)
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"--otlp-traces-endpoint must begin with http:// or https://, got {endpoint}"
            )

    def exporter_fault(self) -> str | None:
        """Returns the lack of the packages of the extra `otel`, if they are needed."""
        if self.otlp_traces_endpoint is None:
            return None
        try:
            missing = find_spec(TRACE_EXPORTER) is None
        except ModuleNotFoundError:  # a parent package is missing
            missing = True
        if not missing:
            return None
        return (
            "--otlp-traces-endpoint requires OpenTelemetry; install the extra otel, or remove "
            "the flag"
        )
