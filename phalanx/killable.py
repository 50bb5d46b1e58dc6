"""Processes for work that somebody else has written: a chat template, a grammar. They can be killed, and are.

A thread cannot be ended and C code cannot be interrupted; a process can. A pool keeps a few, starts them when first
needed, gives each one job at a time, and has one killed whose job takes too long. That is counted in processor time, by
the kernel: a job that has to wait for a processor is not at fault. A process has little memory, none of the parent's
environment, and ends with its parent.

Between parent and child go frames: a 4-byte big-endian length and that much JSON; before a job's frame go the seconds
that it may take. Does not say what jobs are: the child is a module with a `main` that calls `serve`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from phalanx.errors import Unavailable

_START_S = 30.0
"""Time for a process to start on a busy machine; it is never part of a job's time."""
_WAIT_S = 30.0
"""The longest that an answer is waited for. A job that has not used up its processor time by then was not given it."""
_SECONDS = struct.Struct(">d")
_ALARM_S = 60
"""A job that outlives its parent ends after this long."""

Frame = dict[str, Any]


class Late(Exception):
    """The job took more processor time than allowed; its process has been killed."""


class Gone(Exception):
    """The job ended its process: it crashed, or had too little memory."""


class KillablePool:
    """Up to `size` processes that run `module`. Thread-safe."""

    def __init__(self, module: str, *, size: int, memory_bytes: int, setup: Callable[[], Frame] | None = None):
        """`setup` gives a first frame for each new process; it answers that one like any other."""
        self._arguments = [module, str(memory_bytes)]
        self._setup = setup
        self._size = size
        self._slots = threading.BoundedSemaphore(size)
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        self._closed = False
        self._finalizer = weakref.finalize(self, _close, self._idle)
        _pools.add(self)

    def ask(self, request: Frame, processor_s: float) -> Frame:
        """The answer to `request`. Raises Late or Gone, ValueError for what JSON cannot express, and Unavailable when
        no process can be started, or it is kept from running."""
        try:
            data = json.dumps(request).encode("ascii")
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        with self._slots:
            if (process := self._take()) is not None:
                with contextlib.suppress(Gone):  # somebody may have killed it while it was idle: try a new one
                    return self._run(process, data, processor_s)
            return self._run(self._new(), data, processor_s)

    def start(self) -> None:
        """Have one process ready, so that the first job does not wait for it. Raises Unavailable."""
        with self._slots:
            process = self._take() or self._new()
            self._keep(process)

    def close(self) -> None:
        """End the processes; jobs that run end with Gone or come to an end. Idempotent."""
        with self._lock:
            self._closed = True
        self._finalizer()

    def begin_anew(self) -> None:
        """In a fork: the processes are the parent's, and threads that hold a lock are not there."""
        self._slots, self._lock = threading.BoundedSemaphore(self._size), threading.Lock()
        while self._idle:
            self._idle.pop().leave()

    def _run(self, process: _Process, data: bytes, processor_s: float) -> Frame:
        answer = process.ask(data, processor_s)
        self._keep(process)
        return answer

    def _new(self) -> _Process:
        first = json.dumps(self._setup() if self._setup else {}).encode("ascii")
        try:
            process = _Process(self._arguments)
            process.ask(first, _START_S)
        except (Late, Gone, Unavailable, OSError):
            raise Unavailable("A helper process could not be started; the machine may be out of memory.") from None
        return process

    def _take(self) -> _Process | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _keep(self, process: _Process) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return
        process.kill()


_pools: weakref.WeakSet[KillablePool] = weakref.WeakSet()


def _in_a_fork() -> None:
    for pool in _pools:
        pool.begin_anew()


os.register_at_fork(after_in_child=_in_a_fork)


def _close(idle: list[_Process]) -> None:
    while idle:
        idle.pop().kill()


class _Process:
    """One child. After an exception of `ask` it is dead."""

    def __init__(self, arguments: list[str]) -> None:
        # The environment holds only the way to the modules, so that no secret is near; in a session of its own the
        # child does not get the terminal's Ctrl-C.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"},
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise Gone
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    def ask(self, data: bytes, processor_s: float) -> Frame:
        deadline = time.monotonic() + _WAIT_S
        try:
            self._write(_SECONDS.pack(processor_s) + len(data).to_bytes(4, "big") + data, deadline)
            size = int.from_bytes(self._read(4, deadline), "big")
            answer: Frame = json.loads(self._read(size, deadline))
            return answer
        except BaseException as error:
            self.kill()
            if isinstance(error, Gone) and self._process.returncode == -signal.SIGPROF:
                raise Late from None
            raise

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._close()

    def leave(self) -> None:
        """To the parent, whose child it is."""
        self._process.returncode = 0  # there is nothing to wait for
        self._close()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            _await(self._in, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._in, view) :]
            except BrokenPipeError:
                raise Gone from None
            except BlockingIOError:
                continue

    def _read(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            _await(self._out, select.POLLIN, deadline)
            try:
                piece = os.read(self._out, min(count - len(data), 1 << 20))
            except BlockingIOError:
                continue
            if not piece:
                raise Gone
            data += piece
        return bytes(data)


def _await(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise Unavailable("The machine is too busy: a helper process was not given the processor time that it needs.")


def serve(handle: Callable[[Frame], Frame], memory_bytes: int) -> None:
    """The child's loop: answer frames until the parent closes the pipe."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while len(head := source.read(_SECONDS.size + 4)) == _SECONDS.size + 4:
        (seconds,), size = _SECONDS.unpack_from(head), int.from_bytes(head[_SECONDS.size :], "big")
        body = source.read(size)
        if len(body) < size:
            return
        signal.alarm(_ALARM_S)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        reply = json.dumps(handle(json.loads(body))).encode("ascii")
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        target.write(len(reply).to_bytes(4, "big") + reply)
        target.flush()
