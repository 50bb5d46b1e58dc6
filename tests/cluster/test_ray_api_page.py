"""The examples of docs/ray-api.md, run in their order in one program, as printed; the model's name is filled in."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx.cluster
from tests.helpers.source import ROOT

PAGE = (ROOT / "docs/ray-api.md").read_text()


def test_every_public_name_is_on_the_page() -> None:
    for name in set(phalanx.cluster.__all__) - {"RayResources"}:
        assert f"`{name}`" in PAGE, name
        assert getattr(phalanx.cluster, name) is not None


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_the_examples_run(model: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 9
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks).replace('"..."', repr(model)))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
