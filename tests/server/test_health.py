"""Health, readiness, status and documentation in each phase of a server's life."""

from __future__ import annotations

import re

import httpx
import pytest

from phalanx.metrics.speculation import SpeculationCounts
from tests.helpers.server import EchoServer, echo_server


async def test_while_loading_http_answers() -> None:
    async with echo_server(start=False) as server:
        for path in ("/health", "/health/ready", "/ping"):
            answer = await server.client.get(path)
            assert (answer.status_code, "loading" in answer.text) == (503, True)
            assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert (await server.client.get("/health/live")).status_code == 200
        status = (await server.client.get("/status")).json()
        assert status["state"] == "loading"
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/models"):
            method = "GET" if path == "/v1/models" else "POST"
            answer = await server.client.request(method, path, json={"prompt": "x"})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "service_unavailable"
        assert (await server.client.get("/metrics")).status_code == 200
        await server.engine.start()
        assert (await server.client.get("/health")).status_code == 200


async def test_while_ready(server: EchoServer) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/ping", "/version", "/server_info"):
        assert (await server.client.get(path)).status_code == 200
    head = await server.client.head("/health")
    assert (head.status_code, head.content) == (200, b"")
    status = (await server.client.get("/status")).json()
    assert set(status) == {
        "model",
        "dtype",
        "mesh",
        "executor",
        "epoch",
        "step",
        "state",
        "cause",
        "since",
        "engine",
        "engines",
        "servers",
        "requests",
        "speculation",
        "kv",
        "places",
        "hang_bound",
        "recovery",
        "recoveries",
        "failures",
        "workers",
    }
    assert status["state"] == "ready"
    assert set(status["engine"]) == {"pid"}
    assert [each["state"] for each in status["engines"]] == []  # a single engine of its own
    assert set(status["requests"]) == {"running", "waiting"}
    assert set(status["kv"]) == {"blocks", "free"}
    assert set(status["places"]) == {"configured", "used", "returned"}
    assert status["mesh"] == {"dp": 1, "pp": 1, "cp": 1, "tp": 1}


async def test_while_draining(server: EchoServer) -> None:
    server.state.draining = True
    assert (await server.client.get("/health")).status_code == 503
    assert (await server.client.get("/health/live")).status_code == 200
    assert (await server.client.get("/status")).json()["state"] == "draining"
    answer = await server.chat()
    assert answer.status_code == 503
    assert answer.headers["retry-after"]


async def test_when_the_engine_is_gone(server: EchoServer) -> None:
    server.echo.die("killed by a test")
    for path in ("/health", "/health/live"):
        answer = await server.client.get(path)
        assert (answer.status_code, "killed by a test" in answer.text) == (503, True)
    answer = await server.chat()
    assert answer.status_code == 503
    assert answer.headers["retry-after"]


async def test_documentation_needs_nothing_from_elsewhere(server: EchoServer) -> None:
    page = await server.client.get("/docs")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for address in re.findall(r"(?:src|href)=['\"]?([^'\" >]+)", page.text):
        assert "//" not in address
    assert "<script" not in page.text
    for path in ("/v1/chat/completions", "/tokenize", "/metrics"):
        assert path in page.text
    described = (await server.client.get("/openapi.json")).json()
    assert described["openapi"].startswith("3.1")
    assert "ChatRequest" in described["components"]["schemas"]


async def test_every_route_is_documented(server: EchoServer) -> None:
    described = (await server.client.get("/openapi.json")).json()["paths"]
    routes = {route.path.replace(":path", "") for route in server.app.routes}
    assert routes == set(described)


@pytest.mark.parametrize("path", ["/nope", "/v1", "/v1/chat/completions/", "/v1/models/unknown"])
async def test_404_in_our_shape(server: EchoServer, path: str) -> None:
    answer = await server.client.get(path)
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_405_in_our_shape(server: EchoServer) -> None:
    answer = await server.client.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-123", True),
        ("a b", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("", False),
        ("tab\there", False),
        ("caf\u00e9", False),
    ],
)
async def test_request_ids(server: EchoServer, given: str, kept: bool) -> None:
    answer = await server.client.get("/health", headers=[(b"X-Request-Id", given.encode("latin-1"))])
    assert (answer.headers["x-request-id"] == given) is kept
    assert re.fullmatch(r"[\x20-\x7e]{1,128}", answer.headers["x-request-id"])


async def test_metrics_name_the_states(server: EchoServer) -> None:
    text = (await server.client.get("/metrics")).text
    assert 'phalanx:engine_state{model_name="echo",state="ready"} 1.0' in text
    assert 'state="failed"} 0.0' in text


async def test_what_became_of_proposed_tokens(server: EchoServer) -> None:
    assert (await server.client.get("/status")).json()["speculation"] is None
    assert "spec_decode" not in (await server.client.get("/metrics")).text
    server.echo._status.speculation = SpeculationCounts(3, 9, 5, [2, 2, 1])
    seen = (await server.client.get("/status")).json()["speculation"]
    assert seen == {"drafts": 3, "draft_tokens": 9, "accepted_tokens": 5, "accepted_at": [2, 2, 1]}
    text = (await server.client.get("/metrics")).text
    for name, value in (("num_drafts", 3), ("num_draft_tokens", 9), ("num_accepted_tokens", 5)):
        assert f'phalanx:spec_decode_{name}_total{{model_name="echo"}} {value}.0' in text
    place = 'phalanx:spec_decode_num_accepted_tokens_per_pos_total{model_name="echo",position="2"} 1.0'
    assert place in text


async def test_cors_only_for_allowed_origins() -> None:
    async with echo_server(allowed_origins=("https://app.example",), api_key=("k",)) as server:
        preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}

        async def ask(origin: str) -> httpx.Response:
            return await server.client.options("/v1/completions", headers={"Origin": origin, **preflight})

        allowed = await ask("https://app.example")
        assert allowed.status_code == 204
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        assert (await ask("https://evil.example")).status_code == 401
        refused = await server.client.get("/v1/models", headers={"Origin": "https://app.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"  # so that the page can read why
