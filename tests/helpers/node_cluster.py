"""`phalanx serve` on several hosts of a test bed, as a user starts it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.helpers.hosts import Host
from tests.helpers.pace import Pace
from tests.helpers.processes import wait_until

START_S = 90.0
SERVE = (sys.executable, "-P", "-m", "phalanx.cli.main", "serve")


class Node:
    """One `phalanx serve`, and what it prints."""

    def __init__(self, host: Host, log: Path, arguments: list[str], env: dict[str, str], **options: object):
        self.host, self.log = host, log
        environment = {"OMP_NUM_THREADS": "1", "PHALANX_TRANSPORT_KEY": "", **env}
        with log.open("wb") as output:
            self.process = host.start(
                [*SERVE, *arguments], env=environment, stdout=output, stderr=subprocess.STDOUT, **options
            )  # type: ignore[arg-type]

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def says(self, pattern: str, seconds: float = START_S) -> str:
        """Wait until a line matches `pattern`, and return what matched. AssertionError tells all that it said."""
        found: re.Match[str] | None = None
        deadline = time.monotonic() + seconds
        while found is None:
            found = re.search(pattern, self.output)
            if found is None and (time.monotonic() > deadline or self.process.poll() is not None):
                found = re.search(pattern, self.output)
                assert found, f"{self.host.name} did not say {pattern!r} in {seconds:g} s:\n{self.output}"
            time.sleep(0.02)
        return found[0]

    def ends(self, seconds: float = 10.0) -> int:
        """Its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.host.name} still runs after {seconds:g} s:\n{self.output}") from None


class Cluster:
    """The same command on every host; host 0 serves. While `pace` is held, each step of its engine takes a while."""

    def __init__(self, hosts: list[Host], folder: Path, model: str, *arguments: str, env: dict[str, str] | None = None):
        self.hosts, self.folder = hosts, folder
        self.arguments = [model, *arguments, "--nnodes", str(len(hosts)), "--master-addr", hosts[0].address]
        self.pace = Pace(folder)
        self.env = {"PHALANX_FAULT": self.pace.fault, **(env or {})}
        self.nodes: dict[int, Node] = {}

    def start(self, rank: int, *arguments: str, env: dict[str, str] | None = None, **options: object) -> Node:
        extra = ["--node-rank", str(rank), *(["--headless"] if rank else []), *arguments]
        log = self.folder / f"node{rank}-{time.monotonic_ns()}.log"
        self.nodes[rank] = Node(
            self.hosts[rank], log, [*self.arguments, *extra], {**self.env, **(env or {})}, **options
        )
        return self.nodes[rank]

    def start_all(self) -> Cluster:
        for rank in range(len(self.hosts)):
            self.start(rank)
        self.nodes[0].says("Ready: ")
        return self

    def complete(self, prompt: str, tokens: int, *, timeout: float = 60.0, **fields: object) -> str:
        """The greedy continuation, as text. Raises httpx errors."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
        with self.hosts[0].network():
            answer = httpx.post("http://127.0.0.1:8000/v1/completions", json=body, timeout=timeout)
        try:
            answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            error.add_note(answer.text)
            raise
        return str(answer.json()["choices"][0]["text"])

    def outputs(self) -> str:
        return "\n".join(f"--- node {rank}\n{node.output}" for rank, node in self.nodes.items())

    def nothing_left(self, seconds: float = 5.0) -> bool:
        return wait_until(lambda: not any(host.pids() for host in self.hosts), seconds)

    def close(self) -> None:
        for host in self.hosts:
            host.kill()


@contextlib.contextmanager
def running(
    hosts: list[Host], folder: Path, model: str, *arguments: str, env: dict[str, str] | None = None
) -> Iterator[Cluster]:
    """A cluster that serves. Nothing is left of it afterwards."""
    cluster = Cluster(hosts, folder, model, *arguments, env=env)
    try:
        yield cluster.start_all()
    finally:
        cluster.close()
