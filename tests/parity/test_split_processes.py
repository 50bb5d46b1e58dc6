"""Real rank processes give the tokens of one rank in float32: tiny models of three families, and the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.locate import locate
from phalanx.config import EngineConfig, resolve
from phalanx.distributed.mesh import Mesh
from phalanx.executor.hub import HubExecutor
from phalanx.executor.launcher import Layout
from phalanx.executor.multiprocess import SupervisorLauncher, SupervisorProcess
from phalanx.text.tokenizer import load_tokenizer
from tests.helpers.decoders import decoder_of, random_ids
from tests.helpers.split_decoders import greedy
from tests.helpers.stepping import Driver
from tests.helpers.tiny_models import tiny_checkpoint
from tests.helpers.worker_model import Facts

PROMPT = "Write a Python function that reverses a list, and explain in one sentence how it works."


@pytest.fixture(scope="module")
def supervisor() -> Iterator[SupervisorProcess]:
    process = SupervisorProcess(zygote=True)
    yield process
    process.close()


def tokens_of_ranks(
    supervisor: SupervisorProcess, config: EngineConfig, mesh: Mesh, ids: list[int], **layout: Any
) -> list[int]:
    executor = HubExecutor(SupervisorLauncher(mesh.world_size, "cpu", supervisor=supervisor), Layout(mesh, **layout))
    try:
        executor.start(config)
        chunks, block_size = (13, 1, 20), config.cache.block_size
        return greedy(lambda plan: executor.submit(plan).result(), ids, 64, chunks=chunks, block_size=block_size)
    finally:
        executor.close()


def config_of(path: Path, max_model_len: int) -> EngineConfig:
    options = EngineConfig.from_options(
        model=str(path), dtype="float32", max_model_len=max_model_len, block_size=8, max_num_seqs=2,
        max_num_batched_tokens=256, kv_cache_memory_bytes="32M",
    )  # fmt: skip
    return resolve(options, Facts(max_positions=max_model_len), Facts())


def alone(path: Path, ids: list[int]) -> list[int]:
    driver = Driver(decoder_of(path))
    return driver.greedy(driver.stream(ids, room=64), 64)


@pytest.mark.parametrize(
    ("family", "mesh", "layout"),
    [
        ("llama", Mesh(tp=3), {"tensor_weights": ((3.0, 1.0, 2.0),)}),
        ("gemma2", Mesh.of_widths((2, 1)), {"stage_layers": (2, 1)}),
        ("gpt2", Mesh(tp=2), {}),
    ],
    ids=["llama-3:1:2", "gemma2-2+1", "gpt2-2"],
)
def test_tiny_models(supervisor: SupervisorProcess, family: str, mesh: Mesh, layout: dict[str, Any]) -> None:
    path, ids = tiny_checkpoint(family), random_ids(40, seed=5)
    assert tokens_of_ranks(supervisor, config_of(path, 112), mesh, ids, **layout) == alone(path, ids)


@pytest.fixture(scope="module")
def demo() -> tuple[Path, list[int], list[int]]:
    """The file, a chat prompt, and one rank's answer."""
    checkpoint = locate(None)
    ids = load_tokenizer(checkpoint).encode(f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n")
    path = checkpoint.weight_files[0]
    return path, ids, alone(path, ids)


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        (Mesh(tp=2), {}),
        pytest.param(Mesh(tp=3), {}, marks=pytest.mark.slow),
        pytest.param(Mesh(tp=2), {"tensor_weights": ((3.0, 1.0),)}, marks=pytest.mark.slow),
        (Mesh(pp=2), {"stage_layers": (18, 12)}),
        pytest.param(Mesh.of_widths((2, 1)), {}, marks=pytest.mark.slow),
    ],
    ids=["tp2", "tp3", "3:1", "pp18:12", "2+1"],
)
def test_demo_model(
    supervisor: SupervisorProcess, demo: tuple[Path, list[int], list[int]], mesh: Mesh, layout: dict[str, Any]
) -> None:
    path, ids, want = demo
    assert tokens_of_ranks(supervisor, config_of(path, 256), mesh, ids, **layout) == want
