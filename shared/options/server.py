"""Where requests come in, and who is answered."""

import re
from dataclasses import dataclass

from shared.options.flags import AUTO, NONE, ConfigError, check_rules, flag, spelling

ANY = "*"
"""Stands for every name of a host, and for every site."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s@]+")

REASONING_PARSERS = ("qwen3", "deepseek-r1")
TOOL_CALL_PARSERS = ("hermes", "qwen", "qwen3_coder", "llama3")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where requests come in."""

    host: str = flag("127.0.0.1", "address to listen on, or a name, with all its addresses")
    port: int = flag(8000, "port to listen on; 0 takes a free one", low=0, high=65535)
    admin_host: str | None = flag(
        None, "address of the second listener, or a name (default: 127.0.0.1)"
    )
    admin_port: int | None = flag(
        None,
        "port of a second listener, which then has /metrics and the routes that change the server; "
        "0 takes a free one (default: none, one listener has all)",
        low=0,
        high=65535,
    )
    allowed_hosts: str | None = flag(
        None, "names, separated by commas, that clients may call the server by; * is any (default: "
        "those of this machine where it listens to this machine alone, else any)", is_list=True,
    )  # fmt: skip
    allowed_origins: str | None = flag(
        None, "sites, separated by commas, whose pages may read answers in a browser, as "
        "https://chat.example:8443; * is any; never with passwords or cookies (default: none)",
        aliases=("--cors-allowed-origins",),
        is_list=True,
    )  # fmt: skip
    served_model_name: str | None = flag(
        None, "name in requests and answers (default: the folder's name)"
    )
    sampling_defaults: str = flag(
        "model",
        "temperature and filters of requests that name none: the model's generation_config.json, "
        "or openai's",
        choices=("model", "openai"),
        aliases=("--generation-config",),
        values={"auto": "model", "vllm": "openai"},
    )
    reasoning_parser: str | None = flag(
        AUTO,
        "how the model marks its reasoning, which answers then give as reasoning_content; auto "
        "finds it by the tags of the chat template",
        choices=(AUTO, NONE, *REASONING_PARSERS),
        metavar="NAME",
        values={"deepseek_r1": "deepseek-r1"},
    )
    tool_call_parser: str | None = flag(
        AUTO,
        "how the model writes calls of tools, without which no request may have tools; auto finds "
        "it by the call that the chat template writes",
        choices=(AUTO, NONE, *TOOL_CALL_PARSERS),
        metavar="NAME",
        values={"qwen25": "qwen", "llama3_json": "llama3"},
    )
    strict_fields: bool = flag(
        False,
        "answer a request with HTTP 400 where it has a field that has no effect here, as store or "
        "metadata, instead of listing the field under ignored in the answer",
    )
    max_queued_requests: int | None = flag(
        None,
        "requests that may wait for others to end; one more is answered 503 (default: any number)",
        low=0,
        high=1 << 20,
    )
    trace_all_requests: bool = flag(
        False,
        "keep the trace of every request, not only of those that ask with trace",
        old_names=("--trace-requests",),
    )
    graceful_shutdown_timeout: int = flag(
        25, "seconds that requests have to end after SIGTERM, in which no new ones are taken; a "
        "second SIGTERM, or another signal that ends a program, ends the server at once",
        low=0, high=1 << 20, old_names=("--drain-timeout",),
    )  # fmt: skip
    watchdog_timeout: int = flag(
        300, "seconds that a step may take; then the server ends itself with the reason",
        low=1, high=1 << 20,
    )  # fmt: skip
    api_key: str | None = flag(
        None,
        "bearer token (or x-api-key, api-key) of every route of both listeners but /live, and the "
        "password that a browser asks for; a start that other machines can reach needs it "
        "(default: none)",
    )
    allow_unauthenticated: bool = flag(
        False, "serve other machines without --api-key", old_names=("--insecure",)
    )
    admin_api_key: str | None = flag(
        None,
        "bearer token of the routes that change the server, as those of external corpora (default: "
        "there are no such routes)",
    )

    def __post_init__(self) -> None:
        check_rules(self)
        for name in ("host", "admin_host", "served_model_name"):
            if getattr(self, name) == "":
                raise ConfigError(f"{spelling(name)} is empty; give a name or leave the flag out")
        if self.admin_host is not None and self.admin_port is None:
            raise ConfigError(
                "--admin-host is of the second listener; give its --admin-port too, or leave it out"
            )
        for origin in self.origins:
            if origin != ANY and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed-origins has {origin!r}, which is no site; give scheme, host and "
                    "port as https://chat.example:8443, without a path"
                )

    @property
    def origins(self) -> tuple[str, ...]:
        """The sites of `allowed_origins`, as browsers write them."""
        named = (self.allowed_origins or "").lower().split(",")
        return tuple(filter(None, map(str.strip, named)))
