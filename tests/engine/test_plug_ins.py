"""Policies and a transport of a package that is really installed, in a folder of its own, and what is said of one that
is not right. The package is the worked example of docs/plug-ins.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.engine.echo import EchoEngine
from phalanx.engine.router import Router
from phalanx.engine.routing import make_routing
from phalanx.engine.scheduling import FairShare, FirstCome, make_policy
from phalanx.errors import ConfigError
from tests.helpers.engine_driver import Driver
from tests.helpers.engine_requests import collect, engine_request, tokens_of
from tests.helpers.source import ROOT

SOURCE = ROOT / "tests/fixtures/plug-ins"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import shutil

    source = tmp_path_factory.mktemp("source") / "examples"
    shutil.copytree(SOURCE, source)  # pip builds in place
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", str(target), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))


def test_ours_by_name() -> None:
    assert type(make_policy("fair")) is FairShare
    assert type(make_policy("fcfs")) is type(make_policy("priority")) is FirstCome
    with pytest.raises(ConfigError, match="nobody supplies it") as caught:
        make_policy("shortest-first")
    assert "fair, fcfs, priority" in str(caught.value)


def test_a_scheduling_policy(installed: None) -> None:
    """The same requests in order of arrival, and with the policy of the package."""
    orders = {}
    for name in ("fcfs", "shortest-first"):
        driver = Driver(max_num_seqs=1, prefix_caching=False)
        driver.scheduler.queue.policy = make_policy(name)
        for number, size in enumerate((12, 3, 8, 1)):
            driver.ask(str(number), [1, 2, 3], max_tokens=size)
        order = []
        while driver.running():
            for output in driver.step():
                if output.finish_reason is not None:
                    order.append(output.request_id)
        orders[name] = order
        driver.drain()
    assert orders == {"fcfs": ["0", "1", "2", "3"], "shortest-first": ["3", "1", "2", "0"]}


async def test_a_routing_policy(installed: None) -> None:
    engines = [EchoEngine() for _ in range(4)]
    router = Router(engines, routing=make_routing("by-salt"))
    await router.start()
    for number in range(40):
        request = engine_request(f"r{number}", prompt=(number, 2, 3), max_tokens=3)
        outputs = await collect(router.generate(_salted(request, f"user-{number % 8}")))
        assert tokens_of(outputs) == [number, 2, 3]
    where = {request.cache_salt: number for number, engine in enumerate(engines) for request in engine.requests}
    assert len(where) == 8
    assert all(where[request.cache_salt] == n for n, engine in enumerate(engines) for request in engine.requests)
    assert sum(len(engine.requests) for engine in engines) == 40
    await router.close()


def test_a_transport(folder: Path, installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that sum as the package says, which gives other numbers than ours, by a little."""
    from phalanx import LLM, SamplingParams
    from tests.helpers.tiny_model import write_tiny_model

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    model = str(write_tiny_model(tmp_path))
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)
    found: dict[str, list[float]] = {}
    for name in ("auto", "half-width"):
        options = {"model": model, "dtype": "float32", "kv_cache_memory_bytes": "8M", "tensor_parallel_size": 2}
        with LLM(**options, transport=name) as llm:
            (output,) = llm.generate("hello world", params)
            found[name] = [entry.chosen.logprob for entry in output.outputs[0].logprobs or ()]
    assert found["auto"] != found["half-width"]
    assert found["auto"][0] == pytest.approx(found["half-width"][0], abs=0.05)


def test_a_transport_that_nobody_supplies_is_said_before_anything_loads(tmp_path: Path) -> None:
    from phalanx import LLM
    from tests.helpers.tiny_model import write_tiny_model

    with pytest.raises(ConfigError, match="--transport is 'half-widht', and nobody supplies it") as caught:
        LLM(model=str(write_tiny_model(tmp_path)), tensor_parallel_size=2, transport="half-widht")
    assert "auto, packed" in str(caught.value)


async def test_a_policy_that_chooses_nonsense_sends_nobody_astray() -> None:
    class Astray:
        def choose(self, request, loads) -> int:
            return 7

        def forget(self, engine: int) -> None: ...

    first, second, third = EchoEngine(), EchoEngine(), EchoEngine()
    router = Router([first, second, third], routing=Astray())
    await router.start()
    first.die()
    assert tokens_of(await collect(router.generate(engine_request(max_tokens=3)))) == [1, 2, 3]
    await router.close()


def _salted(request, salt: str):
    import msgspec

    return msgspec.structs.replace(request, cache_salt=salt)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("raise RuntimeError('not today')", "raised RuntimeError: not today"),
        ("Policy = dict", "has no method choose"),
        ("", "AttributeError"),
    ],
)
def test_what_is_wrong_with_a_package_is_said(tmp_path, monkeypatch, source: str, complaint: str) -> None:
    info = tmp_path / "odd-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[phalanx.routing]\nodd = odd_policy:Policy\n")
    (tmp_path / "odd_policy.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd_policy", raising=False)
    with pytest.raises(ConfigError, match=complaint) as caught:
        make_routing("odd")
    assert "odd_policy:Policy of the package odd" in str(caught.value)
    monkeypatch.delitem(sys.modules, "odd_policy", raising=False)


def test_the_page_shows_the_package_as_it_is() -> None:
    page = (ROOT / "docs/plug-ins.md").read_text()
    for path in sorted(SOURCE.rglob("*.py")):
        assert path.read_text().strip() in page
    assert (SOURCE / "pyproject.toml").read_text().split("\n\n", 1)[1].split("\n\n[tool")[0] in page
