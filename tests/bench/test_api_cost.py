"""Benchmark of the cost of APIs, on serializers and on a short run over HTTP."""

import json

import pytest

from bench.serving import api_cost
from tests.support.scripted_model import serving_script


@pytest.mark.matrix
def test_api_cost_writes_serializers_and_streams(tmp_path):
    (tmp_path / "model").mkdir()
    out = tmp_path / "found.json"
    with serving_script(tmp_path / "model", ["An answer of some words."]) as server:
        words = ["--rounds", "2", "--num-tokens", "20", "--streams", "3", "--max-tokens", "8"]
        words += ["--base-url", server.url, "--out", str(out)]
        assert api_cost.main(words) == 0
    found = json.loads(out.read_text())
    for costs in found["events_us_per_token"].values():
        assert all(costs[api]["median"] > 0 for api in api_cost.APIS)
    assert found["share"]["chat"]["median"] == 1
    assert all(found["tokens_per_s"][api]["lowest"] > 0 for api in api_cost.APIS)


def test_api_cost_reports_missing_server(capsys):
    words = ["--rounds", "1", "--num-tokens", "1", "--base-url", "http://127.0.0.1:9"]
    assert api_cost.main(words) == 1
    assert "No server answers" in capsys.readouterr().err
