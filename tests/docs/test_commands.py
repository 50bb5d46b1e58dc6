"""Every command and program in the README and docs is run as it is printed, against the demo model.

Blocks marked `sh` are split into commands, blocks marked `python` are programs, those marked `py` parts of one. Port
8000 becomes the port of a server that the tests started; a command that serves is started, asked whether it is ready,
and stopped. Only `NOT_RUN` is left out.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.source import ROOT

PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
)
NOT_RUN = {
    "make test": "is what runs this test",
    "make check": "runs beside the tests",
    "make demo": "tests/faults/test_demo.py runs it",
    "make setup": "has run before the tests",
    "pip install torch==2.13.0": "has been installed by make setup",
    "pip install .": "test_packaging.py builds and installs the package",
    "pip install ./examples": "tests/engine/test_plug_ins.py installs the page's package",
    "phalanx serve -dp 2 -tp 2 --scheduling-policy shortest-first --routing-policy by-salt --transport half-width": (
        "and takes its policies"
    ),
}
BIN = os.path.dirname(sys.executable)


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (str(page.relative_to(ROOT)), code)
        for page in PAGES
        for code in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]


def commands() -> list[str]:
    """Every command line once; a line that ends in a backslash goes on."""
    seen: dict[str, None] = {}
    for _, code in blocks("sh"):
        for line in code.replace("\\\n", " ").splitlines():
            if line.strip() and not line.startswith("#"):
                seen[line.strip()] = None
    return list(seen)


def serves(command: str) -> bool:
    return command.startswith(("make serve", "phalanx serve")) and "--dry-run" not in command


def set_up() -> bool:
    """Whether `make setup` has made this environment as it would now, so that it has nothing to do."""
    stamp = ROOT / ".venv/.setup-done"
    return stamp.exists() and stamp.read_text() == setup_key(ROOT)


def setup_key(checkout: Path) -> str:
    return subprocess.run([checkout / "scripts/setup", "--key"], check=True, capture_output=True, text=True).stdout


def test_setup_has_nothing_to_do_after_it_has_built_the_native_library_in_place(tmp_path):
    """CMake leaves a C++ file of its own among the sources: `make serve` then installed everything a second time."""
    for name in ("scripts/setup", "pyproject.toml", "requirements.lock", "native/CMakeLists.txt", "native/module.cpp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    key = setup_key(tmp_path)
    left = tmp_path / "native/CMakeFiles/4.4.5/CompilerIdCXX/CMakeCXXCompilerId.cpp"
    left.parent.mkdir(parents=True)
    left.write_text("int main() {}\n")
    assert setup_key(tmp_path) == key
    (tmp_path / "native/module.cpp").write_text("// changed\n")
    assert setup_key(tmp_path) != key


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(port: int) -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PORT": str(port), "PHALANX_PORT": str(port)}


@contextmanager
def serving(command: str, port: int, log: Path):
    """Run a command that serves until the context ends; its output goes to `log`."""
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment(port),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "not ready in time"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5):
                    break
            except OSError:
                time.sleep(0.1)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def server_log(tmp_path_factory):
    return tmp_path_factory.mktemp("server") / "log"


@pytest.fixture(scope="module")
def server_port(server_log):
    port = free_port()
    with serving("phalanx serve --kv-cache-memory-bytes 512M", port, server_log):
        yield port


def test_there_is_something_to_run():
    assert len(commands()) > 12
    assert len(blocks("python")) > 4
    assert set(NOT_RUN) <= set(commands()), "NOT_RUN names a command that no page has"


@pytest.mark.parametrize("command", [c for c in commands() if not serves(c) and c not in NOT_RUN])
def test_command(command, server_port, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "commands"  # one for all: some use what others wrote
    folder.mkdir(exist_ok=True)
    if "phalanx.yaml" in command and not (folder / "phalanx.yaml").exists():
        (folder / "phalanx.yaml").write_text("port: 9000\nmax-model-len: 2k\n")
    line = command.replace("127.0.0.1:8000", f"127.0.0.1:{server_port}")
    strict = "set -eo pipefail; " + line.replace("curl ", "curl --fail-with-body -sS ")
    env = {k: v for k, v in environment(server_port).items() if k not in ("PHALANX_PORT", "PORT")}
    done = subprocess.run(["bash", "-c", strict], cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    if not command.startswith("printf"):
        assert done.stdout.strip()


@pytest.mark.parametrize("command", [c for c in commands() if serves(c) and c not in NOT_RUN])
def test_serving_command(command, tmp_path):
    if command.startswith("make") and not set_up():
        pytest.skip("this environment was not made by `make setup`")
    port = free_port()
    line = re.sub(r"(--port |PORT=)9000", rf"\g<1>{port}", command)
    with serving(line, port, tmp_path / "log") as process:
        assert process.poll() is None
    if command.startswith("phalanx"):  # make itself dies of the signal
        assert process.returncode == 0


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_program(page, code, server_port, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(code.replace("127.0.0.1:8000", f"127.0.0.1:{server_port}"))
    done = subprocess.run([sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr


def test_the_printed_curl_line_works(server_port, server_log):
    line = next(line for line in server_log.read_text().splitlines() if line.strip().startswith("curl "))
    assert str(server_port) in line
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert '"choices"' in done.stdout
