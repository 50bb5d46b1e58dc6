"""The package's front door, and which parts must not need torch."""

import subprocess
import sys

import pytest

import phalanx
from phalanx import env

WITHOUT_TORCH = [
    "phalanx",
    "phalanx.config",
    "phalanx.sampling_params",
    "phalanx.step",
    "phalanx.engine.scheduler",
    "phalanx.engine.kv_blocks",
    "phalanx.engine.engine",
    "phalanx.engine.async_engine",
    "phalanx.executor.base",
    "phalanx.checkpoint.locate",
    "phalanx.models.registry",
    "phalanx.models.spec",
    "phalanx.text.tokenizer",
    "phalanx.text.chat_template",
    "phalanx.structured.grammar",
    "phalanx.planner.hardware",
    "phalanx.server.app",
    "phalanx.bench.workload",
    "phalanx.cli.main",
]


def test_these_need_no_torch():
    code = f"import sys, importlib\nfor name in {WITHOUT_TORCH}:\n importlib.import_module(name)\n"
    code += " assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_public_names_are_found_and_others_are_not():
    assert phalanx.SamplingParams is not None
    assert set(phalanx.__all__) <= set(dir(phalanx))
    assert phalanx.SamplingConfig is phalanx.SamplingParams
    for name in set(phalanx.__all__) - {"SamplingConfig"}:
        assert getattr(phalanx, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Sampling'"):
        phalanx.Sampling  # noqa: B018


def test_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    monkeypatch.setenv("PHALANX_MAX_MODEL_LEN", "4K")
    assert env.cache_dir() == tmp_path
    assert env.variables()["max_model_len"] == "4K"
    monkeypatch.delenv("PHALANX_CACHE")
    assert env.cache_dir().parts[-2:] == (".cache", "phalanx")
    for value, shown in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("PHALANX_DEBUG", value)
        assert env.debug() is shown
