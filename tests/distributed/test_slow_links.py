"""What packing, computing meanwhile and messages beside tensors gain between two hosts with a slow link."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.hosts import missing
from tests.helpers.source import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "there are hosts")]


def test_gains_on_a_slow_link(tmp_path: Path) -> None:
    target = tmp_path / "links.json"
    command = [sys.executable, str(ROOT / "benchmarks/links.py"), "--rates", "50mbit", "--sizes", "1048576"]
    subprocess.run([*command, "--rounds", "5", "--json", str(target)], check=True, timeout=200)
    (link,) = json.loads(target.read_text())["links"]
    gains = {row["dtype"]: row["plain"] / row["packed"] for row in link["packing"]}
    assert gains["float32"] > 2 and gains["bfloat16"] > 1.3, gains
    overlap, messages = link["overlap"], link["messages"]
    assert overlap["left"] < 0.5 * overlap["exchange"], overlap
    assert messages["beside"] < 0.25 * messages["exchange"], messages
