"""Benchmark client of a server: counts, latencies and errors."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator

import numpy as np
import pytest
from matplotlib.figure import Figure

from bench.serving import html_report as serving_page
from bench.serving import metrics as serving_numbers
from bench.serving import run as serving
from bench.serving import send_one
from bench.serving.client import Client, Reply, Run, arrivals, run_load
from bench.serving.prompt_sets import COMPLETIONS, NAMES, Ask, RandomLengths, asks
from models.demo.data import KINDS
from tests.support import http_fixtures
from tests.support.http_fixtures import (
    FAIL,
    MAX_OPEN,
    SLOW,
    TOKENS_PER_STEP,
    Server,
    is_alive,
    save_tokenizer,
)

SECRET = "k3y-of-nobody"
LENGTHS = RandomLengths(input=12, output=10, range_ratio=1.0, vocab=256)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    with http_fixtures.serving(["-m", "tests.support.http_fixtures", str(folder)]) as running:
        yield running


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_serving_bench_counts_and_writes_results(server, flag, tmp_path, capsys):
    out, html = tmp_path / "run.json", tmp_path / "run.html"
    words = ["--base-url", server.url + "/v1/", "--dataset-name", "random", "--num-prompts", "12"]
    words += ["--random-input-len", "12", "--random-output-len", "10", "--random-vocab", "128"]
    words += ["--request-rate", "200", "--max-concurrency", "4", "--api-key", SECRET]
    assert serving.main([*words, flag, "--out", str(out), "--html", str(html)]) == 0
    found, page = json.loads(out.read_text()), html.read_text()
    numbers = found["summary"]
    assert (numbers["completed"], numbers["errors"]) == (12, {})
    assert (numbers["prompt_tokens"], numbers["output_tokens"]) == (144, 120)
    # A first token, and nine more of verify steps that accept all they draft.
    steps, drafts = 12 * 9 // TOKENS_PER_STEP, TOKENS_PER_STEP - 1
    assert numbers["accepted"] == {"source": "answers", "histogram": [0] * drafts + [steps]}
    assert numbers["accept_length"] == TOKENS_PER_STEP
    speed = numbers["output_tokens_per_s"]
    assert speed == pytest.approx(120 / numbers["seconds"], rel=1e-2)  # the file rounds
    assert numbers["concurrency"] <= 4
    assert {r["tokens"] for r in found["requests"]} == {10}
    timed = {name for name in serving_numbers.TIMES if numbers[name]}
    assert timed == (set(serving_numbers.TIMES) if flag == "--stream" else {"e2e_ms"})
    shown = capsys.readouterr().out
    for words in ("Acceptance length", "Request throughput", "p99", f"{speed:.1f}"):
        assert words in shown
        assert words in page
    for text in (out.read_text(), page):
        assert SECRET not in text


def test_serving_page_is_self_contained_with_plots(server, tmp_path):
    html = tmp_path / "run.html"
    words = ["--base-url", server.url, "--num-prompts", "3", "--max-tokens", "9"]
    assert serving.main([*words, "--dataset-name", "copying", "--html", str(html)]) == 0
    page = html.read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"<(script|link|img|iframe|object)\b|\b(src|@import)\s*[=(]", page)
    # XML namespaces are not requested by a browser.
    hosts = set(re.findall(r"https?://([^/\"' <:]+)", page))
    assert hosts == {"www.w3.org", "127.0.0.1"}
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]+)', page))
    assert page.count("<svg") == page.count("<figure>") == 7


def test_serving_plots_have_integer_ticks():
    replies = [Reply(0.1 * i, [0.1, 0.2], 0.3, prompt_tokens=7, tokens=2) for i in range(3)]
    for draw in (serving_page.course, serving_page.under_way):
        axes = Figure((5.4, 2.7)).subplots()
        draw(axes, replies)
        low, high = sorted(axes.get_ylim())
        ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
        assert len(ticks) > 1
        assert all(tick == round(tick) for tick in ticks)


def test_summary_latency_definitions():
    """TPOT is of a token, ITL of an event, which may have several."""
    reply = Reply(5.0, [0.1, 0.2, 0.5], 0.6, prompt_tokens=7, tokens=9)
    alone = Reply(5.0, [0.3], 0.3, prompt_tokens=1, tokens=1)
    lost = Reply(5.0, [0.1], 9.9, error="500 server_error", reason="it broke")
    found = serving_numbers.summary(Run([reply, alone, lost], 2.0), True, None, None)
    assert found["errors"] == {"500 server_error": {"count": 1, "first": "it broke"}}
    assert (found["completed"], found["output_tokens"]) == (2, 10)
    assert (found["requests_per_s"], found["output_tokens_per_s"]) == (1.0, 5.0)
    assert found["total_tokens_per_s"] == 9.0
    assert found["ttft_ms"]["mean"] == pytest.approx(200)
    assert found["itl_ms"] == pytest.approx({"mean": 200, "median": 200, "p90": 280, "p99": 298})
    assert found["tpot_ms"]["mean"] == pytest.approx(500 / 8)
    assert found["e2e_ms"]["mean"] == pytest.approx(450)
    assert found["accept_length"] is None
    whole = serving_numbers.summary(Run([reply], 2.0), False, None, None)
    assert (whole["ttft_ms"], whole["itl_ms"], whole["tpot_ms"]) == (None, None, None)


def test_summary_acceptance_from_responses_or_counters():
    told = [Reply(0, tokens=4, histogram=[1, 0, 3]), Reply(0, tokens=4, histogram=[2, 0, 0])]
    found = serving_numbers.summary(Run(told, 1.0), True, (0, 0), (50, 50))
    assert found["accept_length"] == 2.0
    assert found["accepted"]["histogram"] == [3, 0, 3]
    untold = Run([Reply(0, tokens=4)], 1.0)
    counted = serving_numbers.summary(untold, True, (10, 20), (14, 30))
    assert (counted["accept_length"], counted["accepted"]["source"]) == (3.5, "metrics")
    assert serving_numbers.summary(untold, True, None, None)["accept_length"] is None


def test_accept_counters_read_in_every_spelling(server):
    page = '# HELP x\nvllm:spec_decode_num_drafts_total{model_name="a"} 4.0\n'
    page += 'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 9.0\nother_total 7\n'

    async def counted(page: str | None):
        async with Client(server.url, None, 5) as client:
            if page is not None:
                client._http = _Page(client._http, page)
            return await client.accept_counters()

    assert asyncio.run(counted(page)) == (4.0, 9.0)
    assert asyncio.run(counted("nothing 1\n")) is None


class _Page:
    """A client that receives one page for every request."""

    def __init__(self, http, page: str) -> None:
        self.aclose, self.text = http.aclose, page

    async def get(self, path: str):
        return self


def loaded(url: str, requests: list[Ask], streams: bool) -> list[Reply]:
    async def load() -> Run:
        async with Client(url, None, 10) as client:
            how = {"rate": math.inf, "most": None, "seed": 0}
            return await run_load(client, requests, **how, streams=streams, done=lambda: None)

    return asyncio.run(load()).replies


def wait_until_empty(server: Server) -> None:
    """Disconnected requests occupy the engine until their abort arrives."""
    deadline = time.monotonic() + 30
    while server.post(COMPLETIONS, prompt=[[97]] * MAX_OPEN, max_tokens=1).status_code == 503:
        assert time.monotonic() < deadline, "the server stays full"
        time.sleep(0.05)


@pytest.mark.parametrize("streams", [True, False])
def test_summary_groups_errors_and_counts_others(server, streams):
    body = {"max_tokens": 8, "temperature": 0}
    good = Ask(COMPLETIONS, {"prompt": "abcdefgh", **body})
    wrong = good.with_fields(temperature=9)
    failing = good.with_fields(prompt=[FAIL, 97])
    wait_until_empty(server)
    with server.post_slowly(MAX_OPEN - 2):
        full = good.with_fields(prompt=[[97]] * 3)
        replies = loaded(server.url, [wrong, full], streams)
    replies += loaded(server.url, [failing, good], streams)
    kinds = [reply.error for reply in replies]
    # A stream has begun when its row fails.
    failed = "server_error" if streams else "500 server_error"
    assert kinds == ["400 invalid_request_error", "503 queue_full", failed, None]
    assert "temperature" in replies[0].reason
    assert (replies[3].text, replies[3].tokens) == ("abcdefgh", 8)
    assert len(replies[3].times_s) == (4 if streams else 1)


def test_server_exit_is_error_of_each_request(tmp_path):
    with http_fixtures.serving(["-m", "tests.support.http_fixtures", str(tmp_path)]) as own:
        ask = Ask(COMPLETIONS, {"prompt": [SLOW, 97], "max_tokens": 300})

        pids = own.pids()

        async def cut() -> Run:
            async with Client(own.url, None, 10) as client:
                asyncio.get_running_loop().call_later(0.5, own.process.kill)
                how = {"rate": math.inf, "most": None, "seed": 0, "streams": True}
                return await run_load(client, [ask] * 3, **how, done=lambda: None)

        replies = asyncio.run(cut()).replies
        assert all(reply.error for reply in replies)
        while any(map(is_alive, pids)):
            time.sleep(0.02)
        assert serving.main(["--base-url", own.url]) == 2
        assert send_one.main(["--base-url", own.url]) == 2


class Recorder:
    """A client that answers after a while, and notes how many wait."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s, self.waiting, self.most, self.sent = wait_s, 0, 0, list[float]()

    async def ask(self, ask: Ask, streams: bool, zero_s: float) -> Reply:
        self.sent.append(time.perf_counter() - zero_s)
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(self.wait_s)
        self.waiting -= 1
        return Reply(self.sent[-1])


def driven(rate: float, most: int | None, count: int, wait_s: float, seed: int = 3) -> Recorder:
    client = Recorder(wait_s)
    requests = [Ask(COMPLETIONS, {})] * count
    how = {"rate": rate, "most": most, "streams": True, "seed": seed, "done": lambda: None}
    asyncio.run(run_load(client, requests, **how))
    return client


def test_arrivals_follow_poisson_process_within_concurrency():
    gaps = np.diff(arrivals(4000, 5.0, seed=3))
    # Of exponential gaps: a mean of 1 / rate, and as large a deviation; 4,000 stray by 2 and 3 %.
    assert np.mean(gaps) == pytest.approx(1 / 5, rel=0.08)
    assert np.std(gaps) == pytest.approx(1 / 5, rel=0.12)
    sent = driven(rate=100, most=None, count=20, wait_s=0).sent
    planned = arrivals(20, 100, seed=3)
    assert all(at >= when - 1e-3 for at, when in zip(sent, planned, strict=True))
    assert driven(rate=math.inf, most=None, count=20, wait_s=0.01).most == 20
    assert driven(rate=math.inf, most=3, count=20, wait_s=0.01).most == 3


def test_asks_reproducible_per_seed():
    for name in NAMES:
        first, again, other = (asks(name, 8, seed, LENGTHS) for seed in (4, 4, 5))
        assert first == again != other
    assert set(KINDS) < set(NAMES)
    shares = RandomLengths(input=100, output=100, range_ratio=0.5, vocab=50)
    for ask in asks("random", 50, 0, shares):
        assert 50 <= len(ask.body["prompt"]) <= 100
        assert 50 <= ask.body["max_tokens"] <= 100
        assert max(ask.body["prompt"]) < 50
    with pytest.raises(ValueError, match="from 0 to 1"):
        asks("random", 1, 0, RandomLengths(input=1, output=1, range_ratio=2.0, vocab=50))
    with pytest.raises(ValueError, match="need lengths"):
        asks("random", 1, 0, None)
    with pytest.raises(ValueError, match="no set of prompts 'wikitext'"):
        asks("wikitext", 1, 0, LENGTHS)


def test_send_one_prints_latency_tokens_acceptance_and_speed(server, capsys):
    words = ["--base-url", server.url, "--prompt", "abcdefghij", "--max-tokens", "10"]
    assert send_one.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "abcdefghi"  # one of the ten begins the message
    headings = [word.strip() for word in lines[2].strip("┃").split("┃")]
    assert headings == ["Latency (s)", "Tokens", "Acc Length", "Speed (token/s)"]
    latency, tokens, length, speed = re.findall(r"[\d.]+", lines[4])
    assert (tokens, length) == ("10", "3.00")
    assert float(speed) == pytest.approx(10 / float(latency), rel=0.2)  # the table rounds
    assert send_one.main([*words, "--temperature", "9"]) == 1
    assert "temperature" in capsys.readouterr().err


def test_serving_page_equals_page_of_result_file(server, tmp_path):
    """Whoever kept the file can have the page, and it is the same."""
    out, html = tmp_path / "run.json", tmp_path / "run.html"
    words = ["--base-url", server.url, "--num-prompts", "2", "--max-tokens", "5"]
    assert serving.main([*words, "--out", str(out), "--html", str(html)]) == 0
    assert serving_page.page(json.loads(out.read_text())) == html.read_text()
