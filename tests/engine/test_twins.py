"""Without the native library an engine answers the same through the twins in PyTorch, and says so in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx import LLM, SamplingParams
from phalanx.kernels.library import native
from tests.helpers.source import ROOT
from tests.helpers.tiny_gguf import in_blocks
from tests.helpers.tiny_model import write_tiny_model

PROMPTS = ["hello world", "the stop", "a longer prompt that fills more than one block of the cache"]
ELSEWHERE = "import json, sys; from tests.engine.test_twins import answers; print(answers(json.loads(sys.argv[1])))"


def answers(options: dict[str, Any]) -> str:
    with LLM(**options, dtype="float32", kv_cache_memory_bytes="8M") as llm:
        wanted = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        return json.dumps([list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, wanted)])


@pytest.mark.parametrize("kind", ["plain", "blocks"])
def test_answers_are_the_same(kind: str, tmp_path: Path) -> None:
    """Blocks of a file are multiplied by the native library only: elsewhere as the numbers that they are."""
    if native() is None:
        pytest.skip("the native library was not built")
    model = write_tiny_model(tmp_path / "model")
    options = {"model": str(model), "tokenizer": str(model)}
    asked = {}
    if kind == "blocks":
        options["model"] = str(in_blocks(model, tmp_path / "blocks"))
        asked["quantization"] = "gguf"
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, json.dumps(options | asked)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PHALANX_KERNELS": "torch"}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == answers(options)
    kernels = "PyTorch, because PHALANX_KERNELS asks for it"
    said = [line for line in done.stderr.splitlines() if kernels in line]
    assert said[-1] == f"Kernels: {kernels}. Unset PHALANX_KERNELS.", done.stderr
    wanted = f"float32, not as gguf, here: products are {kernels}."
    assert [line.endswith(wanted) for line in said[:-1]] == [True] * len(asked), done.stderr
