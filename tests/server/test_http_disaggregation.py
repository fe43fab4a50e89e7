"""Prefill and decode servers in processes of their own: equal output, faults, aborts and leaks."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.boundary.kv_transfer import TransferHeader, TransferRecord
from shared.cluster.transfer.counters import TransferCounters
from shared.cluster.transfer.deadline import Deadline
from shared.cluster.transfer.record_client import MAX_IDLE_CONNECTIONS, RecordClient
from shared.cluster.transfer.ticket import Ticket
from tests.support.http_fixtures import Server, serving
from tests.support.polling import wait_until
from tests.support.tiny_models import write_tiny

SECRET = "0123456789abcdef"
PAGE, VOCAB = 16, 272
TIMEOUT_S = 60
IMPORTED = "kv_transfer_imported_tokens_total"
IDLE = {
    "num_requests_running": 0,
    "num_requests_waiting": 0,
    "request_slots_free": 4,
    "kv_cache_usage_perc": 0,
    "kv_transfer_held_bytes": 0,
    "kv_transfer_waiting_requests": 0,
    "kv_transfer_received_bytes": 0,
}
"""Metrics of an idle server; a server has those of its mode."""


def _command(folder: Path, more: str) -> list[str]:
    words = ["-m", "tests.support.serve_reference", "--port", "0", "--model-path", str(folder)]
    words += ["--speculative-algorithm", "NEXTN", "--max-running-requests", "4"]
    return [*words, "--page-size", str(PAGE), "--max-total-tokens", "4096", *more.split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_tiny(made / "model", "qwen3_5", seed=1)
    (made / "secret").write_text(SECRET)
    return made


def _prefill_server(
    folder: Path, backend: str = "auto"
) -> contextlib.AbstractContextManager[Server]:
    more = (
        f"--disaggregation-mode prefill --disaggregation-transfer-backend {backend} "
        "--chunked-prefill-size 64 "
        f"--disaggregation-secret-file {folder / 'secret'}"
    )
    return serving(_command(folder / "model", more))


def _decode_server(
    folder: Path, url: str, backend: str = "auto", timeout_s: int = TIMEOUT_S
) -> contextlib.AbstractContextManager[Server]:
    more = (
        f"--disaggregation-mode decode --prefill-servers {url} "
        f"--disaggregation-transfer-backend {backend} "
        f"--disaggregation-secret-file {folder / 'secret'} "
        f"--remote-prefill-min-tokens 32 --remote-prefill-timeout {timeout_s}"
    )
    return serving(_command(folder / "model", more))


@pytest.fixture(scope="module")
def prefill(folder) -> Iterator[Server]:
    with _prefill_server(folder) as running:
        yield running


@pytest.fixture(scope="module")
def decode(folder, prefill) -> Iterator[Server]:
    with _decode_server(folder, prefill.url) as running:
        yield running


def prompt_of(seed: int, count: int = 100) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(count)]


def _cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def _output(answer: dict[str, Any]) -> tuple[Any, Any]:
    """Tokens, and verify steps with accept lengths."""
    choices = [choice["token_ids"] for choice in answer["choices"]]
    return choices, answer["speculative"]


def _metrics(server: Server) -> dict[str, float]:
    return {name.removeprefix("tandem:"): value for name, value in server.metrics().items()}


def _failures(server: Server) -> dict[str, float]:
    name = 'kv_transfer_failures_total{reason="'
    found = _metrics(server).items()
    return {key.removeprefix(name)[:-2]: value for key, value in found if key.startswith(name)}


@pytest.mark.parametrize("temperature", [0, 1])
def test_transferred_prompt_keeps_output(prefill, decode, temperature):
    fields = {"max_tokens": 24, "temperature": temperature, "seed": 5, "return_token_ids": True}
    prompt = prompt_of(temperature)
    before = _metrics(decode)[IMPORTED]
    remote = decode.complete(prompt, **fields)
    assert _metrics(decode)[IMPORTED] - before == _cached(remote) == 64
    assert _output(remote) == _output(prefill.complete(prompt, **fields))
    assert remote["speculative"]["verify_steps"] > 0


def test_long_prompt_is_transferred_in_parts(prefill, decode):
    def received() -> float:
        name = "kv_transfer_records_total{"
        found = _metrics(decode).items()
        return sum(x for key, x in found if key.startswith(name) and "received" in key)

    prompt, before = prompt_of(60, 200), received()
    fields = {"max_tokens": 24, "temperature": 0, "return_token_ids": True}
    remote = decode.complete(prompt, **fields)
    assert _cached(remote) == 192
    assert received() - before > 1
    assert _output(remote) == _output(prefill.complete(prompt, **fields))


def test_kv_transfer_requires_secret(prefill):
    body = {"tokens": prompt_of(50)}
    for key in ({}, {"authorization": "Bearer wrong"}):
        response = httpx.post(prefill.url + "/kv_transfer", json=body, headers=key, timeout=60)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"


def _ticket(server: Server, **body: Any) -> httpx.Response:
    key = {"authorization": f"Bearer {SECRET}"}
    return httpx.post(server.url + "/kv_transfer", json=body, headers=key, timeout=60)


def _fetch(tickets: list[Ticket]) -> list[TransferHeader]:
    """Fetches and releases the records of tickets, and returns their headers."""
    headers = [TransferHeader.from_fields(ticket.header) for ticket in tickets]
    client = RecordClient("auto", SECRET.encode(), 1 << 30, TransferCounters(), None)
    for ticket, header in zip(tickets, headers, strict=True):
        fetched = client.fetch(ticket, Deadline(10))
        TransferRecord.checked(header, fetched.body, ticket.checksum)
        fetched.release()
    client.close()
    return headers


def test_kv_transfer_responds_with_tickets(prefill):
    lines = _ticket(prefill, tokens=prompt_of(51), tenant="a").text.splitlines()
    tickets = list(map(json.loads, lines))
    assert [ticket["header"]["is_last"] for ticket in tickets] == [False, True]
    for ticket in tickets:
        assert ticket["header"]["tenant"] == "a"
        assert ticket["header"]["num_pages"] * PAGE == 64
        assert ticket["num_bytes"] > 0
    held = sum(ticket["num_bytes"] for ticket in tickets)
    assert _metrics(prefill)["kv_transfer_held_bytes"] >= held
    _fetch([Ticket.from_fields(ticket, "127.0.0.1") for ticket in tickets])
    _check_idle(prefill)


IMAGE = {"first": 0, "height": 8, "width": 8, "pixels": "AAAA"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tokens": []}, "tokens"),
        ({"tokens": [VOCAB]}, "tokens"),
        ({"tokens": [5] * 5000}, "tokens"),
        ({"tokens": [5], "tenant": 1}, "tenant"),
        (
            {"tokens": [5], "images": [{"first": 0, "height": 8, "width": 8, "pixels": "AAAA"}]},
            "images",
        ),
        ({"tokens": [5], "more": 1}, "more"),
    ],
    ids=["empty", "unknown token", "too long", "tenant", "image", "field"],
)
def test_kv_transfer_rejects_invalid_body(prefill, body, param):
    response = _ticket(prefill, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.matrix
def test_prompts_under_load_keep_their_snapshots(prefill):
    """24 prompts of a server with 4 slots: the record of each has 64 tokens and a snapshot."""
    exported = "kv_transfer_exported_tokens_total"
    before = _metrics(prefill)[exported]
    with ThreadPoolExecutor(24) as threads:
        responses = threads.map(lambda n: _ticket(prefill, tokens=prompt_of(4000 + n)), range(24))
        lines = [line for response in responses for line in response.text.splitlines()]
    headers = _fetch([Ticket.from_fields(json.loads(line), "127.0.0.1") for line in lines])
    last = [(each.num_tokens, each.has_snapshot) for each in headers if each.is_last]
    assert last == [(64, True)] * 24
    assert _metrics(prefill)[exported] - before == 24 * 64
    _check_idle(prefill)


def test_decode_server_has_no_kv_transfer(decode):
    assert _ticket(decode, tokens=[5]).status_code == 404


def test_short_prompt_is_not_transferred(decode):
    before = _metrics(decode)[IMPORTED]
    decode.complete(prompt_of(52, 31), max_tokens=1)
    assert _metrics(decode)[IMPORTED] == before


def test_requests_with_aborts_leak_nothing(prefill, decode):
    """Clients disconnect after random times; the others receive the right text."""
    _send_with_aborts(prefill, decode, 12)


@pytest.mark.matrix
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_many_aborts_leak_nothing(prefill, folder, backend):
    sent = f'kv_transfer_records_total{{backend="{backend}",direction="received"}}'
    with _decode_server(folder, prefill.url, backend) as decode:
        decode.complete(prompt_of(998, 200), max_tokens=1)
        parts = _metrics(decode)[sent]
        assert parts > 1
        _send_with_aborts(prefill, decode, 500, 200)
        assert _metrics(decode)[sent] > parts


def _send_with_aborts(prefill: Server, decode: Server, count: int, num_tokens: int = 100) -> None:
    prompts = [prompt_of(1000 + number, num_tokens) for number in range(20)]
    fields = {"max_tokens": 4, "temperature": 0, "return_token_ids": True}
    right = [_output(prefill.complete(prompt, **fields))[0] for prompt in prompts]
    rng, segments = random.Random(0), set(Path("/dev/shm").iterdir())
    decode.complete(prompt_of(999), **fields)
    before = [len(_descriptors(server)) for server in (prefill, decode)]
    patience = [rng.choice((0.02, 0.1, 0.3, None, None)) for _ in range(count)]

    def send(number: int) -> list[Any] | None:
        """Returns the output; None if the client has disconnected."""
        prompt, wait_s = prompts[number % 20], patience[number]
        if wait_s is not None:  # a prompt that no other client has sent
            prompt = [*prompt[:50], *prompt_of(number, num_tokens - 50)]
        body = {"prompt": prompt, **fields}
        try:
            response = httpx.post(decode.url + "/v1/completions", json=body, timeout=wait_s or 60)
        except httpx.TimeoutException:
            return None
        assert response.status_code == 200, response.text
        return None if wait_s is not None else _output(response.json())[0]

    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(send, range(count)))
    whole = [number for number in range(count) if patience[number] is None]
    assert [found[number] for number in whole] == [right[number % 20] for number in whole]
    for server in (prefill, decode):
        _check_idle(server)
    assert set(Path("/dev/shm").iterdir()) <= segments
    servers = (prefill, decode)
    most = [count + MAX_IDLE_CONNECTIONS for count in before]

    def are_closed() -> bool:
        return all(len(_descriptors(each)) <= at for each, at in zip(servers, most, strict=True))

    assert wait_until(are_closed, 40), (most, list(map(_descriptors, servers)))


def _descriptors(server: Server) -> list[str]:
    found = list[str]()
    for file in (file for pid in server.pids() for file in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(file))
    return sorted(found)


def _check_idle(server: Server) -> None:
    """Asserts that a server holds no slot, no page outside its cache, and no record."""
    wanted = {name: IDLE[name] for name in IDLE.keys() & _metrics(server).keys()}

    def is_idle() -> bool:
        return wanted.items() <= _metrics(server).items()

    assert wait_until(is_idle, 40), _metrics(server)


def _complete_locally(server: Server, reason: str, seed: int) -> None:
    """Asserts that a prompt is prefilled locally for a reason."""
    answer = server.complete(prompt_of(seed), max_tokens=2)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert _cached(answer) == 0
    assert _failures(server).get(reason) == 1, _failures(server)


@pytest.mark.matrix
@pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is the extra nixl")
def test_nixl_transfer_keeps_output(folder):
    fields = {"max_tokens": 24, "temperature": 0, "return_token_ids": True}
    with (
        _prefill_server(folder, "nixl") as prefill,
        _decode_server(folder, prefill.url, "nixl") as decode,
    ):
        for seed in range(3):
            prompt = prompt_of(seed, 200)
            remote = decode.complete(prompt, **fields)
            assert _cached(remote) == 192, _failures(decode)
            assert _output(remote) == _output(prefill.complete(prompt, **fields))
        received = 'kv_transfer_records_total{backend="nixl",direction="received"}'
        assert _metrics(decode)[received] > 3  # parts
        for server in (prefill, decode):
            _check_idle(server)


@pytest.mark.matrix
def test_lost_prefill_server_loses_no_request(folder):
    """A prefill server is stopped by SIGSTOP, then killed."""
    with (
        _prefill_server(folder) as prefill,
        _decode_server(folder, prefill.url, timeout_s=3) as decode,
    ):
        assert _cached(decode.complete(prompt_of(0), max_tokens=2)) == 64
        for pid in prefill.pids():
            os.kill(pid, signal.SIGSTOP)
        _complete_locally(decode, "timeout", 1)
        for pid in prefill.pids():
            os.kill(pid, signal.SIGKILL)
        prefill.process.wait(10)
        _complete_locally(decode, "unreachable", 2)
        assert decode.process.poll() is None
    assert any("prefilled locally" in line for line in decode.lines)


@pytest.mark.matrix
def test_killed_decode_server_frees_records(folder, prefill):
    with _decode_server(folder, prefill.url) as decode:
        body = {"prompt": prompt_of(70, 1500), "max_tokens": 2}
        with ThreadPoolExecutor(1) as thread:
            sent = thread.submit(
                lambda: httpx.post(decode.url + "/v1/completions", json=body, timeout=60)
            )
            assert wait_until(lambda: _metrics(prefill)["num_requests_running"] > 0)
            pids = decode.pids()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                sent.result()
        decode.process.wait(10)
    _check_idle(prefill)


@pytest.mark.matrix
def test_other_weights_lead_to_local_prefill(folder, tmp_path):
    write_tiny(tmp_path / "model", "qwen3_5", seed=2)
    (tmp_path / "secret").write_text(SECRET)
    with _prefill_server(tmp_path) as other, _decode_server(folder, other.url) as decode:
        _complete_locally(decode, "fingerprint", 3)
