"""`Replica`: an `EngineClient` that starts one engine process and speaks to it over a socket pair.

Guarantees: the death of the process is noticed at once and ends every stream with EngineDead; one that hangs is ended
and counts as dead (with recovery switched off it is only called failed, until it moves again); a slow reader delays
nobody; after `close` the process is gone and reaped. Does not restart an engine and does not know text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence

import msgspec

from phalanx import env
from phalanx.config import EngineConfig
from phalanx.engine.client import EngineInfo, EngineLost, EngineOutput, EngineRequest, EngineStatus, request_error
from phalanx.engine.core_messages import (
    Abort,
    Beat,
    BrokenFrame,
    Fatal,
    FromEngine,
    LoadFailed,
    Outputs,
    Progress,
    Shutdown,
    Start,
    Started,
    Submit,
    decode_from_engine,
    loading_error,
)
from phalanx.engine.frames import FrameStream
from phalanx.engine.mailboxes import Mailboxes
from phalanx.engine.patience import LOOK_S, Patience
from phalanx.errors import Draining, EngineDead
from phalanx.executor.base import StartProgress
from phalanx.executor.death import MemoryKills, describe
from phalanx.executor.kept_image import KeptImage, socket_pair

log = logging.getLogger(__name__)

_GRACE = 1.0
"""Seconds that the process has to end itself in `close`."""
_FIRST_WORD_S = 45.0
"""A process beats before it imports anything large."""
_LOADING_SILENCE_S = 15.0
"""While the model loads native code may hold the interpreter for longer, and with it the thread that beats."""
_COUNT_S = 2.0
"""Between two looks at how many processes the kernel has ended for want of memory."""


class Replica:
    """One engine process. `spawn` may be called early, before there is a configuration; then `configure`, `start`."""

    def __init__(
        self,
        *,
        progress: StartProgress | None = None,
        life: int = 1,
        number: int = 0,
        door: socket.socket | None = None,
        cores: Sequence[int] = (),
        threads: int = 0,
        ranks: bool = False,
        kept: KeptImage | None = None,
    ):
        """`life` counts the processes in this one's place, `number` is which of several it is. `door` is where other
        nodes call: it stays open here when the process is lost. It runs on `cores` with `threads` threads; none, 0: as
        the system will. `ranks` says that processes of their own will compute. `kept` has the weights that the one
        before it has left, and gets what this one leaves."""
        self._progress = progress
        self._cores, self._threads = tuple(cores), threads
        self._door = door
        self._life, self._number, self._ranks = life, number, ranks
        self._kept = kept
        self._line: socket.socket | None = None
        """By which the process leaves the image of its weights."""
        self._start: Start | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._stream: FrameStream[FromEngine] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._mailboxes = Mailboxes(self._send, self._post)
        self._status = EngineStatus(state="loading", since=time.time(), heartbeat=time.time())
        self._patience = Patience(0.0, time.monotonic())
        self._watching: asyncio.Task[None] | None = None
        self._hung: str | None = None
        """Why it was ended, or, when it must not be, what is wrong with it now."""
        self._memory_kills = MemoryKills()
        self._lost: EngineLost | None = None
        self._gone = asyncio.Event()
        self._draining = False
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The engine process, None before `spawn`."""
        return None if self._process is None else self._process.pid

    def spawn(self) -> socket.socket:
        """Start the process; it imports what it needs and waits. Returns this end of the way to it. Call it on the
        event loop's thread: on Linux the process ends with the thread that started it. Raises EngineLost where the
        system has no memory or descriptors for one."""
        try:
            return self._spawn()
        except OSError as error:
            why = f"it could not be started ({error.strerror or error})"
            raise EngineLost(f"The engine process is gone: {why}.", why) from None

    def _spawn(self) -> socket.socket:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "phalanx.engine.core"]  # -P: the current folder is no place for modules
        command += ["--fd", str(theirs.fileno()), "--parent", str(os.getpid()), "--life", str(self._life)]
        command += ["--ranks"] if self._ranks else []
        command += ["--cores", ",".join(map(str, self._cores))] if self._cores else []
        inherited = [theirs.fileno()]
        if self._door is not None:
            command += ["--door", str(self._door.fileno())]
            inherited.append(self._door.fileno())
        with contextlib.ExitStack() as given:
            given.enter_context(theirs)
            if self._kept is not None:
                self._line, line = socket_pair()
                inherited.append(given.enter_context(line).fileno())
                command += ["--line", str(line.fileno())]
                if self._kept.fd is not None:
                    inherited.append(self._kept.fd)
                    command += ["--left", str(self._kept.fd)]
            # Standard output is the caller's; whatever libraries print goes to standard error. A process group of its
            # own: Ctrl-C on a terminal reaches this process alone, also while the new one is not yet able to ignore it.
            self._process = subprocess.Popen(
                command,
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=2,
                process_group=0,
                env=env.for_engine(self._threads),
            )
        return self._socket

    def configure(self, config: EngineConfig, name: str) -> None:
        """What to load: `config` as `resolution.for_engine` made it, and what the model is called."""
        self._start = Start(config, name, self._number, weights="" if self._kept is None else self._kept.weights)

    async def start(self) -> EngineInfo:
        """Returns when the model is loaded. Raises UserError, EngineDead; then nothing is left running."""
        if self._start is None:
            raise ValueError("configure the replica before it starts")
        try:
            sock = self._socket or self.spawn()
            self._stream = stream = await FrameStream.over(sock, decode_from_engine)
            self._socket = None
            await stream.send(self._start)
            started = await self._loaded(stream)
            if self._kept is not None:
                self._kept.weights = self._kept.weights or started.info.weights
        except BaseException:
            await self.close()
            raise
        self._status = started.status
        self._patience = Patience(self._start.config.recovery.hang_timeout, time.monotonic())
        self._reading = asyncio.create_task(self._read(stream))
        self._watching = asyncio.create_task(self._watch(may_end_it=self._start.config.recovery.enable_recovery))
        return started.info

    async def _loaded(self, stream: FrameStream[FromEngine]) -> Started:
        patience = _FIRST_WORD_S
        while True:
            try:
                async with asyncio.timeout(patience):
                    message = await stream.receive()
            except TimeoutError:
                self._hung = f"it has not answered for {patience:.0f} s"
                raise await self._death(None, "while loading the model") from None
            except (EOFError, OSError, BrokenFrame) as error:
                raise await self._death(error, "while loading the model") from None
            if isinstance(message, Started):
                return message
            if isinstance(message, LoadFailed):
                raise loading_error(message)
            if isinstance(message, Beat) and self._start is not None:  # from the first one on they come steadily
                patience = max(_LOADING_SILENCE_S, 1.5 * self._start.config.recovery.hang_timeout)
            if isinstance(message, Progress) and self._progress is not None:
                self._progress(message.phase, message.share, message.behind)

    async def _send(self, message: Submit) -> None:
        if self._stream is not None:
            await self._stream.send(message)

    def _post(self, message: Abort | Shutdown) -> None:
        """Send without waiting."""
        if self._stream is not None and self._lost is None and not self._closed:
            self._stream.post(message)

    async def _read(self, stream: FrameStream[FromEngine]) -> None:
        """Hand out everything the engine sends, until it is gone."""
        cause: Exception | None = None
        while cause is None:
            try:
                message = await stream.receive()
            except (EOFError, OSError, BrokenFrame) as error:
                cause = error
                break
            self._patience.heard(time.monotonic())
            if isinstance(message, Fatal):
                cause = RuntimeError(message.cause)
            elif isinstance(message, Outputs):
                await self._deliver(message)
            elif isinstance(message, Beat):
                self._status = status = message.status
                warm = status.computed_tokens > 0
                self._patience.moved(message.turns, message.progress, hang_bound=status.hang_bound, warm=warm)
        self._fail_all(await self._death(cause, ""))

    async def _watch(self, *, may_end_it: bool) -> None:
        """Look after the engine from now on; it is ended when it hangs."""
        counted = -_COUNT_S
        while self._lost is None:
            now = time.monotonic()
            if now - counted >= _COUNT_S:
                counted = now
                self._memory_kills.look([self.pid] if self.pid is not None else [])
            self._hung = self._patience.look(now)
            if self._hung is not None and may_end_it and self._process is not None:
                self._process.kill()  # `_read` sees its end
                return
            await asyncio.sleep(LOOK_S)

    async def _deliver(self, message: Outputs) -> None:
        if message.outputs:
            self._patience.advanced()
        if message.status is not None:
            self._status = message.status
        await self._mailboxes.deliver(message.outputs)

    async def _death(self, cause: BaseException | None, when: str) -> EngineLost:
        """What became of the process, in words. Ends it if it still lives."""
        ended = cause is None or isinstance(cause, EOFError | OSError)
        await self._end(0.5 if ended and self._hung is None else 0.0)
        code = self._process.returncode if self._process is not None else None
        fix, kind = "The log says more; restart the server.", "failed"
        silent = time.monotonic() - self._patience.last_heard
        if self._closed:
            reason, kind = "it was closed", "ended"
        elif self._hung is not None:
            reason, kind = f"{self._hung}, so it was ended", "hung"
        elif not ended:
            said = f"it sent something that is no message ({cause})"
            reason = said if isinstance(cause, BrokenFrame) else f"it gave up ({str(cause).rstrip('.')})"
        elif code is None:
            reason = "it closed the connection"
        else:
            memory = self._memory_kills.blame(self.pid or 0) if code == -signal.SIGKILL else None
            reason = describe(-code if code < 0 else code << 8, memory)
            kind = "ended" if code >= 0 else "killed" if memory is None else "out_of_memory"
            if code == -signal.SIGKILL:
                fix = "The system does this when memory runs out: look at its log, or give the KV cache less memory."
        message = f"The engine process is gone{' ' * bool(when)}{when}: {reason}."
        return EngineLost(message, reason, kind=kind, silent=silent, fix=fix)

    def _fail_all(self, error: EngineLost) -> None:
        if self._lost is None and not self._closed:
            log.debug("%s", error)
        self._lost = error
        self._mailboxes.fail(error)
        self._gone.set()

    async def lost(self) -> EngineLost:
        await self._gone.wait()
        return self._lost or EngineLost.closed()

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        if self._lost is not None:
            raise self._lost
        if self._closed or self._reading is None:
            raise EngineDead("The engine is closed." if self._closed else "The engine is not started.")
        return _refused(request) if self._draining else self._mailboxes.generate(request)

    async def abort(self, request_id: str) -> None:
        self._mailboxes.abort(request_id)

    def status(self) -> EngineStatus:
        status = msgspec.structs.replace(self._status)
        status.hang_bound = status.hang_bound or self._patience.hang_bound
        if self._lost is not None or self._closed:
            status.state, status.cause = "failed", self._lost.message if self._lost is not None else "closed"
        elif self._hung is not None:
            status.state, status.cause = "failed", f"The engine hangs: {self._hung}."
        elif self._watching is not None and self._patience.quiet and status.state == "ready":
            status.state = "recovering"
            status.cause = f"The engine has not answered for {self._patience.silent:.0f} s."
        elif self._draining:
            status.state = "draining"
        return status

    async def drain(self, timeout: float) -> bool:
        self._draining = True
        return await self._mailboxes.drained(timeout)

    async def close(self) -> None:
        if self._closed:
            return
        loaded = self._reading is not None and self._lost is None
        if loaded:
            self._post(Shutdown())
        self._closed = True
        await self._end(_GRACE if loaded else 0.0)
        tasks = [task for task in (self._reading, self._watching) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_all(self._lost or EngineLost.closed())
        if self._stream is not None:
            self._stream.close()
        for sock in (self._socket, self._line):
            if sock is not None:
                sock.close()

    async def _end(self, grace: float) -> None:
        """Wait `grace` seconds for the process to end, then kill it; it is reaped on return."""
        process = self._process
        if process is None:
            return
        try:
            if grace:
                await asyncio.to_thread(_wait, process, grace)
        finally:  # also when this is cancelled: nothing may be left
            if process.poll() is None:
                process.kill()
        await asyncio.to_thread(_wait, process, None)
        if self._kept is not None and self._line is not None:
            self._kept.take(self._line)
            self._line = None


async def _refused(request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
    refusal = request_error(Draining("The engine is shutting down.", retry_after=5.0))
    yield EngineOutput(request.request_id, len(request.output_token_ids), finish_reason="error", error=refusal)


def _wait(process: subprocess.Popen[bytes], seconds: float | None) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
