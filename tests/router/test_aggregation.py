"""Routes that the router answers itself, and routes that it does not forward."""

import pytest

from shared.options.router import CACHE_AWARE
from shared.router.aggregation import HELP
from tests.support.fake_server import MODEL
from tests.support.routing import Routed, is_down, run, until

KEY = "secret"


def test_metrics_have_replica_label():
    async def scenario(found: Routed) -> None:
        for _ in range(3):
            await found.post(prompt="a")
        page = (await found.client.get("/metrics")).text
        rows = dict(row.rsplit(" ", 1) for row in page.splitlines() if not row.startswith("#"))
        for each in found.replicas:
            assert rows[f'tandem:x_total{{replica="{each.name}"}}'] == "1.0"
            assert rows[f'tandem:router_replica_up{{replica="{each.name}"}}'] == "1.0"
        forwarded = [float(v) for k, v in rows.items() if "router_requests_total" in k]
        assert sum(forwarded) == 3
        assert page.count("# TYPE tandem:x_total counter") == 1
        assert all(f"# HELP tandem:{name}" in page for name in HELP)

    run(scenario, 2)


def test_models_of_replicas_appear_once():
    async def scenario(found: Routed) -> None:
        cards = (await found.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == [MODEL]

    run(scenario, 3)


def test_capabilities_separate_shared_and_own_fields():
    async def scenario(found: Routed) -> None:
        fields = (await found.client.get("/capabilities")).json()
        assert fields["limits"] == {"n": 1}
        assert [each["port"] for each in fields["replicas"]] == [x.url for x in found.servers]
        assert "port" not in fields

    run(scenario, 2)


def test_trace_is_found_on_its_replica():
    async def scenario(found: Routed) -> None:
        for each in found.servers:
            name = each.url.rpartition(":")[2]
            assert (await found.client.get(f"/v1/requests/{name}/trace")).json()["id"] == each.url
        missing = await found.client.get("/v1/requests/none/trace")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "trace_not_found")

    run(scenario, 3)


@pytest.mark.parametrize("path", ["/add_external_corpus", "/list_external_corpora", "/kv_transfer"])
def test_admin_routes_are_not_forwarded(path):
    async def scenario(found: Routed) -> None:
        response = await found.client.post(path, json={})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_forwarded")
        assert found.served() == [0]

    run(scenario, 1)


def test_health_follows_replicas():
    async def scenario(found: Routed) -> None:
        assert (await found.client.get("/health")).status_code == 200
        found.servers[0].drains = True
        await until(lambda: not found.replicas.ready)
        response = await found.client.get("/health")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_replica")
        assert (await found.client.get("/live")).status_code == 200
        found.servers[0].drains, found.servers[0].health = False, 500
        await until(lambda: is_down(found, 0))

    run(scenario, 1)


def test_draining_router_rejects_requests():
    async def scenario(found: Routed) -> None:
        found.routes.drains = True
        for response in (await found.post(prompt="a"), await found.client.get("/health")):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")

    run(scenario, 1)


def test_api_key_is_required_and_forwarded():
    async def scenario(found: Routed) -> None:
        rejected = await found.post(prompt="a")
        assert (rejected.status_code, rejected.json()["error"]["code"]) == (401, "invalid_api_key")
        headers = {"authorization": f"Bearer {KEY}"}
        response = await found.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert response.status_code == 200
        assert b"authorization" in found.servers[0].headers[-1]
        assert (await found.client.get("/live")).status_code == 200

    run(scenario, 1, policy=CACHE_AWARE, key=KEY)


def test_large_body_is_rejected():
    async def scenario(found: Routed) -> None:
        response = await found.client.post("/v1/completions", content=b" " * (9 << 20))
        assert (response.status_code, response.json()["error"]["code"]) == (
            413,
            "request_too_large",
        )
        assert found.served() == [0]

    run(scenario, 1)
