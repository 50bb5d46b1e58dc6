"""The OpenAPI document: made from the request and response types, and the one table of what each route is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from phalanx.server import openai_types as types

_REF = "#/components/schemas/{name}"
_PUBLIC = frozenset({"/health", "/health/live", "/health/ready", "/ping"})


@dataclass(frozen=True)
class Operation:
    name: str
    summary: str
    takes: type[BaseModel] | None = None
    gives: type[msgspec.Struct] | None = None
    media: str = "application/json"
    streams: bool = False
    example: dict[str, Any] | None = None
    group: str = "Server"


_CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64, "stream": True}
_GENERATION, _TEXT = "Generation", "Tokens"

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "chat", "Answer a conversation.", types.ChatRequest, types.ChatCompletion, streams=True,
        example=_CHAT_EXAMPLE, group=_GENERATION,
    ),
    ("POST", "/v1/completions"): Operation(
        "complete", "Continue a text.", types.CompletionRequest, types.Completion, streams=True,
        example={"prompt": "Once upon a time", "max_tokens": 32}, group=_GENERATION,
    ),
    ("GET", "/v1/models"): Operation("listModels", "The models served here.", gives=types.ModelList, group=_GENERATION),
    ("GET", "/v1/models/{model}"): Operation("showModel", "One of them.", gives=types.ModelCard, group=_GENERATION),
    ("POST", "/tokenize"): Operation(
        "tokenize", "The token ids of a text or a conversation.", types.TokenizeRequest, types.Tokens,
        example={"prompt": "Hello"}, group=_TEXT,
    ),
    ("POST", "/detokenize"): Operation(
        "detokenize", "The text of token ids.", types.DetokenizeRequest, types.Text,
        example={"tokens": [1, 2, 3]}, group=_TEXT,
    ),
    ("GET", "/health"): Operation("health", "200 when requests are answered, else 503."),
    ("GET", "/health/live"): Operation("live", "200 unless only a restart can help."),
    ("GET", "/health/ready"): Operation("ready", "The same as /health."),
    ("GET", "/ping"): Operation("ping", "The same as /health."),
    ("GET", "/status"): Operation("status", "What the server is doing: state, queue, KV cache, workers."),
    ("GET", "/metrics"): Operation("metrics", "Metrics for Prometheus.", media="text/plain"),
    ("GET", "/version"): Operation("version", "The version of Phalanx."),
    ("GET", "/server_info"): Operation("serverInfo", "The limits for requests."),
    ("GET", "/docs"): Operation("docs", "This page.", media="text/html"),
    ("GET", "/openapi.json"): Operation("openapi", "The OpenAPI document."),
}  # fmt: skip


def plain_path(path: str) -> str:
    """A route's path as OpenAPI writes it: without the converters of parameters."""
    return path.replace(":path}", "}")


def document(title: str, version: str, *, needs_key: bool) -> bytes:
    """JSON, OpenAPI 3.1."""
    paths: dict[str, Any] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _describe(operation, path)
    schemes = {"key": {"type": "http", "scheme": "bearer"}}
    content = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": _schemas(), **({"securitySchemes": schemes} if needs_key else {})},
        **({"security": [{"key": []}]} if needs_key else {}),
    }
    return msgspec.json.encode(content)


def _describe(operation: Operation, path: str) -> dict[str, Any]:
    answer = {"schema": _reference(operation.gives)} if operation.gives else {}
    content: dict[str, Any] = {operation.media: answer}
    if operation.streams:
        content["text/event-stream"] = {}
    failure = {
        "description": "Refused or failed.",
        "content": {"application/json": {"schema": _reference(types.ErrorAnswer)}},
    }
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.group],
        "responses": {"200": {"description": "Done.", "content": content}, "4XX": failure, "5XX": failure},
    }
    if operation.takes is not None:
        body: dict[str, Any] = {"schema": _reference(operation.takes)}
        if operation.example:
            body["example"] = operation.example
        described["requestBody"] = {"required": True, "content": {"application/json": body}}
    if "{model}" in path:
        described["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if path in _PUBLIC:
        described["security"] = []
    return described


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}


def _schemas() -> dict[str, Any]:
    requests = [operation.takes for operation in OPERATIONS.values() if operation.takes is not None]
    answers = [operation.gives for operation in OPERATIONS.values() if operation.gives is not None]
    _, described = models_json_schema(
        [(kind, "validation") for kind in requests], ref_template="#/components/schemas/{model}"
    )
    _, components = msgspec.json.schema_components([*answers, types.ErrorAnswer], ref_template=_REF)
    return {**described.get("$defs", {}), **components}
