"""GET routes: which models there are, whether the server is well, and what it is doing."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from phalanx import __version__
from phalanx.errors import ModelNotFound, Unavailable
from phalanx.metrics.serving import CONTENT_TYPE
from phalanx.server.bodies import MAX_DEPTH
from phalanx.server.connection import HeaderLimits
from phalanx.server.endpoint import json_response
from phalanx.server.openai_types import ModelCard, ModelList
from phalanx.server.request_fields import MAX_TEMPLATE_KWARGS
from phalanx.server.state import ServerState

_encode = msgspec.json.Encoder().encode


def _json(content: Any) -> Response:
    return Response(_encode(content), media_type="application/json")


# Models


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(name, state.created, root=state.engine.info.model, max_model_len=state.max_model_len)


async def list_models(state: ServerState, request: Request) -> Response:
    return json_response(ModelList([_card(state, name) for name in state.model_names()]))


async def show_model(state: ServerState, request: Request) -> Response:
    name = request.path_params["model"]
    if name not in state.model_names():
        raise ModelNotFound(f"The model '{name[:200]}' does not exist.", param="model")
    return json_response(_card(state, name))


# Health


async def health(state: ServerState, request: Request) -> Response:
    """200 when a request would be answered: model loaded, not draining, signs of life from the engine."""
    reason = state.why_not_ready()
    if reason is None:
        return _json({"status": "ready"})
    raise Unavailable(f"Not ready: {reason.rstrip('.')}.", retry_after=5.0)


async def live(state: ServerState, request: Request) -> Response:
    """200 unless only a restart can help. Loading and draining are life."""
    reason = state.why_not_alive()
    if reason is None:
        return _json({"status": "alive"})
    raise Unavailable(f"Not alive: {reason.rstrip('.')}.", retry_after=5.0)


async def status(state: ServerState, request: Request) -> Response:
    engine = state.engine.status()
    info = getattr(state.engine, "info", None)
    return _json(
        {
            "model": state.model_name() or None,
            "dtype": info.dtype if info else None,
            "mesh": info.mesh if info else None,
            "executor": info.executor if info else None,
            "epoch": engine.epoch,
            "step": engine.step,
            "state": state.phase(),
            "cause": engine.cause,
            "since": engine.since,
            "engine": {"pid": info.pid if info else None},
            "requests": {"running": engine.running, "waiting": engine.waiting},
            "kv": {"blocks": engine.blocks, "free": engine.free_blocks},
            "workers": engine.workers,
        }
    )


# About the server


async def metrics(state: ServerState, request: Request) -> Response:
    return Response(state.metrics.export(), headers={"Content-Type": CONTENT_TYPE})


async def version(state: ServerState, request: Request) -> Response:
    return _json({"version": __version__})


async def server_info(state: ServerState, request: Request) -> Response:
    """Every limit that a client can run into."""
    config, headers = state.config, HeaderLimits()
    return _json(
        {
            "version": __version__,
            "limits": {
                **dataclasses.asdict(config.limits),
                "max_queued_requests": config.scheduler.max_num_queued_reqs,
                "request_timeout": config.server.request_timeout,
                "max_json_depth": MAX_DEPTH,
                "max_header_bytes": headers.bytes,
                "max_header_count": headers.count,
                "max_chat_template_kwargs": MAX_TEMPLATE_KWARGS,
            },
        }
    )
