"""What a started server says about itself: sizes, layout, memory, safety, and a first call to copy. Only text."""

from __future__ import annotations

import json
from math import prod

from phalanx import env
from phalanx.config import EngineConfig, ParallelConfig, RecoveryConfig, ServerConfig
from phalanx.engine.client import EngineInfo, EngineStatus
from phalanx.planner.report import binding_line, cache_lines, layout_line, memory_table, split_lines, stage_line
from phalanx.server.middleware import is_loopback
from phalanx.speculative_config import SpeculativeConfig

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 (compared with, not bound)


def base_url(server: ServerConfig) -> str:
    """Where a client on this machine reaches the server."""
    host = _ANY.get(server.host, server.host)
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if server.ssl_certfile else 'http'}://{host}:{server.port}"


def summary(
    config: EngineConfig, info: EngineInfo, status: EngineStatus, names: tuple[str, ...], *, has_chat: bool
) -> str:
    """`config` is resolved and has the real port."""
    replicas = config.parallel.data_parallel_size
    lines = [
        f"Model: {', '.join(names)} ({_type(config, info)} on {info.device}, loaded in {info.load_s:.1f} s)",
        f"Layout: {_layout(config.parallel, info.mesh)}, executor {info.executor}",
        *_shares(config.parallel, info),
        *cache_lines(
            info.device,
            blocks=info.blocks * replicas,
            block_size=info.block_size,
            kv_bytes=info.kv_bytes * replicas,
            max_model_len=info.max_model_len,
        ),
        *_replicas(replicas, info, status),
        *memory_table(status.workers),
        *binding_line(status.workers),
        *stage_line(status.workers),
        *_speculation(config.scheduler.speculation),
        *_recovery(config.recovery),
        *_safety(config.server),
        "",
        "Try it:",
        f"  {curl(config.server, has_chat=has_chat)}",
        "",
    ]
    return "\n".join(lines)


def remote_summary(config: EngineConfig, info: EngineInfo, name: str, names: tuple[str, ...], *, has_chat: bool) -> str:
    """Of API servers whose engines are on the machine `name`."""
    lines = [
        f"Model: {', '.join(names)} ({info.dtype} on {info.device})",
        f"Engines: on {name}, by way of the router at {config.server.router}",
        *_safety(config.server),
        "",
        "Try it:",
        f"  {curl(config.server, has_chat=has_chat)}",
        "",
    ]
    return "\n".join(lines)


def _type(config: EngineConfig, info: EngineInfo) -> str:
    quantization = config.model.quantization
    return info.dtype if quantization in (None, "none") else f"{quantization} weights, {info.dtype}"


def _shares(parallel: ParallelConfig, info: EngineInfo) -> list[str]:
    decided = info.shares
    if decided is None:
        return split_lines(parallel.tensor_weights, parallel.stage_layers)
    return [*split_lines(decided.tensor_weights, decided.stage_layers), f"Shares: auto, {decided.why}"]


def _replicas(count: int, info: EngineInfo, status: EngineStatus) -> list[str]:
    if count == 1:
        return []
    processes = ", ".join(str(engine.pid) for engine in status.engines)
    tokens = info.blocks * info.block_size
    return [f"Replicas: {count} (engine processes {processes}), each with {tokens:,} tokens of KV cache"]


def _layout(parallel: ParallelConfig, mesh: dict[str, int]) -> str:
    if parallel.pipeline_tensor_sizes is not None:
        times = f"{parallel.data_parallel_size} times " if parallel.data_parallel_size > 1 else ""
        return times + layout_line(parallel.widths)
    sizes = [f"{axis} {size}" for axis, size in mesh.items() if size > 1]
    ranks = prod(mesh.values())
    return f"{ranks} worker{'s' if ranks > 1 else ''}" + (f" ({', '.join(sizes)})" if sizes else "")


def _speculation(speculation: SpeculativeConfig | None) -> list[str]:
    if speculation is None:
        return []
    return [f"Proposed tokens: up to {speculation.num_speculative_tokens} at a time, by {speculation.method}"]


def _recovery(recovery: RecoveryConfig) -> list[str]:
    if not recovery.enable_recovery:
        return ["Recovery: off; the loss of a worker ends all requests"]
    return [
        f"Recovery: on; a worker without progress for {recovery.hang_timeout:g} s counts as hung (longer while it "
        "loads, in its first steps, and where steps are slow)"
    ]


def _safety(server: ServerConfig) -> list[str]:
    by = f", {server.api_server_count} server processes" if server.api_server_count > 1 else ""
    lines = [f"Address: {base_url(server)} (listening on {server.host}, port {server.port}{by})"]
    if server.router_listen:
        lines.append(f"API servers of other machines: may join at {server.router_listen}")
    if server.api_key:
        lines.append("API key: required")
    elif is_loopback(server.host):
        lines.append("API key: none (only this machine can connect)")
    else:
        lines.append("API key: none. WARNING: everyone on the network can use this server; set --api-key.")
    return lines


def curl(server: ServerConfig, *, has_chat: bool) -> str:
    """A first call in one line, for a POSIX shell."""
    path, body = "/v1/completions", {"prompt": "The capital of Japan is", "max_tokens": 16}
    if has_chat:
        path = "/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "Hello! Who are you?"}], "max_tokens": 32}
    parts = ["curl", base_url(server) + path, "-H 'Content-Type: application/json'"]
    if server.ssl_certfile:
        parts.insert(1, "--insecure")  # a certificate seldom names 127.0.0.1
    if server.api_key:
        ready = env.variables().get("api_key") in server.api_key
        parts.append(f'-H "Authorization: Bearer {"$PHALANX_API_KEY" if ready else "YOUR_API_KEY"}"')
    return " ".join([*parts, f"-d '{json.dumps(body)}'"])
