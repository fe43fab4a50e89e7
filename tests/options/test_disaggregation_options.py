"""Flags of disaggregated prefill: modes, addresses, unused flags and secrets."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shared.options.command_line import parse
from shared.options.disaggregation import DisaggregationMode, DisaggregationOptions, ServerAddress
from shared.options.flags import ConfigError
from shared.process.disaggregation.kv_transfers import open_record_listeners

URL = "http://10.0.0.2:8000"


def _parsed(words: Sequence[str] = ()) -> DisaggregationOptions:
    return parse(words).disaggregation


def test_modes_have_roles():
    assert _parsed().mode is DisaggregationMode.NONE
    assert _parsed(["--disaggregation-mode", "null"]).mode is DisaggregationMode.NONE
    roles = {mode.spelled: (mode.serves, mode.fetches) for mode in DisaggregationMode}
    assert roles == {
        "none": (False, False),
        "prefill": (True, False),
        "decode": (False, True),
        "peer": (True, True),
    }


@pytest.mark.parametrize(
    ("url", "address"),
    [
        (URL, ServerAddress("10.0.0.2", 8000, False)),
        ("https://prefill.example/", ServerAddress("prefill.example", 443, True)),
        ("http://[::1]:80", ServerAddress("::1", 80, False)),
    ],
)
def test_server_urls_are_parsed(url, address):
    words = ["--disaggregation-mode", "decode", "--prefill-servers", f"{url}, {URL}"]
    assert _parsed(words).servers[0] == address


@pytest.mark.parametrize(
    "url",
    [
        "10.0.0.2:8000",
        "ftp://host",
        "http://host:0",
        "http://host:70000",
        "http://a/b",
        "http://u@h",
    ],
)
def test_invalid_server_url_is_rejected(url):
    with pytest.raises(ConfigError, match="--prefill-servers contains"):
        _parsed(["--disaggregation-mode", "decode", "--prefill-servers", url])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--disaggregation-mode", "decode"), "requires --prefill-servers"),
        (("--disaggregation-mode", "peer"), "requires --prefill-servers"),
        (("--prefill-servers", URL), "requires --disaggregation-mode decode or peer"),
    ],
)
def test_servers_and_mode_require_each_other(words, message):
    with pytest.raises(ConfigError, match=message):
        _parsed(words)


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        ((), None),
        (("--remote-prefill-timeout", "5"), "--remote-prefill-timeout"),
        (("--disaggregation-buffer-mib", "5"), "--disaggregation-buffer-mib"),
        (("--disaggregation-mode", "prefill", "--disaggregation-buffer-mib", "5"), None),
        (
            ("--disaggregation-mode", "prefill", "--remote-prefill-min-tokens", "5"),
            "--remote-prefill-min-tokens",
        ),
        (
            ("--disaggregation-mode", "decode", "--prefill-servers", URL)
            + ("--disaggregation-ticket-timeout", "5"),
            "--disaggregation-ticket-timeout",
        ),
    ],
)
def test_flags_without_effect_are_found(words, unused):
    options = parse(words)
    assert options.disaggregation.unused_flag(options.explicit_flags) == unused


def test_missing_nixl_package_names_extra(monkeypatch):
    monkeypatch.setattr("shared.options.disaggregation.find_spec", lambda name: None)
    options = DisaggregationOptions(disaggregation_transfer_backend="nixl")
    assert options.backend_fault() == (
        "--disaggregation-transfer-backend nixl requires the package nixl; install the extra "
        "nixl, or remove the flag"
    )


def test_secret_is_read_and_checked(tmp_path):
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    words = ["--disaggregation-secret-file", str(path)]
    assert _parsed().secret() is None
    assert _parsed(words).secret() == "0123456789abcdef"
    for text in ("short", "0123456789abcde\nf", "0123456789abcdé f"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="at least 16 printable ASCII characters"):
            _parsed(words).secret()


def test_reachable_transfer_port_requires_secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef")
    words = ["--disaggregation-mode", "prefill", "--host", "0.0.0.0", "--api-key", "key"]
    with pytest.raises(ConfigError, match="requires --disaggregation-secret-file"):
        open_record_listeners(parse(words))
    for more in (["--disaggregation-secret-file", str(path)], ["--allow-unauthenticated"]):
        for listener in open_record_listeners(parse([*words, *more])):
            listener.close()
    assert open_record_listeners(parse([])) == []
