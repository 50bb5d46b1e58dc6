"""What a started server says about itself: sizes, layout, memory, safety, and a first call to copy. Pure text."""

from __future__ import annotations

import json

from phalanx.config import EngineConfig, ServerConfig
from phalanx.engine.client import EngineInfo, EngineStatus
from phalanx.server.middleware import is_loopback

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
    device = "GPU" if info.device.startswith("cuda") else info.device.upper()
    tokens = info.blocks * info.block_size
    blocks = f"{_size(info.kv_bytes)}, {info.blocks:,} blocks of {info.block_size}"
    lines = [
        f"Model: {', '.join(names)} ({info.dtype} on {info.device}, loaded in {info.load_s:.1f} s)",
        f"Layout: {_layout(info.mesh)}, executor {info.executor}",
        f"{device} KV cache size: {tokens:,} tokens ({blocks})",
        f"Maximum concurrency for {info.max_model_len:,} tokens per request: {tokens / info.max_model_len:.2f}x",
        *_memory_table(status),
        *_safety(config.server),
        "",
        "Try it:",
        f"  {curl(config.server, has_chat=has_chat)}",
        "",
    ]
    return "\n".join(lines)


def _layout(mesh: dict[str, int]) -> str:
    sizes = [f"{axis} {size}" for axis, size in mesh.items() if size > 1]
    ranks = 1
    for size in mesh.values():
        ranks *= size
    return f"{ranks} worker{'s' if ranks > 1 else ''}" + (f" ({', '.join(sizes)})" if sizes else "")


def _size(count: int) -> str:
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count} B"


def _memory_table(status: EngineStatus) -> list[str]:
    if not status.workers:
        return []
    columns = ("weights", "kv_cache", "activations", "free")
    lines = ["Memory:  rank  device  layers    " + "".join(f"{name.replace('_', ' '):>13}" for name in columns)]
    for worker in status.workers:
        sizes = "".join(f"{_size(worker.memory[name]) if name in worker.memory else '-':>13}" for name in columns)
        lines.append(f"         {worker.rank:<4}  {worker.device:<6}  {worker.layers:<8}  {sizes}")
    return lines


def _safety(server: ServerConfig) -> list[str]:
    lines = [f"Address: {base_url(server)} (listening on {server.host}, port {server.port})"]
    if server.api_key:
        lines.append("API key: required")
    elif is_loopback(server.host):
        lines.append("API key: none (only this machine can connect)")
    else:
        lines.append("API key: none. WARNING: everyone on the network can use this server; set --api-key.")
    return lines


def curl(server: ServerConfig, *, has_chat: bool) -> str:
    """A first call in one line, for a POSIX shell."""
    path, body = "/v1/completions", {"prompt": "The capital of France is", "max_tokens": 16}
    if has_chat:
        path = "/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "Hello! Who are you?"}], "max_tokens": 32}
    parts = ["curl", base_url(server) + path, "-H 'Content-Type: application/json'"]
    if server.ssl_certfile:
        parts.insert(1, "--insecure")  # a certificate seldom names 127.0.0.1
    if server.api_key:
        parts.append('-H "Authorization: Bearer $PHALANX_API_KEY"')
    return " ".join([*parts, f"-d '{json.dumps(body)}'"])
