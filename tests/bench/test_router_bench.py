"""Hit rates of routing policies on a small workload, and a short run of the overhead benchmark."""

import json
import os
from types import SimpleNamespace

import pytest

from bench.serving import live_hit_rate, router_hit_rate, router_overhead
from shared.options.router import CACHE_AWARE, LEAST_LOAD, ROUND_ROBIN


def test_prefix_policies_approach_single_cache():
    found = router_hit_rate.simulated(router_hit_rate.workload(40, 5), 4, 3)
    rates = {name.partition(" (")[0]: each["hit_rate"] for name, each in found.items()}
    single = rates["single"]
    assert rates["longest prefix"] >= 0.95 * single
    assert rates[CACHE_AWARE] >= 0.9 * single
    assert max(rates[ROUND_ROBIN], rates[LEAST_LOAD]) < 0.8 * single


def test_workload_is_reproducible():
    assert router_hit_rate.workload(3, 2) == router_hit_rate.workload(3, 2)
    chats = router_hit_rate.workload(3, 2)
    assert [len(chat) for chat in chats] == [5] * 3
    assert chats[0][0] == chats[1][0]
    assert chats[0][1] != chats[1][1]


def test_router_overhead_keeps_rows_before_failure(tmp_path, monkeypatch):
    def measured(urls, router, load, rounds):
        if load.streams > 1:
            raise ConnectionError("the stream ended early")
        return {"streams": load.streams}

    server = SimpleNamespace(url="http://127.0.0.1:1", process=SimpleNamespace(pid=os.getpid()))
    monkeypatch.setattr(router_overhead, "servers", lambda *_: (server, server))
    monkeypatch.setattr(router_overhead, "compared", measured)
    path = tmp_path / "found.json"
    with pytest.raises(ConnectionError):
        router_overhead.main(["--streams", "1", "8", "--out", str(path)])
    assert json.loads(path.read_text())["rows"] == [{"streams": 1}]


@pytest.mark.matrix
def test_router_overhead_writes_both_sides(tmp_path):
    path = tmp_path / "found.json"
    words = ["--streams", "2", "--seconds", "1", "--rounds", "1", "--events", "4"]
    words += ["--pace-ms", "5", "--out"]
    assert router_overhead.main([*words, str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["bare"]["requests"] > 1
    assert row["throughput_share"] > 0


@pytest.mark.matrix
def test_live_hits_of_prefix_policy_exceed_round_robin(tmp_path):
    path = tmp_path / "found.json"
    words = ["--users", "8", "--turns", "3", "--replicas", "2", "--think-s", "0.1"]
    assert live_hit_rate.main([*words, "--out", str(path)]) == 0
    rows = {row["policy"]: row for row in json.loads(path.read_text())["rows"]}
    assert len({row["prompt_tokens"] for row in rows.values()}) == 1
    assert rows["longest prefix"]["hit_rate"] > rows[ROUND_ROBIN]["hit_rate"] > 0
    assert rows["single"]["busiest"] == 1.0
