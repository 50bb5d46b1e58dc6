"""The application: routes, guards and error handlers around one engine.

`create_app(engine, config)` works before the engine is started: until then it answers health and status, and 503 to
everything that needs the model. Does not start, stop or own the engine; `run` does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from phalanx import __version__
from phalanx.config import EngineConfig
from phalanx.errors import PhalanxError
from phalanx.server import chat, completions, docs_page, models_and_health, tokenize
from phalanx.server.failures import HttpError, error_response
from phalanx.server.middleware import Admission, BrowserGuard, CrossOrigin, KeyGuard, RequestBoundary, allowed_hosts
from phalanx.server.openapi import OPERATIONS, document, plain_path
from phalanx.server.siblings import Siblings
from phalanx.server.state import ServerState

if TYPE_CHECKING:
    from phalanx.engine.async_engine import AsyncEngine

Handler = Callable[[ServerState, Request], Awaitable[Response]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat.chat_completions),
    ("POST", "/v1/completions", completions.completions),
    ("GET", "/v1/models", models_and_health.list_models),
    ("GET", "/v1/models/{model:path}", models_and_health.show_model),
    ("POST", "/tokenize", tokenize.tokenize),
    ("POST", "/detokenize", tokenize.detokenize),
    ("GET", "/health", models_and_health.health),
    ("GET", "/health/live", models_and_health.live),
    ("GET", "/health/ready", models_and_health.health),
    ("GET", "/ping", models_and_health.health),
    ("GET", "/status", models_and_health.status),
    ("GET", "/metrics", models_and_health.metrics),
    ("GET", "/version", models_and_health.version),
    ("GET", "/server_info", models_and_health.server_info),
)


def create_app(engine: AsyncEngine, config: EngineConfig, siblings: Siblings | None = None) -> FastAPI:
    """The ASGI application. Its `state.server` is the `ServerState`."""
    state = ServerState(engine, config, siblings)
    app = FastAPI(
        title="Phalanx",
        version=__version__,
        summary="An OpenAI-compatible API for one large language model.",
        openapi_url=None,  # served by a route of our own, so that it passes the same guards
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=_guards(state),
        exception_handlers={PhalanxError: _refuse, HTTPException: _refuse_http},
    )
    app.state.server = state
    for method, path, handler in (*ROUTES, *_documentation(config)):
        _add(app, method, path, partial(handler, state))
    return app


def _add(app: FastAPI, method: str, path: str, handler: Callable[[Request], Awaitable[Response]]) -> None:
    """A plain route: bodies are read under our own limits, and answers are made by our own encoder."""

    template = plain_path(path)

    async def endpoint(request: Request) -> Response:
        request.state.route = template  # a label for metrics
        return await handler(request)

    methods = ["GET", "HEAD"] if method == "GET" else [method]
    app.router.add_route(path, endpoint, methods=methods, name=OPERATIONS[method, template].name)


def _documentation(config: EngineConfig) -> tuple[tuple[str, str, Handler], ...]:
    """/openapi.json and /docs, rendered once."""
    description = document("Phalanx", __version__, needs_key=bool(config.server.api_key))
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    scheme = "https" if config.server.ssl_certfile else "http"
    page = docs_page.render(msgspec.json.decode(description), f"{scheme}://{host}:{config.server.port}")

    async def openapi_json(state: ServerState, request: Request) -> Response:
        return Response(description, media_type="application/json")

    async def docs(state: ServerState, request: Request) -> Response:
        return HTMLResponse(page, headers=docs_page.HEADERS)

    return ("GET", "/openapi.json", openapi_json), ("GET", "/docs", docs)


def _guards(state: ServerState) -> list[Middleware]:
    """From the outside in."""
    server, limits = state.config.server, state.config.limits
    keys = tuple(server.api_key)
    hosts = allowed_hosts(server.allowed_hosts, bind_host=server.host, has_key=bool(keys))
    return [
        Middleware(CrossOrigin, server.allowed_origins),
        Middleware(RequestBoundary, state.metrics, server.access_log),
        Middleware(KeyGuard, keys),
        Middleware(BrowserGuard, hosts, server.allowed_origins),
        Middleware(Admission, state.admission, state.siblings.places, limits.max_concurrent_requests),
    ]


async def _refuse(request: Request, error: Exception) -> Response:
    if not isinstance(error, PhalanxError):
        raise error
    return error_response(error)


async def _refuse_http(request: Request, error: Exception) -> Response:
    """What routing itself refuses, in our shape."""
    if not isinstance(error, HTTPException):
        raise error
    messages = {
        404: ("There is nothing at this path.", "not_found"),
        405: ("This method is not allowed here.", "method_not_allowed"),
    }
    message, code = messages.get(error.status_code, ("The request cannot be handled.", "invalid_request"))
    headers = dict(error.headers or {})
    return error_response(HttpError(error.status_code, message, fix="See /docs.", code=code, headers=headers))
