"""`make demo`: an answer streams from two ranks, one of them is killed in mid-stream, and the answer goes on.

Starts the real server with the demo model in float32 over two processes, asks one question undisturbed, asks it again
and kills a rank with SIGKILL while the answer streams, compares the two, and says what happened and how long each part
took. Exit code 0 only when the answers are the same and the server ended cleanly.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import IO, Any

QUESTION = "Why is the sky blue? Explain it to a child."
TOKENS = 160
KILL_AT = 50
"""The tokens that have come when the rank is killed."""
VICTIM = 1
START_LIMIT_S = 120.0


class Failed(Exception):
    """The demo did not show what it is to show."""


class Page:
    """Text that comes in pieces, wrapped; colours only on a terminal."""

    def __init__(self) -> None:
        self._colours = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._width = min(100, shutil.get_terminal_size((100, 24)).columns) - 2
        self._column = 0
        self._word = ""

    def piece(self, text: str) -> None:
        for character in text:
            if character.isspace():
                self._flush()
                if character == "\n" and self._column:
                    self._new_line()
            else:
                self._word += character

    def _flush(self) -> None:
        if not self._word:
            return
        if self._column and self._column + 1 + len(self._word) > self._width:
            self._new_line()
        print(f"{' ' if self._column else '  '}{self._word}", end="", flush=True)
        self._column += len(self._word) + 1
        self._word = ""

    def _new_line(self) -> None:
        print()
        self._column = 0

    def end(self) -> None:
        self._flush()
        if self._column:
            self._new_line()

    def event(self, text: str) -> None:
        """Something that happens while the answer streams."""
        self.end()
        print(f"\033[1;31m>>> {text}\033[0m" if self._colours else f">>> {text}", flush=True)

    def heading(self, text: str) -> None:
        print(f"\n\033[1m{text}\033[0m" if self._colours else f"\n{text}", flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
        found: dict[str, Any] = json.load(answer)
        return found


def wait_until_ready(server: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise Failed(f"the server ended with exit code {server.returncode}")
        try:
            get(f"{address}/health/ready")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise Failed(f"the server was not ready within {START_LIMIT_S:.0f} s")


def answer_to(address: str) -> Iterator[str]:
    """The pieces of a greedy answer, as they come. Raises Failed when the stream has an error or no end."""
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_completion_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(  # noqa: S310
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    finish = None
    with urllib.request.urlopen(request, timeout=60) as stream:  # noqa: S310
        for line in stream:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                if finish is None:
                    raise Failed("the answer has no end")
                return
            event = json.loads(data)
            if "error" in event:
                raise Failed(f"the server said: {event['error']['message']}")
            for choice in event["choices"]:
                finish = choice["finish_reason"] or finish
                if piece := choice["delta"].get("content"):
                    yield piece
    raise Failed("the stream broke off")


class Show:
    def __init__(self, address: str, page: Page):
        self._address, self._page = address, page
        self.victim = 0
        self.seen = 0
        self.silence = 0.0

    def undisturbed(self) -> str:
        began = time.monotonic()
        text = "".join(answer_to(self._address))
        print(f"  First undisturbed: {len(text)} characters in {time.monotonic() - began:.1f} s. Now with a loss.\n")
        return text

    def disturbed(self) -> str:
        text, killed_at = "", 0.0
        for count, piece in enumerate(answer_to(self._address), 1):
            if killed_at and not self.silence:
                self.silence = time.monotonic() - killed_at
                self._page.event(f"and it goes on, {self.silence:.2f} s later")
            text += piece
            self._page.piece(piece)
            if count == KILL_AT:
                self.victim, self.seen = self._kill(), count
                killed_at = time.monotonic()
        self._page.end()
        if not self.silence:
            raise Failed("the answer was over before a rank was killed")
        return text

    def _kill(self) -> int:
        workers = get(f"{self._address}/status")["workers"]
        pid: int = next(worker["pid"] for worker in workers if worker["rank"] == VICTIM)
        self._page.event(f"kill -9 {pid}    (rank {VICTIM} of {len(workers)}, it has its share of every layer)")
        os.kill(pid, signal.SIGKILL)
        return pid

    def tell(self, same: bool) -> None:
        """Five lines."""
        recoveries = get(f"{self._address}/status")["recoveries"]
        if not recoveries:
            raise Failed("the server knows of no recovery")
        last = recoveries[-1]
        self._page.heading("What happened")
        noticed = last["detection_s"] or 0.0
        print(
            f"  killed     rank {last['rank']} (process {self.victim}) with SIGKILL, after {self.seen} pieces of text"
        )
        print(f"  noticed    after {noticed:.2f} s: {last['cause'].rstrip('.')}")
        print(f"  replaced   after {last['reload_s']:.2f} s, by `{last['plan']}`; the other rank kept its weights")
        print(f"  went on    after {last['first_token_s']:.2f} s; {last['recomputed']} tokens were computed again")
        print(f"  the text   {'is the undisturbed one, character by character' if same else 'DIFFERS'}")


def show(server: subprocess.Popen[bytes], address: str, page: Page) -> bool:
    """Whether both answers are the same."""
    wait_until_ready(server, address)
    print(f"> {QUESTION}")
    act = Show(address, page)
    undisturbed, disturbed = act.undisturbed(), act.disturbed()
    act.tell(undisturbed == disturbed)
    return undisturbed == disturbed


def stop(server: subprocess.Popen[bytes]) -> int:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        return server.wait(timeout=40)
    except subprocess.TimeoutExpired:
        server.kill()
        raise Failed("the server did not stop") from None


def guarded(act: Callable[[], bool], log: IO[bytes]) -> bool:
    try:
        return act()
    except (Failed, OSError) as error:
        log.seek(0)
        print(f"\n{log.read().decode(errors='replace')}\nerror: {error}", file=sys.stderr)
        return False


def main() -> int:
    page, port = Page(), free_port()
    page.heading("One model, two ranks, and one of them is about to die")
    print("  The demo model in float32 over two processes: phalanx serve -tp 2 --dtype float32", flush=True)
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "phalanx", "serve", "-tp", "2", "--dtype", "float32", "--port", str(port)]
        command += ["--kv-cache-memory-bytes", "256M"]
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            same = guarded(lambda: show(server, f"http://127.0.0.1:{port}", page), log)
        finally:
            code = stop(server)
    if code != 0:
        print(f"error: the server stopped with exit code {code}", file=sys.stderr)
    return 0 if same and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
