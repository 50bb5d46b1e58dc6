"""How often a decoding step leaves Python: what it costs beside computing grows with that. Counted, not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.kernels.library import native
from phalanx.worker.worker import Worker, open_worker
from tests.helpers.plans import Run, admission, plan
from tests.helpers.worker_model import LAYERS, engine_config, write_model

if native() is None:
    pytest.skip("the native library was not built", allow_module_level=True)

ROWS = (1, 3)


class Operators(TorchDispatchMode):
    """Counts those of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def counted(function: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        calls.append(name)
        return function(*args)

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["float32", "bfloat16", "int8"])
def worker(model: Path, request: pytest.FixtureRequest) -> Iterator[Worker]:
    dtype, scheme = ("bfloat16", "int8") if request.param == "int8" else (request.param, "none")
    worker = open_worker(engine_config(model, dtype=dtype, quantization=scheme))
    worker.load()
    worker.allocate()
    yield worker
    worker.close()


def decoding(worker: Worker, rows: int, proposed: int = 0) -> Callable[[], None]:
    """What runs one step of `rows` requests that have their prompts behind them, with so many proposed tokens each."""
    slots = range(rows)
    runs = [Run(slot, 9) for slot in slots]
    worker.run(plan(runs, admit=[admission(slot, [3] * 9, range(8 * slot, 8 * slot + 8)) for slot in slots]))
    step = plan([Run(slot, 1, last=5, proposed=(7,) * proposed) for slot in slots])

    def run() -> None:
        worker.run(step)

    return run


@pytest.mark.parametrize("proposed", [0, 2])
@pytest.mark.parametrize("rows", ROWS)
def test_a_step_of_single_tokens_is_no_operator(worker: Worker, rows: int, proposed: int) -> None:
    run = decoding(worker, rows, proposed)
    run()
    native_steps = worker._runner._decoding._steps._native
    calls: list[str] = []
    spies = {name: counted(getattr(native_steps, name), name, calls) for name in ("begin", "play", "tokens")}
    worker._runner._decoding._steps._native = SimpleNamespace(**spies)
    with Operators() as operators:
        run()
    assert calls == ["begin", *["play"] * -(-(LAYERS + 2) // 8), "tokens"]
    assert not operators.seen


@pytest.mark.parametrize("rows", ROWS)
def test_any_other_step_is_a_few_calls(worker: Worker, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    worker._runner._decoding, worker._runner._recorded = None, True
    run = decoding(worker, rows)
    run()  # what is made once for a number of rows is there then
    library, calls = native(), []
    for name in dir(library):
        function = getattr(library, name)
        if callable(function) and not isinstance(function, type):
            monkeypatch.setattr(library, name, counted(function, name, calls))
    reel = worker._runner.decoder.tapes._reel
    play = counted(reel.native.play, "play", calls)
    monkeypatch.setattr(reel, "native", SimpleNamespace(play=play))
    with Operators() as operators:
        run()
    assert calls.count("play") == -(-LAYERS // 8)
    assert len(calls) - calls.count("play") <= 9, calls
    assert len(operators.seen) <= 12, operators.seen
