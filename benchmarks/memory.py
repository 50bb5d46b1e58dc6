"""The memory of a loaded server, and whether it grows.

    python benchmarks/memory.py --requests 10000 --json result.json

Memory is the proportional set size (PSS) of the server and all of its children: shared pages are counted once. It is
compared with the weights in `--dtype` plus the configured KV cache plus 450 MB; then requests are sent, 32 at a time,
and the memory is measured again along the way. What grew is read from the anonymous memory, which files that other
processes come to share do not change.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import setting, write
from benchmarks.start import LIMIT_S, free_port, get
from phalanx.checkpoint.locate import locate
from phalanx.models.registry import read_spec

ALLOWANCE = 450_000_000
CONCURRENCY = 32
KV_BYTES = 64 * 2**20
"""Small, so that every block has been written to after a few hundred requests: until then memory grows as it should."""
CONTEXT = 1024


def pss(process: psutil.Process) -> list[int]:
    """Bytes of a process and of each of its descendants: the server first, then the engine."""
    return [member.memory_full_info().pss for member in (process, *process.children(recursive=True))]


def anonymous(process: psutil.Process) -> list[int]:
    """Bytes that are nobody else's and no file's, likewise."""

    def of(pid: int) -> int:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))

    return [of(member.pid) for member in (process, *process.children(recursive=True))]


def ask(port: int, number: int) -> None:
    body = {"prompt": f"Number {number} is", "max_tokens": 1 + number % 8, "temperature": 1, "seed": number}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        json.load(response)


def measure(requests: int, dtype: str) -> dict[str, Any]:
    port = free_port()
    flags = ["--port", str(port), "--dtype", dtype]
    flags += ["--kv-cache-memory-bytes", str(KV_BYTES), "--max-model-len", str(CONTEXT)]
    server = subprocess.Popen(
        [sys.executable, "-m", "phalanx", "serve", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait(server, port)
        process = psutil.Process(server.pid)
        loaded = sum(pss(process))
        done, lock = 0, threading.Lock()
        along: list[dict[str, Any]] = []

        def one(number: int) -> None:
            nonlocal done
            ask(port, number)
            with lock:
                done += 1
                if done % max(1, requests // 10) == 0:
                    own = anonymous(process)
                    along.append({"requests": done, "pss": sum(pss(process)), "anonymous": sum(own), "members": own})

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            list(pool.map(one, range(requests)))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=60)
    weights = read_spec(locate(None).config).weight_bytes(dtype)
    limit = weights + KV_BYTES + ALLOWANCE
    return {
        "benchmark": "memory",
        "dtype": dtype,
        "weights_bytes": weights,
        "kv_bytes": KV_BYTES,
        "limit_bytes": limit,
        "loaded_pss": loaded,
        "within_limit": loaded <= limit,
        "along": along,
        "growth_bytes": growth([sample["anonymous"] for sample in along]),
        **setting(),
    }


def growth(samples: list[int]) -> int:
    """From the middle to the end, each the mean of three samples; the first half fills the cache and the allocator."""
    middle = len(samples) // 2
    return round(statistics.mean(samples[-3:]) - statistics.mean(samples[max(0, middle - 1) : middle + 2]))


def wait(server: subprocess.Popen[bytes], port: int) -> None:
    begin = time.perf_counter()
    while server.poll() is None and time.perf_counter() - begin < LIMIT_S:
        try:
            if get(port, "/health/ready") == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit("the server did not become ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    result = measure(args.requests, args.dtype)
    write(result, args.json)
    mb = {name: result[name] / 1e6 for name in ("loaded_pss", "limit_bytes", "growth_bytes")}
    print(", ".join(f"{name} {value:,.0f} MB" for name, value in mb.items()))


if __name__ == "__main__":
    main()
