"""SEC-10, SEC-11, SEC-27: who may call what, with a key, without one, and from a web page."""

from __future__ import annotations

import ast
import asyncio
import inspect
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from phalanx.server import middleware
from phalanx.server.middleware import KeyGuard, host_of, is_loopback
from tests.helpers.server import EchoServer, echo_server

KEYS = ("correct horse", "battery staple")

PUBLIC = {"/health", "/health/live", "/health/ready", "/ping"}
"""Written out again on purpose: widening the list in the code alone must fail here."""

PRIVATE = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/{model}",
    "/tokenize",
    "/detokenize",
    "/status",
    "/metrics",
    "/version",
    "/server_info",
    "/docs",
    "/openapi.json",
}


@pytest.fixture
async def locked() -> AsyncIterator[EchoServer]:
    async with echo_server(api_key=KEYS) as server:
        yield server


async def ask(app: Any, method: str, path: str, headers: list[tuple[bytes, bytes]], kind: str = "http") -> int | None:
    """The status, None when a socket is closed. Straight to the application: no client tidies the request up."""
    scope = {
        "type": kind,
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode("utf-8", "surrogateescape"),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": headers,
        "client": ("1.2.3.4", 5),
        "server": ("127.0.0.1", 8000),
        "state": {},
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0].get("status")


HOSTS = (
    b"127.0.0.1:8000",
    b"evil.example",
    b"a/health",
    b"a?/health",
    b"a#b",
    b"/health@b",
    b"[::1",
    b"",
    b"a\\b",
    b"a b",
)
BAD_KEYS = (
    None,
    b"",
    b"Bearer",
    b"Bearer ",
    b"Bearer wrong",
    b"Bearer CORRECT HORSE",
    b"Basic correct horse",
    b"correct horse",
    b"Bearer correct hors",
    b"Bearer correct horse!",
    b"Bearer correct horse, battery staple",
    b"Bearer \xff\xfe",
)


def variants(path: str) -> set[str]:
    """Other spellings that a router or a proxy might take for `path`."""
    path = path.replace("{model}", "echo")
    return {
        path,
        "/" + path,
        path + "/",
        path.upper(),
        path + ";x=/health",
        path + "/../health",
        "/health/../" + path[1:],
        path + "%2f",
        path.replace("/", "/./", 1),
        path + "\x00",
        path + "?/health",
        "/health" + path,
        "//health",
        "/Health",
        "/health/",
        "/health/live/",
        "/%68ealth",
    }


def test_every_route_is_classified(app_routes: set[str]) -> None:
    assert app_routes == PUBLIC | PRIVATE


@pytest.fixture
async def app_routes(locked: EchoServer) -> set[str]:
    return {route.path.replace(":path", "") for route in locked.app.routes}


async def test_nothing_but_health_answers_without_the_right_key(locked: EchoServer) -> None:
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "BREW")
    paths = set().union(*(variants(path) for path in PRIVATE)) - PUBLIC
    tried = 0
    for path in sorted(paths):
        for method, key in itertools.product(methods, BAD_KEYS):
            host = HOSTS[tried % len(HOSTS)]
            headers = [(b"host", host), *([(b"authorization", key)] if key is not None else [])]
            assert await ask(locked.app, method, path, headers) == 401, (method, path, key, host)
            tried += 1
        for host in HOSTS:
            assert await ask(locked.app, "GET", path, [(b"host", host)]) == 401, (path, host)
    assert tried > 5000
    assert locked.echo.requests == []


async def test_websockets_are_closed(locked: EchoServer) -> None:
    for path in ("/v1/chat/completions", "/health", "/nope"):
        assert await ask(locked.app, "GET", path, [], kind="websocket") is None


async def test_several_authorization_headers_are_refused(locked: EchoServer) -> None:
    good = (b"authorization", b"Bearer " + KEYS[0].encode())
    headers = [(b"host", b"x"), good]
    assert await ask(locked.app, "GET", "/v1/models", headers) == 200
    assert await ask(locked.app, "GET", "/v1/models", [*headers, good]) == 401
    assert await ask(locked.app, "GET", "/v1/models", [*headers, (b"authorization", b"Bearer x")]) == 401


@pytest.mark.parametrize("key", KEYS)
async def test_each_key_opens(locked: EchoServer, key: str) -> None:
    for path in PRIVATE - {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"}:
        headers = {"Authorization": f"Bearer {key}"}
        assert (await locked.client.get(path.replace("{model}", "echo"), headers=headers)).status_code == 200
    answer = await locked.client.post(
        "/v1/completions", json={"prompt": "a"}, headers={"authorization": f"bearer {key}"}
    )
    assert answer.status_code == 200


async def test_health_is_public(locked: EchoServer) -> None:
    for path in PUBLIC:
        assert (await locked.client.get(path)).status_code == 200


async def test_the_refusal_is_a_whole_error_object(locked: EchoServer) -> None:
    answer = await locked.client.get("/v1/models")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_keys_are_compared_as_digests_in_constant_time_and_all_of_them() -> None:
    tree = ast.parse("class X:\n" + inspect.getsource(KeyGuard._number))
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert "hmac.compare_digest" in calls
    (loop,) = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    assert not [node for node in ast.walk(loop) if isinstance(node, ast.Return | ast.Break | ast.If | ast.BoolOp)]
    source = inspect.getsource(middleware)
    assert "sha256" in source
    assert "request.url" not in source
    assert ".url." not in source


# Browsers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://127.0.0.1:8000"}, 200),
        ({"Origin": "http://127.0.0.1:9000"}, 403),
        ({"Origin": "https://127.0.0.1:8000"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "nonsense"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}, 403),  # DNS rebinding
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "LOCALHOST."}, 200),
        ({"Host": "app.localhost"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "127.1.2.3"}, 200),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "a b"}, 400),
        ({"Host": "localhost/x"}, 400),
        ({"Host": "localhost@evil.example"}, 400),
        ({"Host": ""}, 400),
    ],
)
async def test_pages_of_others_cannot_call(server_open: EchoServer, headers: dict[str, str], status: int) -> None:
    answer = await server_open.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
    assert answer.status_code == status, answer.text
    assert "access-control-allow-origin" not in answer.headers
    assert len(server_open.echo.requests) == (status == 200)


@pytest.fixture
async def server_open() -> AsyncIterator[EchoServer]:
    async with echo_server() as server:
        yield server


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "MKCOL"])
async def test_every_changing_method_is_guarded(server_open: EchoServer, method: str) -> None:
    for path in ("/v1/completions", "/tokenize", "/nope", "/metrics"):
        answer = await server_open.client.request(method, path, headers={"Origin": "https://evil.example"})
        assert answer.status_code == 403


async def test_allowed_origins_and_hosts() -> None:
    async with echo_server(
        allowed_origins=("https://app.example",), allowed_hosts=("api.example", "*.in.example")
    ) as server:
        body = {"prompt": "a", "max_tokens": 1}
        for host, status in (("api.example", 200), ("x.in.example:9", 200), ("in.example", 403), ("127.0.0.1", 403)):
            assert (
                await server.client.post("/v1/completions", json=body, headers={"Host": host})
            ).status_code == status
        headers = {"Host": "api.example", "Origin": "https://app.example", "Sec-Fetch-Site": "cross-site"}
        answer = await server.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"


async def test_bound_to_the_network_any_host_is_served() -> None:
    async with echo_server(host="0.0.0.0") as server:
        assert (await server.client.get("/v1/models", headers={"Host": "gpu-box:8000"})).status_code == 200


def test_host_names() -> None:
    assert host_of("localhost:80") == "localhost"
    assert host_of("[::ffff:1]:80") == "::ffff:0.0.0.1" or host_of("[::ffff:1]:80") == "::ffff:1"
    for bad in ("a:b", "a:99999999", "[::1", "a]", "a,b", "-", "é"):
        assert host_of(bad) is None
    assert is_loopback("127.0.0.1")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("localhost.example")


async def test_several_keys_are_told_apart_by_number_alone():
    """What reaches the engine of a key is which one it is; where there is one, or none, all are alike."""
    for keys, given, owner in ((KEYS, KEYS[0], 1), (KEYS, KEYS[1], 2), (KEYS[:1], KEYS[0], 0), ((), "any", 0)):
        async with echo_server(api_key=keys, headers={"Authorization": f"Bearer {given}"}) as server:
            assert (await server.complete()).status_code == 200
            assert (await server.chat()).status_code == 200
            assert [request.owner for request in server.echo.requests] == [owner, owner]
            status = (await server.client.get("/status")).text + (await server.client.get("/metrics")).text
            assert not any(key in status for key in keys)


async def test_one_key_cannot_take_every_place_of_the_server():
    async with echo_server(api_key=KEYS, max_concurrent_requests=18, echo={"delay": 0.5}) as server:

        async def ask(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": [1], "max_tokens": 1}
            return (await server.client.post("/v1/completions", json=body, headers=headers)).status_code

        hog = [asyncio.create_task(ask(KEYS[0])) for _ in range(18)]
        await asyncio.sleep(0.1)
        assert await ask(KEYS[1]) == 200
        assert sorted(await asyncio.gather(*hog)) == [200] * 16 + [503] * 2
