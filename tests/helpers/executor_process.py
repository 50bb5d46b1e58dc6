"""An executor in a process of its own, told what to do line by line: for tests of what it leaves, and of other hosts.

    process = ExecutorProcess({"model": …, "tensor_parallel_size": 2, …})
    process.ready(); process.ask("generate"); process.ask("restart 1"); process.ask("close")

Answers are JSON: `{"ok": …}`, or `{"error": class, "text": …}`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

Start = Callable[..., subprocess.Popen[bytes]]


class ExecutorProcess:
    def __init__(self, options: dict[str, Any], *, start: Start = subprocess.Popen, env: dict[str, str] | None = None):
        """`options` are configuration, and `splits`: whether the executor may split the model as it sees fit.
        `start` runs a command as Popen does, on another host perhaps."""
        command = [sys.executable, "-m", "tests.helpers.executor_process", json.dumps(options)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
        # Elsewhere: Ray's workers would find this Phalanx in the driver's folder, and not their own.
        self.process = start(command, cwd=tempfile.gettempdir(), env=variables, **pipes)
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self.noise: list[str] = []
        """What it printed besides answers."""
        self._readers = [threading.Thread(target=self._read, args=(n,), daemon=True) for n in ("stdout", "stderr")]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        for line in getattr(self.process, name):
            text = line.decode().rstrip("\n")
            if name == "stdout" and text.startswith("{"):
                self.answers.put(json.loads(text))
            else:
                self.noise.append(text)

    def answer(self, seconds: float = 90) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                return self.answers.get(timeout=0.2)
            except Empty:
                if self.process.poll() is not None and self.answers.empty():
                    raise AssertionError(f"it ended with {self.process.returncode}: {self.noise}") from None
        raise AssertionError(f"no answer in {seconds} s: {self.noise}")

    def ready(self, seconds: float = 90) -> Any:
        """What it says of itself when it has started."""
        answer = self.answer(seconds)
        assert "ok" in answer, answer
        return answer["ok"]

    def ask(self, command: str, seconds: float = 90) -> Any:
        answer = self.try_to(command, seconds)
        assert "ok" in answer, answer
        return answer["ok"]

    def try_to(self, command: str, seconds: float = 90) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())
        self.process.stdin.flush()
        return self.answer(seconds)

    def close(self) -> None:
        """However it is."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for reader in self._readers:
            reader.join(5)

    def __enter__(self) -> ExecutorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main(options: dict[str, Any]) -> None:
    from phalanx.engine.resolution import sharer, splitter
    from phalanx.errors import PhalanxError
    from phalanx.executor.choose import make_executor
    from phalanx.logging import configure
    from tests.helpers.one_request import generate
    from tests.helpers.worker_model import engine_config

    def say(**fields: Any) -> None:
        print(json.dumps(fields), flush=True)

    def obey(line: str) -> Any:
        match line.split():
            case ["generate"]:
                return generate(executor, epoch=epoch)
            case ["restart", number]:
                executor.restart(int(number))
            case ["close"]:
                executor.close()
        return status()

    def status() -> Any:
        facts = ("rank", "pid", "node", "state", "heads", "layers")
        return [{fact: getattr(status, fact) for fact in facts} for status in executor.check_health()]

    configure("info", "text", tag="test")
    splits = options.pop("splits", False)
    config = engine_config(Path(options.pop("model")), **options)
    epoch = 0
    try:
        executor = (
            make_executor(config, choose=splitter(config), share=sharer(config)) if splits else make_executor(config)
        )
        executor.start(config)
    except PhalanxError as error:
        say(error=type(error).__name__, text=str(error))
        return
    say(ok=status())
    for line in sys.stdin:
        try:
            say(ok=obey(line))
        except PhalanxError as error:
            say(error=type(error).__name__, text=str(error))
        if line.startswith("restart"):
            epoch = int(line.split()[1])
    executor.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
