"""The wheel has what it needs and nothing else, and the installed command works from it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.source import PACKAGE, ROOT
from tests.helpers.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheel"))


def build(folder, **env):
    source = folder / "source"
    shutil.copytree(PACKAGE, source / "phalanx", ignore=shutil.ignore_patterns("__pycache__", "_native.*"))
    built = shutil.ignore_patterns("CMakeCache.txt", "CMakeFiles", "*.ninja", ".ninja*", "*.a")
    shutil.copytree(ROOT / "native", source / "native", ignore=built)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(source)], check=True, timeout=240, env={**os.environ, **env})
    return next(folder.glob("phalanx-*.whl"))


def test_content(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if name.startswith("phalanx/")}
    (library,) = [name for name in packed if "/_native." in name]
    source = {
        str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed - {library} == {name for name in source if "/_native." not in name}
    assert "phalanx/py.typed" in packed
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"phalanx"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    text = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    always = [line for line in text.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert any("torch>=2.13" in line for line in always), "the package takes a range, the lock file a version"
    assert not any(name in line for line in always for name in ("pytest", "transformers", "openai", "ray"))
    assert "License-Expression: Apache-2.0" in text
    assert "Provides-Extra: ray" in text


def test_the_package_runs_from_the_wheel(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import phalanx, sys; from phalanx.cli.main import main;"
        f"assert phalanx.__file__.startswith({str(tmp_path)!r}), phalanx.__file__;"
        "import phalanx.server.app, phalanx.llm; sys.exit(main(['config', 'check']))"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok: ")


ANSWER = """
import sys
from phalanx import LLM, SamplingParams
with LLM(sys.argv[1], kv_cache_memory_bytes="8M") as llm:
    (output,) = llm.generate("hello world", SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    print(len(output.outputs[0].token_ids))
"""


def test_without_a_compiler_it_is_built_all_the_same_and_answers(tmp_path):
    nowhere = {"CXX": "/nonexistent/c++", "PATH": str(Path(sys.executable).parent)}
    with zipfile.ZipFile(build(tmp_path / "wheel", **nowhere)) as archive:
        assert not any("/_native." in name for name in archive.namelist())
        archive.extractall(tmp_path / "installed")
    model = write_tiny_model(tmp_path / "model")
    env = {**os.environ, **nowhere, "PYTHONPATH": str(tmp_path / "installed"), "PHALANX_KERNELS": ""}
    done = subprocess.run(
        [sys.executable, "-c", ANSWER, str(model)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split()[-1:] == ["8"], done.stderr
    said = [line for line in done.stderr.splitlines() if "Kernels: " in line]
    assert len(said) == 1 and "there is no C++ compiler. Install one" in said[0], done.stderr
