"""`make demo`: start the real server, ask it one question over HTTP, print the answer as it comes, stop the server.

Exit code 0 only when the whole way worked: loading, readiness, a streamed answer with an end, and a clean stop.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

QUESTION = "What is the capital of France? Answer in one sentence."
START_LIMIT_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(server: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with exit code {server.returncode}")
        try:
            with urllib.request.urlopen(f"{address}/health/ready", timeout=2):  # noqa: S310
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"the server was not ready within {START_LIMIT_S:.0f} s")


def ask(address: str) -> None:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_completion_tokens": 64,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(  # noqa: S310
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    print(f"> {QUESTION}")
    start = time.perf_counter()
    first, finish, tokens, text = 0.0, None, 0, ""
    with urllib.request.urlopen(request, timeout=60) as stream:  # noqa: S310
        for line in stream:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                break
            event = json.loads(data)
            if "error" in event:
                raise SystemExit(f"the server said: {event['error']['message']}")
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                first = first or (time.perf_counter() - start if piece else 0.0)
                text += piece
                print(piece, end="", flush=True)
                finish = choice["finish_reason"] or finish
    total = time.perf_counter() - start
    print(f"\n\n{tokens} tokens in {total:.2f} s, the first after {first:.2f} s; finish_reason {finish}")
    if finish is None or not text.strip():
        raise SystemExit("the answer has no text or no end")


def main() -> None:
    address = f"http://127.0.0.1:{(port := free_port())}"
    server = subprocess.Popen([sys.executable, "-m", "phalanx", "serve", "--port", str(port)])
    try:
        wait_until_ready(server, address)
        ask(address)
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        try:
            code = server.wait(timeout=40)
        except subprocess.TimeoutExpired:
            server.kill()
            raise SystemExit("the server did not stop") from None
    if code != 0:
        raise SystemExit(f"the server stopped with exit code {code}")


if __name__ == "__main__":
    main()
