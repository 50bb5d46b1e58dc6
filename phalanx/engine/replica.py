"""`Replica`: an `EngineClient` that starts one engine process and speaks to it over a socket pair.

Guarantees: the death of the process is noticed at once and ends every stream with EngineDead; a slow reader delays
nobody, what it has not taken is merged; after `close` the process is gone and reaped. Does not restart an engine and
does not know text.
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
from collections.abc import AsyncGenerator

import msgspec

from phalanx import env
from phalanx.config import EngineConfig
from phalanx.engine.client import EngineInfo, EngineOutput, EngineRequest, EngineStatus, request_error
from phalanx.engine.core_messages import (
    Abort,
    BrokenFrame,
    Fatal,
    FromEngine,
    LoadFailed,
    Outputs,
    Progress,
    Shutdown,
    Start,
    Started,
    ToEngine,
    body_length,
    decode_from_engine,
    frame,
    loading_error,
    submit,
)
from phalanx.errors import Draining, EngineDead, InvalidRequest
from phalanx.executor.base import LoadProgress

log = logging.getLogger(__name__)

_IDLE_PATIENCE = 5.0
"""Seconds without a heartbeat after which an idle engine counts as hung."""
_STEP_PATIENCE = 60.0
"""The same for a busy one, whose heartbeats come between steps; ten times its slowest step when that is more."""
_GRACE = 1.0
"""Seconds that the process has to end itself in `close`."""


class _Mailbox:
    """What the engine sent for one request and its reader has not taken."""

    def __init__(self, start: int) -> None:
        self._outputs: list[EngineOutput] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self.next_start = start

    def put(self, output: EngineOutput) -> None:
        self._outputs.append(output)
        self.next_start = output.start + len(output.token_ids)
        self._news.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._news.set()

    async def take(self) -> EngineOutput:
        """Everything that is there, as one output. Raises what `fail` was told after that."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        outputs, self._outputs = self._outputs, []
        return outputs[0] if len(outputs) == 1 else merged(outputs)


def merged(outputs: list[EngineOutput]) -> EngineOutput:
    """One output for several of one request that follow each other."""
    first, last = outputs[0], outputs[-1]
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    prompt_logprobs = [entry for output in outputs for entry in output.prompt_logprobs or ()]
    scheduled = next((output for output in outputs if output.scheduled_s is not None), first)
    return msgspec.structs.replace(
        last,
        start=next((output.start for output in outputs if output.token_ids), last.start),
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs or None,
        prompt_logprobs=prompt_logprobs or None,
        num_cached_tokens=max(output.num_cached_tokens for output in outputs),
        scheduled_s=scheduled.scheduled_s,
        queued_s=scheduled.queued_s,
    )


class Replica:
    """One engine process. `spawn` may be called early, before there is a configuration; then `configure`, `start`."""

    def __init__(self, *, progress: LoadProgress | None = None):
        self._progress = progress
        self._start: Start | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._mailboxes: dict[str, _Mailbox] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._status = EngineStatus(state="loading", since=time.time(), heartbeat=time.time())
        self._heard = time.monotonic()
        self._slowest = 0.0
        self._lost: EngineDead | None = None
        self._draining = False
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The engine process, None before `spawn`."""
        return None if self._process is None else self._process.pid

    def spawn(self, *, ranks: bool = False) -> None:
        """Start the process; it imports what it needs and waits. `ranks` says that processes of their own will compute.
        Call it on the event loop's thread: on Linux the process ends with the thread that started it."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "phalanx.engine.core"]  # -P: the current folder is no place for modules
        command += ["--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        command += ["--ranks"] if ranks else []
        with theirs:
            # Standard output is the caller's; whatever libraries print goes to standard error. A process group of its
            # own: Ctrl-C on a terminal reaches this process alone, also while the new one is not yet able to ignore it.
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,
                process_group=0,
                env=env.for_engine(),
            )
        self._socket = ours

    def configure(self, config: EngineConfig, name: str) -> None:
        """What to load: `config` as `resolution.for_engine` made it, and what the model is called."""
        self._start = Start(config, name)

    async def start(self) -> EngineInfo:
        """Returns when the model is loaded. Raises UserError, EngineDead; then nothing is left running."""
        if self._start is None:
            raise ValueError("configure the replica before it starts")
        if self._process is None:
            self.spawn()
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
            self._socket = None
            await self._send(self._start)
            started = await self._loaded()
        except BaseException:
            await self.close()
            raise
        self._status, self._heard = started.status, time.monotonic()
        self._reading = asyncio.create_task(self._read())
        return started.info

    async def _loaded(self) -> Started:
        while True:
            try:
                message = await self._receive()
            except (EOFError, OSError, BrokenFrame) as error:
                raise await self._death(error, "while loading the model") from None
            if isinstance(message, Started):
                return message
            if isinstance(message, LoadFailed):
                raise loading_error(message)
            if isinstance(message, Progress) and self._progress is not None:
                self._progress(message.phase, message.share)

    async def _receive(self) -> FromEngine:
        """Raises EOFError (IncompleteReadError is one), OSError, BrokenFrame."""
        if self._reader is None:
            raise EOFError("not connected")
        length = body_length(await self._reader.readexactly(4))
        return decode_from_engine(await self._reader.readexactly(length))

    async def _send(self, message: ToEngine) -> None:
        if self._writer is not None:
            self._writer.write(frame(message))
            with contextlib.suppress(ConnectionError):  # the reading side reports the loss
                await self._writer.drain()

    def _post(self, message: ToEngine) -> None:
        """Send without waiting."""
        if self._writer is not None and self._lost is None and not self._closed:
            self._writer.write(frame(message))

    async def _read(self) -> None:
        """Hand out everything the engine sends, until it is gone."""
        cause: Exception | None = None
        while cause is None:
            try:
                message = await self._receive()
            except (EOFError, OSError, BrokenFrame) as error:
                cause = error
                break
            now = time.monotonic()
            if self._mailboxes:
                self._slowest = max(self._slowest, now - self._heard)
            self._heard = now
            if isinstance(message, Fatal):
                cause = RuntimeError(message.cause)
            elif isinstance(message, Outputs):
                self._deliver(message)
        self._fail_all(await self._death(cause, ""))

    def _deliver(self, message: Outputs) -> None:
        if message.status is not None:
            self._status = message.status
        for output in message.outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:  # else it was aborted in the meantime
                mailbox.put(output)

    async def _death(self, cause: BaseException | None, when: str) -> EngineDead:
        """What became of the process, in words. Ends it if it still lives."""
        reason = "it was closed" if self._closed else "it closed the connection"
        if isinstance(cause, BrokenFrame):
            reason = f"it sent something that is no message ({cause})"
        elif isinstance(cause, RuntimeError):
            reason = f"it gave up ({cause})"
        await self._end(0.5 if cause is None or isinstance(cause, EOFError | OSError) else 0.0)
        code = self._process.returncode if self._process is not None else None
        fix = "The log says more; restart the server."
        if not self._closed and code is not None and isinstance(cause, EOFError | OSError):
            reason = f"it ended with status {code}"
            if code < 0:
                reason = f"it was killed by {_signal_name(-code)}"
                if code == -signal.SIGKILL:
                    fix = (
                        "The system does this when memory runs out: look at its log, or give the KV cache less memory."
                    )
        return EngineDead(f"The engine process is gone{' ' * bool(when)}{when}: {reason}.", fix=fix)

    def _fail_all(self, error: EngineDead) -> None:
        self._lost = error
        if not self._closed:
            log.error("%s", error)
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        if self._lost is not None:
            raise self._lost
        if self._closed or self._reading is None:
            raise EngineDead("The engine is closed." if self._closed else "The engine is not started.")
        rid, start = request.request_id, len(request.output_token_ids)
        if self._draining:
            refusal = Draining("The engine is shutting down.", retry_after=5.0)
            yield EngineOutput(rid, start, finish_reason="error", error=request_error(refusal))
            return
        if rid in self._mailboxes:
            raise InvalidRequest(f"A request with the id '{rid}' is running.")
        try:
            message = submit(request)
        except (ValueError, OverflowError, TypeError):
            raise InvalidRequest("The request holds a value that cannot be sent to the engine.") from None
        mailbox = self._mailboxes[rid] = _Mailbox(start)
        self._idle.clear()
        finished = False
        try:
            await self._send(message)
            while not finished:
                output = await mailbox.take()
                finished = output.finish_reason is not None
                yield output
        finally:
            self._mailboxes.pop(rid, None)
            if not self._mailboxes:
                self._idle.set()
            if not finished:
                self._post(Abort([rid]))

    async def abort(self, request_id: str) -> None:
        mailbox = self._mailboxes.get(request_id)
        if mailbox is not None:
            self._post(Abort([request_id]))
            mailbox.put(EngineOutput(request_id, mailbox.next_start, finish_reason="abort"))

    def status(self) -> EngineStatus:
        status = msgspec.structs.replace(self._status)
        silent = time.monotonic() - self._heard
        patience = max(_STEP_PATIENCE, 10 * self._slowest) if self._mailboxes else _IDLE_PATIENCE
        if self._lost is not None or self._closed:
            status.state, status.cause = "failed", self._lost.message if self._lost is not None else "closed"
        elif self._reading is not None and silent > patience:
            status.state, status.cause = "failed", f"The engine has not answered for {silent:.0f} s."
        elif self._draining:
            status.state = "draining"
        return status

    async def drain(self, timeout: float) -> bool:
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        if self._closed:
            return
        loaded = self._reading is not None and self._lost is None
        if loaded:
            self._post(Shutdown())
        self._closed = True
        await self._end(_GRACE if loaded else 0.0)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._fail_all(self._lost or EngineDead("The engine is closed."))
        if self._writer is not None:
            self._writer.close()
        if self._socket is not None:
            self._socket.close()

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


def _wait(process: subprocess.Popen[bytes], seconds: float | None) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
