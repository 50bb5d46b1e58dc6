"""From the command to the first token: `phalanx serve` is started, and asked as soon as it answers.

    python benchmarks/start.py --runs 5 --json result.json

`ready_s` ends when /health/ready says so, `first_token_s` with the first text of a streamed answer. The page cache is
warm after the first run, which is not counted.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import setting, shown, summary, write

LIMIT_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def once() -> dict[str, float]:
    port = free_port()
    begin = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "phalanx", "serve", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            if server.poll() is not None or time.perf_counter() - begin > LIMIT_S:
                raise SystemExit("the server did not become ready")
            try:
                if get(port, "/health/ready") == 200:
                    break
            except OSError:
                pass
            time.sleep(0.01)
        ready = time.perf_counter() - begin
        first_token(port)
        return {"ready_s": ready, "first_token_s": time.perf_counter() - begin}
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)


def get(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def first_token(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"prompt": "The sea is", "max_tokens": 4, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    for line in connection.getresponse():
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
            break
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    once()
    runs = [once() for _ in range(args.runs)]
    figures = {name: summary([run[name] for run in runs]) for name in runs[0]}
    write({"benchmark": "start", "runs": args.runs, **setting(), **figures}, args.json)
    print("\n".join(f"| {name} | {shown(values, 2)} |" for name, values in figures.items()))


if __name__ == "__main__":
    main()
