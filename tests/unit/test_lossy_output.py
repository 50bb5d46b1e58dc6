"""Output that nobody reads costs lines, and says how many."""

from __future__ import annotations

import fcntl
import json
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from phalanx import lossy_output
from phalanx.logging import configure
from phalanx.lossy_output import LossyOutput, never_wait

LONG = "x" * 1000


class Pipe:
    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def read(self) -> str:
        found = b""
        while select.select([self.reader], [], [], 0)[0] and (piece := os.read(self.reader, 1 << 20)):
            found += piece
        return found.decode()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    os.close(pipe.reader)
    os.close(pipe.writer)


@contextmanager
def as_standard_error(pipe: Pipe) -> Iterator[None]:
    """A pipe, while standard output is closed."""
    with (
        open(pipe.writer, "w", closefd=False) as stream,
        mock.patch.object(sys, "stderr", stream),
        mock.patch.object(sys, "stdout", None),
    ):
        never_wait()
        yield


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_full_pipe_costs_lines_which_are_counted(pipe: Pipe, format: str) -> None:
    with as_standard_error(pipe):
        logger = configure("info", format, tag="engine")
        for number in range(200):
            logger.info("%d %s", number, LONG)
        kept = pipe.read().splitlines()
        assert 30 < len(kept) < 100
        logger.info("last")
        notice, last = pipe.read().splitlines()
        assert f"{200 - len(kept)} line(s) of output were lost" in notice
        assert "last" in last
        if format == "json":
            assert json.loads(notice)["level"] == "warning"
            assert json.loads(notice)["tag"] == "engine"
        logger.info("one more")
        assert len(pipe.read().splitlines()) == 1


def test_what_is_printed_is_lost_too(pipe: Pipe) -> None:
    with as_standard_error(pipe):
        for number in range(200):
            print(number, LONG, file=sys.stderr)
        kept = len(pipe.read().splitlines())
        print("last", file=sys.stderr)
        assert pipe.read() == f"{200 - kept} line(s) of output were lost: nobody read them.\nlast\n"


def test_a_line_of_which_a_part_was_written_is_closed(pipe: Pipe) -> None:
    with as_standard_error(pipe):
        print("y" * (1 << 20), file=sys.stderr)
        part = pipe.read()
        assert set(part) == {"y"}
        print("last", file=sys.stderr)
        assert pipe.read() == "\n1 line(s) of output were lost: nobody read them.\nlast\n"


def test_the_descriptor_of_others_still_waits(pipe: Pipe) -> None:
    with as_standard_error(pipe):
        print("first", file=sys.stderr)
        assert not fcntl.fcntl(pipe.writer, fcntl.F_GETFL) & os.O_NONBLOCK
        assert sys.stderr.fileno() == pipe.writer


def test_where_a_pipe_cannot_be_opened_again(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(lossy_output.os, "open", refuse)
        output = LossyOutput(pipe.writer)
    for _ in range(200):
        output.write(LONG.encode() + b"\n")
    kept = pipe.read().count("\n")
    output.write(b"last\n")
    assert pipe.read() == f"{200 - kept} line(s) of output were lost: nobody read them.\nlast\n"


def test_a_reader_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    output = LossyOutput(writer)
    os.close(reader)
    assert output.write(b"nobody\n") == 7
    os.close(writer)


def test_files_are_written_where_they_end(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("output") / "log"
    with path.open("w") as file:
        file.write("before\n")
        file.flush()
        LossyOutput(file.fileno()).write(b"after\n")
    assert path.read_text() == "before\nafter\n"


def test_a_full_disk_is_no_error() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        assert LossyOutput(full.fileno()).write(b"lost\n") == 5
