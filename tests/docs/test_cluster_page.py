"""The bring-up of docs/cluster.md on several hosts is run as it is printed; addresses and the model are those of a test
bed."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.hosts import missing, test_bed
from tests.helpers.processes import wait_until
from tests.helpers.serving import Client, Serving
from tests.helpers.source import ROOT
from tests.helpers.tiny_model import write_tiny_model

HOSTS = {"head": 0, "worker1": 1, "worker2": 2}


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "there are hosts")
def test_the_bring_up_on_several_hosts(tmp_path: Path) -> None:
    page = (ROOT / "docs/cluster.md").read_text()
    (block,) = re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    folder = Path(tempfile.mkdtemp(prefix="phxdoc-", dir="/tmp"))  # short: sockets lie below
    variables: dict[str, dict[str, str]] = {name: {} for name in HOSTS}
    try:
        with test_bed(3) as hosts:
            for line in block.splitlines():
                name, _, command = line.partition("$ ")
                host = hosts[HOSTS[name]]
                for number, other in enumerate(hosts, 1):
                    command = command.replace(f"10.0.0.{number}", other.address)
                if command.startswith("export "):
                    variables[name] |= dict(word.split("=", 1) for word in command.split()[1:])
                    continue
                env = {**variables[name], "RAY_TMPDIR": str(folder / name), "OMP_NUM_THREADS": "1"}
                env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
                if command.startswith("ray start"):
                    (folder / name).mkdir()
                    started = host.start(["bash", "-c", command], env=env, shm_mb=2048)
                    assert started.wait(90) == 0, command
                    continue
                arguments = command.replace("/models/x", str(write_tiny_model(tmp_path / "model"))).split()[2:]
                assert command.startswith("phalanx serve ")
                arguments += ["--kv-cache-memory-bytes", "8M"]
                serving = Serving(arguments, tmp_path / "log", env=env, start=host.start, network=host.network)
                serving.ready()
                assert sorted(worker["node"] for worker in serving.status()["workers"]) == ["host1", "host2"]
                client = Client(serving, "one", {"prompt": "hello", "max_tokens": 5, "temperature": 0})
                client.join(60)
                assert json.loads(client.saw.events[0].data)["choices"]
                assert wait_until(lambda serving=serving: serving.at_rest(), 20)
                serving.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
