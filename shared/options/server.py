"""Options of the HTTP server: listeners, authentication, parsers and limits."""

import re
from dataclasses import dataclass

from shared.options.flags import AUTO, NONE, ConfigError, check_rules, flag, spelling
from shared.text.call_formats.names import ALIASES, OTHER_NAMES
from shared.text.reasoning_formats import REASONING_FORMATS

ANY = "*"
"""Wildcard for all host names and all origins."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s@]+")

REASONING_PARSERS = tuple(REASONING_FORMATS)
TOOL_CALL_PARSERS = tuple(OTHER_NAMES)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server."""

    host: str = flag(
        "127.0.0.1",
        "address or name to listen on; a name uses all of its addresses",
    )
    port: int = flag(
        8000,
        "port to listen on; 0 picks a free port",
        low=0,
        high=65535,
    )
    admin_host: str | None = flag(
        None,
        "address or name of the admin listener (default: 127.0.0.1)",
    )
    admin_port: int | None = flag(
        None,
        "port of a second listener for /metrics and the admin routes, which --port then does "
        "not serve; 0 picks a free port (default: none, --port serves all routes)",
        low=0,
        high=65535,
    )
    allowed_hosts: str | None = flag(
        None,
        "host names that clients may send in the Host header, separated by commas; * allows any "
        "(default: names of this machine if only it can connect, else any)",
        is_list=True,
    )
    allowed_origins: str | None = flag(
        None,
        "origins whose web pages may read responses (CORS), separated by commas, such as "
        "https://chat.example:8443; * allows any; never with credentials (default: none)",
        aliases=("--cors-allowed-origins",),
        is_list=True,
    )
    served_model_name: str | None = flag(
        None,
        "model name in requests and responses (default: the name of the model folder)",
    )
    sampling_defaults: str = flag(
        "model",
        "source of sampling parameters that a request omits; model: generation_config.json of "
        "the checkpoint; openai: OpenAI's defaults",
        choices=("model", "openai"),
        aliases=("--generation-config",),
        values={"auto": "model", "vllm": "openai"},
    )
    reasoning_parser: str | None = flag(
        AUTO,
        "parser that separates reasoning into reasoning_content; auto: detected from the chat "
        "template",
        choices=(AUTO, NONE, *REASONING_PARSERS),
        metavar="NAME",
        values={"deepseek_r1": "deepseek-r1", "gpt-oss": "harmony", "openai_gptoss": "harmony"},
    )
    tool_call_parser: str | None = flag(
        AUTO,
        "parser of tool calls; requests with tools require one; auto: detected from the chat "
        "template, an error at startup if several parsers fit",
        choices=(AUTO, NONE, *TOOL_CALL_PARSERS),
        metavar="NAME",
        values=dict(ALIASES),
    )
    strict_fields: bool = flag(
        False,
        "reject requests with fields that have no effect, such as store or metadata, with HTTP "
        "400 instead of listing them under ignored in the response",
    )
    store_responses: bool = flag(
        False,
        "store responses of /v1/responses for previous_response_id, at most 64 MiB and an hour",
    )
    max_queued_requests: int | None = flag(
        None,
        "maximum number of waiting requests; further requests get HTTP 503 (default: unlimited)",
        low=0,
        high=1 << 20,
    )
    trace_all_requests: bool = flag(
        False,
        "record a step trace of every request, not only of those with the field trace",
        old_names=("--trace-requests",),
    )
    compile_only: bool = flag(
        False,
        "compile all programs of these flags into the caches, then exit instead of serving",
    )
    graceful_shutdown_timeout: int = flag(
        25,
        "seconds for running requests to finish after SIGTERM; new requests are rejected "
        "meanwhile, and a second signal stops the server at once",
        low=0,
        high=1 << 20,
        old_names=("--drain-timeout",),
    )
    watchdog_timeout: int = flag(
        300,
        "seconds after which an unfinished step terminates the server",
        low=1,
        high=1 << 20,
    )
    api_key: str | None = flag(
        None,
        "bearer token (also as x-api-key or api-key) required on all routes except /live, "
        "/health and /ping, and the password of the web page; required if other machines can "
        "connect (default: none)",
    )
    allow_unauthenticated: bool = flag(
        False,
        "accept connections from other machines without --api-key",
        old_names=("--insecure",),
    )
    admin_api_key: str | None = flag(
        None,
        "bearer token of the admin routes, such as those of external corpora (default: none, "
        "the admin routes are off)",
    )

    def __post_init__(self) -> None:
        check_rules(self)
        for name in ("host", "admin_host", "served_model_name"):
            if getattr(self, name) == "":
                raise ConfigError(f"{spelling(name)} is empty; give a name, or remove the flag")
        if self.admin_host is not None and self.admin_port is None:
            raise ConfigError("--admin-host requires --admin-port; add it, or remove --admin-host")
        for origin in self.origins:
            if origin != ANY and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed-origins contains {origin!r}, which is not an origin; give scheme, "
                    "host and port without a path, such as https://chat.example:8443"
                )

    @property
    def origins(self) -> tuple[str, ...]:
        """Origins of `allowed_origins` in the spelling of browsers."""
        named = (self.allowed_origins or "").lower().split(",")
        return tuple(filter(None, map(str.strip, named)))
