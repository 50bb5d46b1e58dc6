"""A node without a server: it joins node 0, starts the ranks that it is told to, and ends when node 0 does. When only
node 0's engine has died, which is started again, it joins that one.

One thread listens to node 0 and minds the clock; others find the model at the start (which may be a download) and wait
for the ends of ranks. Ranks speak to node 0 for themselves. Raises ConfigError for what a user can
mend. Leaves nothing behind, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from phalanx import env
from phalanx.config import EngineConfig
from phalanx.distributed.transports.abort import Abort, GroupBroken, PeerLost
from phalanx.distributed.transports.secure_stream import SecureStream
from phalanx.errors import ConfigError, PhalanxError
from phalanx.executor.interfaces import checked, notice_silence, shown
from phalanx.executor.keys import derive, root_secret
from phalanx.executor.multiprocess import SupervisorProcess, place_ranks
from phalanx.executor.node_messages import (
    BEAT_S,
    FRAME,
    JOIN_LIMIT_S,
    LIMIT,
    PATIENCE_S,
    REPORT_S,
    SILENCE_MS,
    Beat,
    EndRank,
    FromNode,
    Leaving,
    NodeHello,
    Prepared,
    Probe,
    Probed,
    RankEnded,
    Refused,
    StartRanks,
    Stop,
    ToNode,
    Welcome,
    decode_to_node,
    encode,
)
from phalanx.executor.probing import ProbeDoor, probe_all
from phalanx.executor.survey import measured, survey, versions

_CONNECT_S = 3.0
_ANSWER_S = 10.0
_SILENCE_S = 4 * BEAT_S
_CALL_S = 1.5
"""For node 0's kernel to answer a call after its engine was lost."""
_NEXT_ENGINE_S = 120.0
"""For its next engine to answer then."""
_AWAKE_S = 60.0

Say = Callable[[str], None]
"""Shows a line of progress."""


class Asked(Exception):
    """A signal asked this node to end."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


class _Over(Exception):
    """Node 0 has said that it ends."""


class Silent(Exception):
    """Node 0 hangs."""


class NodeAgent:
    """`config` is as the user gave it; `prepare` returns what node 0 makes of the same command: the resolved
    configuration with a local model. It is called on a thread of its own and may raise PhalanxError."""

    def __init__(self, config: EngineConfig, prepare: Callable[[], EngineConfig], say: Say):
        self._config, self._prepare, self._say = config, prepare, say
        parallel = config.parallel
        self._node, self._nnodes = parallel.node_rank, parallel.nnodes
        self._master = (parallel.master_addr or "", parallel.port_of(parallel.replica_here))
        self._at = shown(*self._master)
        self._secret = root_secret(parallel.transport_key, self._master[1])
        self._session_key = b""
        self._encrypt = parallel.encrypt_transport
        self._never = Abort()
        self._stream: SecureStream | None = None
        self._dialled: socket.socket | None = None
        """To node 0's next engine."""
        self._lock = threading.Lock()
        self._heard = time.monotonic()
        self._supervisor: SupervisorProcess | None = None
        self._door: ProbeDoor | None = None

    def run(self) -> int:
        """Until node 0 ends or a signal comes; the exit code. Raises ConfigError when this node cannot join, or loses
        node 0 to the network."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _ask)
        try:
            while self._served():
                self._say("node 0's engine has ended and is started again; this node joins it again.")
        except _Over:
            self._say("node 0 has ended, and so does this node.")
        except (Silent, GroupBroken, msgspec.DecodeError) as error:
            text = str(error).rstrip(".")
            raise self._network_lost(text[:1].lower() + text[1:]) from None
        except Asked as asked:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda n, _: os._exit(128 + n))
            self._tell(Leaving(f"it was ended there by {asked}"))
            self._say(f"{asked}: this node ends.")
        finally:
            self._clear()
        return 0

    def _served(self) -> bool:
        """Join node 0 and serve it until its engine ends or hangs; whether there may be another one."""
        hang: Silent | None = None
        try:
            self._serve(self._join())
        except PeerLost:
            pass
        except Silent as error:
            hang = error
        silent = time.monotonic() - self._heard
        self._clear()
        refused = False
        if self._config.recovery.enable_recovery:
            # Its front end keeps the door open over several engines: a refusal says that it has ended.
            try:
                self._dialled = socket.create_connection(self._master, timeout=_CALL_S)
                return True
            except OSError as error:
                refused = isinstance(error, ConnectionRefusedError)
        if hang is not None:
            raise hang
        # A kernel that lives says at once that node 0's process has ended; one that does not has been silent.
        if silent > _SILENCE_S and not refused:
            raise self._network_lost(f"nothing has come from it for {silent:.0f} s: it is down, or the network is")
        self._say("node 0 has ended (the connection to it has), and so does this node.")
        return False

    def _network_lost(self, why: str) -> ConfigError:
        return ConfigError(
            f"Node 0 at {self._at} was lost: {why}.",
            fix="Check the network between the nodes, then start all nodes again.",
        )

    # -- joining

    def _join(self) -> SecureStream:
        again = self._dialled is not None
        host = env.host_ip()
        own = checked(host, "PHALANX_HOST_IP") if host else None
        sock = self._connect()
        address = own or str(sock.getsockname()[0])
        self._door = ProbeDoor(self._node, address)
        notice_silence(sock, SILENCE_MS)
        stream = SecureStream(sock, self._never, "it")
        try:
            patience = _NEXT_ENGINE_S if again else _ANSWER_S
            stream.handshake(derive(self._secret, "join"), client=True, encrypt=self._encrypt, timeout=patience)
        except GroupBroken as error:
            stream.close()
            if again and isinstance(error, PeerLost):
                raise
            if again:
                raise self._network_lost(f"no engine has answered there for {patience:g} s") from None
            why = "the transport keys differ, only one side encrypts, or something else listens there"
            raise ConfigError(
                f"Node 0 at {self._at} turned this node away: {why}.",
                fix="Set the same PHALANX_TRANSPORT_KEY (or none) and the same --encrypt-transport on every node.",
            ) from None
        self._stream = stream
        from phalanx.worker.limits import usable_cores

        name = platform.node()
        self._tell(NodeHello(self._node, self._nnodes, name, address, self._door.port, usable_cores(), versions()))
        try:
            answer = decode_to_node(stream.receive(LIMIT, _ANSWER_S)[1])
        except msgspec.DecodeError:
            raise ConfigError(f"What listens at {self._at} is not a node 0 of this version of Phalanx.") from None
        if isinstance(answer, Refused):
            raise ConfigError(answer.message, fix=answer.fix)
        if not isinstance(answer, Welcome):
            raise ConfigError(f"What listens at {self._at} is not a node 0 of this version of Phalanx.")
        self._heard = time.monotonic()
        self._session_key = derive(self._secret, "session", answer.session)
        self._door.open(self._session_key)
        self._say(f"joined node 0 ({answer.name}) at {self._at}; this node is {address}.")
        self._supervisor = SupervisorProcess(zygote=self._config.model.device != "cuda")
        self._supervisor.start()  # it imports what ranks need while the model is looked for
        threading.Thread(target=self._find_model, args=(self._supervisor,), name="model", daemon=True).start()
        return stream

    def _connect(self) -> socket.socket:
        """Node 0 may come later. Raises ConfigError when it does not come at all."""
        begin = said = time.monotonic()
        if (dialled := self._dialled) is not None:
            self._dialled = None
            return dialled
        while True:
            try:
                return socket.create_connection(self._master, timeout=_CONNECT_S)
            except OSError as error:
                reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
            now = time.monotonic()
            if now - begin > JOIN_LIMIT_S:
                raise ConfigError(
                    f"Waited {JOIN_LIMIT_S:g} s for node 0 at {self._at}, in vain: {reason}.",
                    fix="Check that node 0 runs, that --master-addr and --master-port are the same on all nodes, and "
                    "that no firewall is between them.",
                )
            if now - said >= REPORT_S or said == begin:
                said = now
                patience = f"{now - begin:.0f} s; gives up after {JOIN_LIMIT_S:g} s"
                self._say(f"waiting for node 0 at {self._at}: {reason} ({patience}).")
            time.sleep(0.5)

    def _find_model(self, supervisor: SupervisorProcess) -> None:
        try:
            config = self._prepare()
            prepared = Prepared(survey(config), capacity=measured(config))
            supervisor.await_awake(_AWAKE_S)  # a node that comes back is given ranks at once, and others wait for them
            self._say("the model is here; waiting for the other nodes.")
        except PhalanxError as error:
            model = self._config.model.model
            lacks = model if model and model[0] in "/.~" and not Path(model).expanduser().exists() else ""
            prepared = Prepared(failure=error.message, fix=error.fix, lacks=lacks)
        if supervisor is self._supervisor:
            self._tell(prepared)

    # -- in service

    def _serve(self, stream: SecureStream) -> None:
        """Until it ends by an exception."""
        poll = select.poll()
        poll.register(stream, select.POLLIN)
        beat = time.monotonic()
        while True:
            if poll.poll(max(0.0, beat + BEAT_S - time.monotonic()) * 1000):
                self._obey(decode_to_node(stream.receive(LIMIT, _ANSWER_S)[1]))
                self._heard = time.monotonic()
            now = time.monotonic()
            if now >= beat + BEAT_S:
                beat = now
                self._tell(Beat())
                stream.check_answers()
                if now - self._heard > PATIENCE_S:
                    raise Silent(f"it has said nothing for {PATIENCE_S:g} s, though its network answers")

    def _obey(self, message: ToNode) -> None:
        match message:
            case StartRanks():
                self._start_ranks(message)
            case EndRank(rank=rank):
                if self._supervisor is not None:
                    self._supervisor.kill(rank)
            case Probe():
                threading.Thread(target=self._probe, args=(message,), name="probes", daemon=True).start()
            case Refused(message=text, fix=fix):
                raise ConfigError(text, fix=fix)
            case Stop():
                raise _Over
            case Beat() | Welcome():
                pass

    def _start_ranks(self, order: StartRanks) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None
        if self._supervisor is None:
            return
        plan, key = place_ranks(order.ranks), derive(self._session_key, "hub")
        starts = []
        for start in order.starts:
            cores, threads = plan[start.rank - order.first]
            starts.append(msgspec.structs.replace(start, key=key, cores=cores, threads=threads))
        self._supervisor.launch(starts, fork=order.device == "cpu")
        for start in starts:
            watch = (self._supervisor, start.rank, order.life)
            threading.Thread(target=self._watch, args=watch, name=f"rank {start.rank}", daemon=True).start()
        self._say(f"starting rank {', '.join(str(start.rank) for start in starts)} here.")

    def _watch(self, supervisor: SupervisorProcess, rank: int, life: int) -> None:
        cause = supervisor.cause(rank, threading.TIMEOUT_MAX)
        if cause is not None and supervisor is self._supervisor:
            self._say(f"rank {rank} has ended: {cause}.")
            self._tell(RankEnded(rank, life, cause))

    def _probe(self, probe: Probe) -> None:
        self._tell(Probed(probe_all(probe.targets, self._session_key)))

    def _tell(self, message: FromNode) -> None:
        """When node 0 is gone, whoever listens to it notices."""
        if self._stream is not None:
            with contextlib.suppress(GroupBroken), self._lock:
                self._stream.send(FRAME, encode(message), _ANSWER_S)

    # -- the end

    def _clear(self) -> None:
        """Everything of this session; what its threads still say is not heard."""
        door, supervisor, stream = self._door, self._supervisor, self._stream
        self._door = self._supervisor = self._stream = None
        if door is not None:
            door.close()
        if supervisor is not None:
            supervisor.close()
        if stream is not None:
            stream.shut()
            stream.close()


def _ask(number: int, _: object) -> None:
    raise Asked(number)
