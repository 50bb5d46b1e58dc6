"""GET routes: which models there are, whether the server is well, and what it is doing."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from phalanx import __version__
from phalanx.engine.client import EngineStatus, Recovery
from phalanx.errors import ModelNotFound, Unavailable
from phalanx.metrics.counts import counts
from phalanx.metrics.serving import CONTENT_TYPE
from phalanx.server.bodies import MAX_DEPTH
from phalanx.server.connection import HeaderLimits
from phalanx.server.endpoint import json_response
from phalanx.server.failures import error_headers
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


_TOLD = ("rank", "kind", "cause", "since", "plan", "missing", "last_try", "estimate")
"""Of a recovery, where no key is asked for."""


async def health(state: ServerState, request: Request) -> Response:
    """200 when a request would be answered: model loaded, not draining, nothing lost that is not made good."""
    status = state.status()
    phase = state.phase(status)
    return _json({"status": "ready"}) if phase == "ready" else _unwell(phase, status, "Not ready")


async def live(state: ServerState, request: Request) -> Response:
    """200 unless only a restart of the server can help. Loading, recovering and draining are life."""
    status = state.status()
    if status.state == "failed" and not state.draining:
        return _unwell("failed", status, "Not alive")
    return _json({"status": "alive"})


def _unwell(phase: str, status: EngineStatus, what: str) -> Response:
    """503 that says all there is to say: what is wrong, since when, and how long it may take."""
    recovery = status.recovery
    cause = status.cause if phase in ("recovering", "failed") else None
    words = f"{what}: {phase}{f': {cause}' if cause else ''}"
    if recovery is not None and recovery.missing:
        words = f"{words.rstrip('.')}. It waits for what is missing: {recovery.missing}"
    if recovery is not None and recovery.last_try:
        words = f"{words.rstrip('.')}. The latest try failed: {recovery.last_try}"
    error = Unavailable(f"{words.rstrip('.')}.", retry_after=_seconds_left(recovery))
    told = None
    if recovery is not None:  # everyone may ask this: host names are for /status
        told = {name: getattr(recovery, name) for name in _TOLD}
    content = {"status": phase, "cause": cause, "since": status.since, "recovery": told, **error.body()}
    return Response(_encode(content), error.status, error_headers(error), media_type="application/json")


def _seconds_left(recovery: Recovery | None) -> float:
    """Until it is worth asking again."""
    if recovery is None or recovery.estimate is None:
        return 5.0
    return max(1.0, recovery.estimate - recovery.lasted)


async def status(state: ServerState, request: Request) -> Response:
    engine = state.status()
    info = getattr(state.engine, "info", None)
    return _json(
        {
            "model": state.model_name() or None,
            "dtype": info.dtype if info else None,
            "mesh": info.mesh if info else None,
            "executor": info.executor if info else None,
            "epoch": engine.epoch,
            "step": engine.step,
            "state": state.phase(engine),
            "cause": engine.cause,
            "since": engine.since,
            "engine": {"pid": info.pid if info else None},
            "engines": engine.engines,
            "servers": state.siblings.servers(),
            "requests": {"running": engine.running, "waiting": engine.waiting},
            "speculation": engine.speculation if engine.speculation.accepted_at else None,
            "kv": {"blocks": engine.blocks, "free": engine.free_blocks},
            "places": {
                "configured": engine.ranks,
                "used": sum(worker.state != "dead" for worker in engine.workers),
                "returned": engine.returned,
            },
            "hang_bound": engine.hang_bound,
            "recovery": engine.recovery,
            "recoveries": engine.recoveries,
            "failures": engine.failures,
            "workers": engine.workers,
        }
    )


# About the server


async def metrics(state: ServerState, request: Request) -> Response:
    everybody = await state.siblings.counts(counts(state.metrics.registry))
    return Response(state.metrics.export(everybody), headers={"Content-Type": CONTENT_TYPE})


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
