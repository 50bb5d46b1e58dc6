"""Ctrl-C while the command line is still being imported."""

import subprocess
import sys
import tomllib

import pytest

from tests.helpers.source import ROOT

INTERRUPTED = """
import os, signal, sys

class Interrupt:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "phalanx.errors":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt)
sys.argv = ["phalanx", "--version"]
"""


def test_it_ends_without_a_traceback() -> None:
    code = INTERRUPTED + "from phalanx.cli.start import main\nsys.exit(main())\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_interruption_above_is_one() -> None:
    code = INTERRUPTED + "from phalanx.cli.main import main\nsys.exit(main())\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "KeyboardInterrupt" in done.stderr


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + INTERRUPTED
    code += "from phalanx.cli.start import main\nsys.exit(main())\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith("phalanx ")


def test_the_installed_command_begins_there() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"phalanx": "phalanx.cli.start:main"}


@pytest.mark.parametrize("arguments", [["--version"], ["serv"]])
def test_python_m_phalanx_is_the_same(arguments: list[str]) -> None:
    ways = [["-m", "phalanx"], ["-m", "phalanx.cli.start"], ["-m", "phalanx.cli.main"]]
    answers = [subprocess.run([sys.executable, *way, *arguments], capture_output=True, timeout=60) for way in ways]
    assert len({(done.returncode, done.stdout, done.stderr) for done in answers}) == 1
