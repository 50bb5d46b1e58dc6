"""The engine process: one `Engine`, fed by its front end through an inherited socket.

Started as `python -m phalanx.engine.core --fd N --parent PID` by `phalanx.engine.replica`. It reads every message that
has arrived, turns one step, sends what the step brought, and sleeps only when there is no work. It listens on nothing.

Guarantees: an exception in handling one request is that request's error; the front end hears from it every quarter of
a second, whatever the loop does; the process ends within two seconds of its parent's end; it leaves Ctrl-C to the
parent. `open_engine` is also what `phalanx.llm` runs in its own process. Does not
tokenise (except for grammars, which need the vocabulary).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from phalanx import env, fault_point
from phalanx.config import EngineConfig
from phalanx.engine.client import EngineInfo, EngineOutput, EngineStatus, request_error
from phalanx.engine.core_messages import (
    BEAT_S,
    Abort,
    Beat,
    BrokenFrame,
    Fatal,
    FrameSocket,
    LoadFailed,
    Progress,
    Shutdown,
    Start,
    Started,
    Submit,
    ToEngine,
    decode_request,
    load_failure,
    send_outputs,
)
from phalanx.engine.engine import Engine
from phalanx.engine.parent import end_with_parent
from phalanx.engine.resolution import sharer, splitter
from phalanx.errors import EngineDead, PhalanxError, UserError
from phalanx.executor.base import CacheLayout, StartProgress, WorkerDied
from phalanx.executor.choose import make_executor
from phalanx.executor.kept_image import Line
from phalanx.logging import configure
from phalanx.lossy_output import never_wait

if TYPE_CHECKING:
    from phalanx.executor.multiprocess import SupervisorProcess
    from phalanx.sampling_params import StructuredOutputs

log = logging.getLogger(__name__)

IDLE_TICK = 0.4
"""Seconds between heartbeats of an idle engine; a front end expects one every 0.5."""
_STATUS_EVERY = 0.05
"""Seconds between status snapshots of a busy engine, so that they cost nothing beside the steps."""
_TRIES = 3
"""Steps that may fail in a row before the engine gives up."""
_TORCH_ENOMEM = "can't allocate memory"
"""How torch's allocator says it."""


def open_engine(
    config: EngineConfig,
    name: str,
    progress: StartProgress | None = None,
    *,
    supervisor: SupervisorProcess | None = None,
    life: int = 1,
    door: socket.socket | None = None,
    replica: int = 0,
    line: Line | None = None,
    weights: str = "",
) -> tuple[Engine, EngineInfo]:
    """Load the model, in this process or in ranks of its own. `config` is resolved, `name` is what the model is called;
    a `supervisor` that is given is used for the ranks, and ended with them; `life` counts the processes in this one's
    place; other nodes call at `door`, if it is open already; `replica` is which of several this is. By `line` a rank in
    this process leaves its weights to the next one; they are those that `weights` is the fingerprint of, where that is
    known. Raises UserError, WorkerDied."""
    begin = time.monotonic()
    executor = make_executor(
        config,
        supervisor=supervisor,
        choose=splitter(config),
        share=sharer(config),
        door=door,
        replica=replica,
        life=life,
        keeper=line,
        weights=weights,
    )
    try:
        layout = executor.start(config, progress)
        grammars = LazyGrammars(config, layout.vocab_size)
        load_s = time.monotonic() - begin
        engine = Engine(config, executor, layout, compile_grammar=grammars, load_s=load_s, life=life, debug=env.debug())
    except BaseException:
        executor.close()
        raise
    return engine, _info(config, name, layout, load_s, executor.check_health()[0].weights)


def _info(config: EngineConfig, name: str, layout: CacheLayout, load_s: float, weights: str) -> EngineInfo:
    parallel = config.parallel
    return EngineInfo(
        model=name,
        dtype=config.model.dtype,
        device=config.model.device,
        max_model_len=config.model.max_model_len or 0,
        vocab_size=layout.vocab_size,
        block_size=layout.block_size,
        blocks=layout.blocks,
        kv_bytes=layout.blocks * layout.bytes_per_block,
        pid=os.getpid(),
        executor=parallel.distributed_executor_backend or "inprocess",
        mesh={
            "dp": parallel.data_parallel_size,
            "pp": parallel.pipeline_parallel_size,
            "cp": parallel.context_parallel_size,
            "tp": parallel.tensor_parallel_size,
        },
        load_s=load_s,
        weights=weights,
        shares=layout.shares,
    )


class LazyGrammars:
    """Compiles grammars; the vocabulary is read when the first one comes. May be called from any thread."""

    def __init__(self, config: EngineConfig, vocab_size: int):
        self._config = config
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._compiler: Any = None

    def __call__(self, wanted: StructuredOutputs) -> Any:
        """Raises InvalidRequest, and PhalanxError when the model's files are gone."""
        from phalanx.checkpoint.locate import locate
        from phalanx.structured.grammar import GrammarCompiler
        from phalanx.text.tokenizer import load_tokenizer

        with self._lock:
            if self._compiler is None:
                model = self._config.model
                try:
                    checkpoint = locate(model.model, revision=model.revision)
                    tokenizer = load_tokenizer(checkpoint, model.tokenizer, model.revision)
                except UserError as error:  # the operator's, not of whoever asks
                    log.error("Grammars cannot be compiled: %s", error)
                    raise PhalanxError("The model's tokenizer, which grammars need, cannot be read any more.") from None
                self._compiler = GrammarCompiler(tokenizer, self._vocab_size, self._config.limits)
        fault_point.reach("compile")
        return self._compiler.compile(wanted)


class Heartbeat:
    """A thread that tells the front end how it goes, also while loading, or a step, takes long. Use it as a context."""

    def __init__(self, channel: FrameSocket, engine: Engine | None = None):
        self._channel = channel
        self._engine = engine
        self._ended = False
        self._changed = threading.Event() if engine is None else engine.changed
        self._since = time.time()
        self.progress = 0
        """Of loading."""
        self._thread = threading.Thread(target=self._run, name="phalanx-heartbeat", daemon=True)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the front end is gone; the loop notices by itself
            while not self._ended:
                self._changed.clear()
                self._channel.send(self._beat())
                self._changed.wait(BEAT_S)

    def _beat(self) -> Beat:
        engine = self._engine
        if engine is None:
            loading = EngineStatus(state="loading", since=self._since, heartbeat=time.time())
            return Beat(loading, 0, self.progress)
        return Beat(engine.status(), engine.turns, engine.progress)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        self._changed.set()
        self._thread.join(1.0)


class Core:
    """The loop between a socket and an engine."""

    def __init__(self, channel: FrameSocket, engine: Engine, *, life: int = 1):
        self._channel = channel
        self._engine = engine
        self._life = life
        self._status_sent = 0.0
        self._was_busy = False
        self._failures = 0

    def run(self) -> bool:
        """Until the front end says so, True, or the engine cannot go on, False. Raises EOFError when the front end is
        gone, BrokenFrame when it sends nonsense."""
        engine = self._engine
        while True:
            replies: list[EngineOutput] = []
            for message in self._channel.receive(0.0 if engine.has_work else IDLE_TICK):
                if isinstance(message, Shutdown):
                    return True
                self._handle(message, replies)
            if replies:  # ahead of the step: clients wait to hear whether they are admitted
                self._send_outputs(replies)
            busy = engine.has_work
            outputs = self._step() if busy else []
            if outputs is None:
                return False
            if not busy:
                engine.tick()
            self._report(outputs, busy)

    def _handle(self, message: ToEngine, replies: list[EngineOutput]) -> None:
        if isinstance(message, Abort):
            self._engine.abort(message.request_ids)
        elif isinstance(message, Submit):
            reply = self._add(message)
            if reply is not None:
                replies.append(reply)

    def _add(self, message: Submit) -> EngineOutput | None:
        """Queue the request. The answer says that it is accepted, or why it is not; a request with a grammar is
        accepted by the engine when that is compiled."""
        start = 0
        try:
            request = decode_request(message.request)
            start = len(request.output_token_ids)
            self._engine.add(request)
            if request.sampling.structured_outputs is not None:
                return None
        except Exception as error:
            if not isinstance(error, PhalanxError):
                log.exception("request %s could not be added", message.request_id)
            return EngineOutput(message.request_id, start, finish_reason="error", error=request_error(error))
        return EngineOutput(message.request_id, start)

    def _step(self) -> list[EngineOutput] | None:
        """One step. None when the engine is beyond repair; the front end has been told then."""
        try:
            outputs = self._engine.step()
        except EngineDead as error:
            self._channel.send(Fatal(error.message))
            return None
        except Exception as error:
            # The engine answers for its requests and workers itself; what arrives here is a bug in it.
            self._failures += 1
            log.exception("a step failed (%d in a row)", self._failures)
            if self._failures < _TRIES:
                with contextlib.suppress(Exception):
                    self._engine.recover(WorkerDied(0, f"{type(error).__name__}: {error}"))
                    return []
            self._channel.send(Fatal(f"Steps kept failing: {type(error).__name__}: {error}."))
            return None
        if any(output.token_ids for output in outputs):
            self._failures = 0
        return outputs

    def _report(self, outputs: list[EngineOutput], busy: bool) -> None:
        now = time.monotonic()
        due = now - self._status_sent >= (_STATUS_EVERY if busy else IDLE_TICK)
        idle_since = self._was_busy and not busy
        self._was_busy = busy
        if due or idle_since or (busy and not self._engine.has_work):
            self._status_sent = now
            self._send_outputs(outputs, self._engine.status())
        elif outputs:
            self._send_outputs(outputs)
        if outputs:
            fault_point.reach("after_send", step=self._engine.committed_step, life=self._life)

    def _send_outputs(self, outputs: list[EngineOutput], status: EngineStatus | None = None) -> None:
        send_outputs(self._channel.send, outputs, status, lambda request_id: self._engine.abort([request_id]))


def _load(
    channel: FrameSocket, start: Start, supervisor: SupervisorProcess | None, life: int, door: socket.socket | None,
    line: Line | None,
) -> Engine | None:  # fmt: skip
    """Open the engine and tell the front end. None when it could not be opened; the front end knows why."""
    last = ("", 0.0)

    def progress(phase: str, share: float, behind: str) -> None:
        nonlocal last
        heartbeat.progress += 1
        now = time.monotonic()
        if phase != last[0] or share >= 1.0 or now - last[1] >= 0.05:
            last = (phase, now)
            channel.send(Progress(phase, share, behind))

    try:
        with Heartbeat(channel) as heartbeat:
            engine, info = open_engine(
                start.config,
                start.name,
                progress,
                supervisor=supervisor,
                life=life,
                door=door,
                replica=start.replica,
                line=line if start.config.recovery.enable_recovery else None,  # else nobody comes after this process
                weights=start.weights,
            )
    except PhalanxError as error:
        log.debug("loading failed", exc_info=True)
        channel.send(load_failure(error))
        return None
    except Exception as error:
        log.debug("loading failed", exc_info=True)
        channel.send(_start_failure(error))
        return None
    channel.send(Started(info, engine.status()))
    return engine


def _start_failure(error: Exception) -> LoadFailed:
    """What no error of ours describes: the machine has too little memory, or we have a bug."""
    cause = " ".join(str(error).split())[:500].rstrip(".")
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM or _TORCH_ENOMEM in cause:
        return LoadFailed(
            "UserError",
            "There is not enough memory to load the model, or this process may not have it (ulimit -v, a container).",
            fix="Free or allow some, or choose a smaller model.",
        )
    return LoadFailed(
        "PhalanxError",
        f"The engine could not start because of an internal error: {type(error).__name__}: {cause}.",
        fix="`--log-level debug` shows where. Please report it.",
        code="internal_error",
    )


def main(argv: list[str] | None = None) -> int:
    """The process. Exit status 0 after an orderly end, 1 when loading failed, the engine could not go on, or the front
    end was lost."""
    parser = argparse.ArgumentParser(description="A Phalanx engine process; started by its front end, not by hand.")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--ranks", action="store_true", help="ranks in processes of their own will compute")
    parser.add_argument("--life", type=int, default=1, help="how many processes have been in this one's place")
    parser.add_argument("--cores", default="", help="processor cores to run on, separated by commas")
    parser.add_argument("--door", type=int, help="the inherited socket at which other nodes call")
    parser.add_argument("--line", type=int, help="the inherited socket for the image of the weights")
    parser.add_argument("--left", type=int, help="the image that the process before this one has left")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    end_with_parent(options.parent)
    never_wait()
    if options.cores:  # before torch counts them
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    os.set_inheritable(options.fd, False)
    channel = FrameSocket(socket.socket(fileno=options.fd))
    door = line = None
    if options.door is not None:
        os.set_inheritable(options.door, False)
        door = socket.socket(fileno=options.door)
    if options.left is not None:
        os.set_inheritable(options.left, False)
    if options.line is not None:
        os.set_inheritable(options.line, False)
        line = Line("", options.left, socket.socket(fileno=options.line))
    try:
        with Heartbeat(channel):
            supervisor = _prepare(ranks=options.ranks, elsewhere=door is not None)
            start = _first_message(channel)
        if start is None:
            return 0
        configure(start.config.server.log_level, start.config.server.log_format, tag="engine")
        engine = _load(channel, start, supervisor, options.life, door, line)
        if engine is None:
            return 1
        try:
            gc.collect()
            gc.freeze()  # what is loaded stays; the collector need not look at it again
            with Heartbeat(channel, engine):
                return 0 if Core(channel, engine, life=options.life).run() else 1
        finally:
            engine.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 1  # the front end is gone, and with it everybody who could read more
    except BrokenFrame as error:
        log.error("the front end sent something that is no message: %s", error)
        return 1


def _prepare(*, ranks: bool, elsewhere: bool) -> SupervisorProcess | None:
    """The long import of torch runs while the front end still finds the model: here, or where ranks are forked. With
    ranks `elsewhere` too, this node's are forked by somebody else."""
    if elsewhere:
        return None
    if ranks:
        from phalanx.executor.multiprocess import SupervisorProcess

        supervisor = SupervisorProcess(zygote=True)
        supervisor.start()
        return supervisor
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")
    return None


def _first_message(channel: FrameSocket) -> Start | None:
    """Waits for the configuration. None when the front end changes its mind."""
    while True:
        for message in channel.receive(3600.0):
            return message if isinstance(message, Start) else None


if __name__ == "__main__":
    sys.exit(main())
