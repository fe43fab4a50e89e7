"""`/metrics`: vLLM's names, and values from the start."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.boundary.program import StepKind
from shared.engine.metrics import Metrics
from tests.support.echo_engine import FROZEN
from tests.support.http_fixtures import (
    FREEZE,
    Server,
    save_tokenizer,
    serving,
)
from tests.support.toy_backend import ToyBackend, toy_capacity
from tests.support.toy_engine import toy_engine

AS_VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "spec_decode_num_drafts": "counter",
    "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens": "counter",
    "spec_decode_num_accepted_tokens_per_pos": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(["-m", "tests.support.serve_toy"]) as running:
        yield running


def families(server: Server) -> dict[str, str]:
    page = httpx.get(server.url + "/metrics").text
    found = {}
    for family in text_string_to_metric_families(page):
        found[family.name.removeprefix("tandem:")] = family.type
        for sample in family.samples:
            assert sample.name.startswith("tandem:")
            assert sample.labels["model_name"] == "toy"
    return found


def test_metrics_list_vllm_names_before_first_step(server):
    assert AS_VLLM.items() <= families(server).items()
    assert server.metrics()['tandem:request_success_total{finished_reason="stop"}'] == 0


def test_model_card_created_is_server_start(server):
    (card,) = httpx.get(server.url + "/v1/models").json()["data"]
    assert 0 <= time.time() - card["created"] < 3600


def test_metrics_count_request_tokens_steps_and_seconds(server):
    before = server.metrics()
    body = server.complete([5, 6, 7], max_tokens=20, temperature=0, ignore_eos=True)
    server.wait_for_metric("tandem:num_requests_running", 0)
    after = server.metrics()
    added = {name: after[name] - before[name] for name in after}
    histogram = body["speculative"]["accept_length_histogram"]
    accepted = sum(length * steps for length, steps in enumerate(histogram))
    assert accepted > 0
    # An output may end within its last step; the engine counts all of its drafts.
    assert added["tandem:spec_decode_num_accepted_tokens_total"] == accepted
    for position in range(3):
        name = f'tandem:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'
        assert added[name] == sum(histogram[position + 1 :])
    assert added["tandem:spec_decode_num_drafts_total"] == sum(histogram)
    assert added["tandem:prompt_tokens_total"] == 3
    assert added["tandem:generation_tokens_total"] == 20
    assert added['tandem:request_success_total{finished_reason="length"}'] == 1
    assert added["tandem:time_to_first_token_seconds_count"] == 1
    assert added["tandem:inter_token_latency_seconds_count"] == sum(histogram)
    assert added["tandem:e2e_request_latency_seconds_count"] == 1
    assert added["tandem:request_generation_tokens_sum"] == 20


def test_count_drafts_counts_accepted_tokens_per_position():
    metrics = Metrics({}, 3)
    metrics.count_drafts([3, 3, 2, 3], [0, 3, 1, 1])
    found = metrics.snapshot()
    name = 'spec_decode_num_accepted_tokens_per_pos_total{{position="{}"}}'
    assert [found[name.format(position)] for position in range(3)] == [3, 1, 1]
    assert found["spec_decode_num_accepted_tokens_total"] == 5
    metrics.count_drafts([], [])


def test_engine_metrics_exist_before_first_step():
    backend = ToyBackend(toy_capacity(num_pages=40, num_slots=5, overlap=1))
    found = toy_engine(backend).metrics.snapshot()
    assert set(found.values()) <= {0.0, 4.0, 39.0}
    assert any(StepKind.DECODE.value in name for name in found)


def test_metrics_respond_while_first_step_hangs(tmp_path):
    save_tokenizer(tmp_path)
    with serving(["-m", "tests.support.http_fixtures", str(tmp_path)]) as frozen:
        with frozen.post_and_leave(prompt=[FREEZE]):
            frozen.wait_for_line(FROZEN)
        found = frozen.metrics()  # first request of the metrics
        assert found["tandem:num_requests_running"] == 0
        assert found["tandem:request_slots_free"] == 4
        frozen.process.kill()
