from __future__ import annotations

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from server.engine.tokenizer import Tokenizer
from server.telemetry.latency import RequestMetrics
from server.telemetry.record import PhaseName
from server.telemetry.rooms import RoomRecords
from tests.api.fakes import FakeBackend
from tests.api.harness import client_of, complete, error_of


async def test_models(client: httpx.AsyncClient) -> None:
    [card] = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 256)
    assert (await client.get("/v1/models/tiny")).json() == card
    assert (await client.get("/v1/models/")).json() == {"object": "list", "data": [card]}
    assert error_of(await client.get("/v1/models/some/other"), 404)["code"] == "model_not_found"


async def test_the_description_of_the_api_is_there_but_no_page_that_needs_the_internet(
    client: httpx.AsyncClient,
) -> None:
    assert (await client.get("/openapi.json")).json()["info"]["title"] == "dsv4-pd-server"
    for page in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert (await client.get(page)).status_code == 404


async def test_health_and_readiness_give_the_reason(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    assert (await client.get("/health")).json() == {"status": "ok", "role": "decode", "reason": "running"}
    assert (await client.get("/ready")).status_code == 200
    backend.health = (False, "engine thread died: boom")
    backend.readiness = (False, "no prefill node answers")
    for path, reason in [("/health", "engine thread died: boom"), ("/ready", "no prefill node answers")]:
        answer = await client.get(path)
        assert error_of(answer, 503)["message"] == reason
        assert "retry-after" in answer.headers


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics", "/server_info"])
def test_head_is_get_without_the_body(server_url: str, backend: FakeBackend, path: str) -> None:
    backend.readiness = (False, "no prefill node answers")
    with httpx.Client(base_url=server_url) as client:
        answers = [client.request(method, path) for method in ("GET", "HEAD", "GET")]
    get, without_body, again = answers
    assert get.status_code == without_body.status_code == again.status_code == (503 if path == "/ready" else 200)
    assert without_body.content == b""
    assert {*get.headers} == {*without_body.headers}


async def test_head_of_a_route_without_get_is_a_405(client: httpx.AsyncClient) -> None:
    assert (await client.head("/v1/completions")).status_code == 405


async def test_server_and_model_info(client: httpx.AsyncClient) -> None:
    info = (await client.get("/server_info")).json()
    assert info["served_model_name"] == "tiny"
    assert info["disaggregation_mode"] == "decode"
    assert info["pages"] == 64
    model = (await client.get("/model_info")).json()
    assert model["architectures"] == ["DeepseekV4ForCausalLM"]
    assert "pages" not in model


async def test_metrics_show_the_registry_and_the_answers(
    client: httpx.AsyncClient, registry: CollectorRegistry
) -> None:
    Gauge("pd_slots", "slots", ["state"], registry=registry).labels(state="free").set(3)
    await complete(client)
    await complete(client, n=0)
    await client.get("/v1/models/what/ever")
    text = (await client.get("/metrics")).text
    assert 'pd_slots{state="free"} 3.0' in text
    assert 'pd_http_responses_total{route="/v1/completions",status="200"} 1.0' in text
    assert 'pd_http_responses_total{route="/v1/completions",status="400"} 1.0' in text
    assert 'pd_http_responses_total{route="/v1/models/{model_id:path}",status="404"} 1.0' in text


@pytest.mark.parametrize(
    "accept",
    ["application/openmetrics-text", "application/openmetrics-text;version=1.0.0;escaping=x;q=0.5,text/plain;q=0.2"],
)
async def test_openmetrics_where_it_is_asked_for(
    client: httpx.AsyncClient, registry: CollectorRegistry, accept: str
) -> None:
    metrics = RequestMetrics(registry, "decode")
    records = RoomRecords("decode", 8, lambda: 100.0)
    record = records.open(2**62, "r", n_prompt=1, max_new=1, first=PhaseName.RECEIVE)
    record.first_token(100.5)
    metrics.first_token(record, 1)
    answer = await client.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    exemplars = [sample.exemplar for sample in families["pd_time_to_first_token_seconds"].samples if sample.exemplar]
    assert [exemplar.labels for exemplar in exemplars] == [{"room": str(2**62)}]
    plain = await client.get("/metrics", headers={"accept": "text/plain; version=nonsense"})
    assert plain.headers["content-type"].startswith("text/plain")
    assert "# EOF" not in plain.text


@pytest.mark.parametrize("path", ["/health", "/ready", "/server_info", "/model_info", "/metrics", "/v1/models"])
async def test_a_prefill_node_has_the_same_information(tokenizer: Tokenizer, path: str) -> None:
    async with client_of(FakeBackend(tokenizer, role="prefill")) as client:
        assert (await client.get(path)).status_code == 200
