"""Ranks on several nodes, without Ray: node 0 gathers the others, which run `phalanx serve … --headless`.

    launch ── wait until all have joined ── compare models and versions ── try every pair of nodes ── start ranks

Every node's own supervisor starts its ranks; node 0's launcher tells it which. From then on each side sends a beat
every half a second, so that a lost node is noticed: at once when its processes die, within three seconds when its
network falls silent, after ten when it hangs. Callers without the key or of a wrong number are turned away and
counted, and keep nobody out. Listens on the one address that `phalanx.executor.interfaces` chooses. A node that was
lost may join again: it is looked at like a new one, and its seats are free to use then.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import platform
import secrets
import socket
import threading
import time
from collections.abc import Callable, Container, Sequence

import msgspec

from phalanx.config import EngineConfig
from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.secure_stream import SecureStream, Unauthenticated
from phalanx.errors import ConfigError, PhalanxError
from phalanx.executor.base import WorkerDied
from phalanx.executor.dealing import crossing, deal
from phalanx.executor.doorkeeper import Doorkeeper
from phalanx.executor.hub import HubExecutor
from phalanx.executor.interfaces import notice_silence, open_door, shown
from phalanx.executor.keys import derive, root_secret
from phalanx.executor.launcher import Layout
from phalanx.executor.messages import RankStart
from phalanx.executor.multiprocess import SupervisorLauncher, SupervisorProcess
from phalanx.executor.node_messages import (
    BEAT_S,
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
    Target,
    Welcome,
    decode_from_node,
)
from phalanx.executor.node_record import SAY_S, Node, RankProcess, capital, numbers, why_silent
from phalanx.executor.probing import ProbeDoor, broken_pairs, probe_all
from phalanx.executor.seating import Choose, Share
from phalanx.executor.survey import measured, survey, version_difference, versions
from phalanx.logging import is_worth_a_line
from phalanx.worker.capacity import Capacity, of_place
from phalanx.worker.limits import usable_cores

log = logging.getLogger(__name__)

_KNOCK_S = 5.0
_PROBE_S = 15.0
_VERDICT_S = 3.5
"""A node that has missed a beat is heard of again, or known to be lost, within this time."""


class NodesLauncher:
    """The launcher of node 0. `host` waits for the other nodes when it is first asked for."""

    def __init__(
        self, config: EngineConfig, layout: Layout, *,
        door: socket.socket | None = None, replica: int = 0, patience: float | None = None,
        limit: float = JOIN_LIMIT_S, report: float = REPORT_S,
    ):  # fmt: skip
        """For one `replica`, whose ranks may all be on other nodes. `door` as `interfaces.open_door` makes it. After
        `patience` seconds it goes on with the nodes that are there, and the seats of the others are not available;
        None waits for all. Raises ConfigError for an address or a port that cannot be used."""
        parallel = config.parallel
        door = door or open_door(parallel, replica)
        self._host = str(door.getsockname()[0])
        self.refused = 0
        """Callers turned away."""
        self._config, self._layout, self._limit, self._report = config, layout, limit, report
        self._patience = patience
        self._nnodes, self._encrypt = parallel.nnodes, parallel.encrypt_transport
        self._own, port = parallel.nodes_of(replica), parallel.port_of(replica)
        """Nodes that have ranks, or will."""
        self._wanted = [number for number in self._own if number]
        self._session = secrets.token_bytes(32)
        secret = root_secret(parallel.transport_key, port)
        self._join_key = derive(secret, "join")
        self._session_key = derive(secret, "session", self._session)
        self._at = shown(self._host, port)
        self._name, self._versions = platform.node(), versions()
        self._never = Abort()
        self._changed = threading.Condition()
        self._nodes: dict[int, Node] = {}
        self._complete = False
        """All nodes have joined, or are not waited for any more."""
        self._counts: tuple[int, ...] = ()
        """Seats of each node, once they are dealt."""
        self._seats: tuple[int, ...] = tuple(range(layout.mesh.world_size))
        """Of each rank."""
        self._probing = threading.Lock()
        self._measured: list[Capacity] = []
        """What this node has."""
        self._supervisor = SupervisorProcess(zygote=config.model.device == "cpu")
        self._local: SupervisorLauncher | None = None
        self._lives = itertools.count()
        self.on_loss: Callable[[Container[int]], None] | None = None
        """Told the ranks of a node that is lost."""
        self._closed = False
        if not parallel.transport_key:
            log.warning(
                "No transport key: ANYBODY who can reach %s can join as a node, and read and change what is computed. "
                "Set PHALANX_TRANSPORT_KEY to the same secret on every node.",
                self._at,
            )
        self._doorkeeper = Doorkeeper(door, self._hear, "node")
        threading.Thread(target=self._beat, name="beats", daemon=True).start()

    @property
    def hub_key(self) -> bytes:
        """What ranks prove to the executor; every node can work it out, so that it is never sent."""
        return derive(self._session_key, "hub")

    @property
    def _short(self) -> str:
        """This node, as `Node.short` has the others."""
        return f"node 0 ({self._name})"

    # -- the launcher's methods

    @property
    def host(self) -> str | None:
        """As in `hub.Launcher`. Gathers the nodes."""
        if not self._counts:
            try:
                if 0 in self._own:
                    self._supervisor.start()  # it imports what ranks need while we wait
                self.gather()
            except BaseException:
                self.close()
                raise
        return self._host

    def launch(self, starts: list[RankStart]) -> None:
        """Raises WorkerDied when a rank's node is gone."""
        for start in starts:
            node = self._node_of(start.rank)
            if node is not None and node.lost is not None:
                raise WorkerDied(start.rank, self._lost_with_ranks(node), node=node.hello.name)
        here = [start for start in starts if self._node_of(start.rank) is None]
        if self._local is not None:
            self._local.launch([msgspec.structs.replace(start, host=self._host) for start in here])
        for node in self._in_order():
            there = [start for start in starts if self._node_of(start.rank) is node]
            if not there:
                continue
            life, ranks = next(self._lives), self._ranks_on(node)
            with self._changed:
                node.processes |= {start.rank: RankProcess(life) for start in there}
            first = self._seats_of(node.hello.node).start
            placed = [
                msgspec.structs.replace(
                    start, host=node.hello.address, key=b"", device_index=self._seats[start.rank] - first
                )
                for start in there
            ]
            node.say(StartRanks(placed, life, ranks[0], len(ranks), self._config.model.device))

    def kill(self, rank: int) -> None:
        node = self._node_of(rank)
        if node is None:
            if self._local is not None:
                self._local.kill(rank)
            return
        if self.cause(rank) is None and rank in node.processes:
            node.say(EndRank(rank))
            self.cause(rank, SAY_S)

    def cause(self, rank: int, wait: float = 0.0) -> str | None:
        node = self._node_of(rank)
        if node is None:
            return self._local.cause(rank, wait) if self._local is not None else None
        process = node.processes.get(rank)
        if process is None:
            return None
        if wait and time.monotonic() - node.heard > 2 * BEAT_S:
            wait = max(wait, _VERDICT_S)  # the node itself may be gone
        with self._changed:
            self._changed.wait_for(lambda: process.cause is not None or node.lost is not None, wait)
        return process.cause or (self._lost_with_ranks(node) if node.lost is not None else None)

    def available(self) -> set[int]:
        """As in `hub.Launcher`."""
        with self._changed:
            there = [0, *(n for n, node in self._nodes.items() if node.admitted and node.lost is None)]
            return {seat for node in there for seat in self._seats_of(node)}

    def arriving(self) -> set[int]:
        """As in `hub.Launcher`."""
        with self._changed:
            joined = [n for n, node in self._nodes.items() if not node.admitted and node.lost is None]
            return {seat for node in joined for seat in self._seats_of(node)}

    def assign(self, seats: Sequence[int]) -> None:
        """As in `hub.Launcher`. Ranks are in the order of their seats."""
        with self._changed:
            self._seats = tuple(seats)
            for node in self._nodes.values():
                node.processes.clear()
        if self._local is not None:
            self._local.assign([seat for seat in seats if seat < self._counts[0]])

    def node(self, seat: int) -> str:
        index = self._node_index(seat)
        there = self._nodes.get(index)
        return self._name if index == 0 else there.hello.name if there else f"node {index}"

    def capacity(self, seat: int) -> Capacity | None:
        """As in `hub.Launcher`."""
        index, found = self._node_index(seat), self._measured
        if index:
            node = self._nodes.get(index)
            found = node.prepared.capacity if node is not None and node.prepared is not None else []
        return of_place(found, seat - self._seats_of(index).start)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._doorkeeper.close()
        with self._changed:
            nodes = list(self._nodes.values())
        for node in nodes:
            node.say(Stop())
            with contextlib.suppress(OSError):
                node.stream.sock.shutdown(socket.SHUT_WR)
        self._supervisor.close()
        deadline = time.monotonic() + 2.0
        for node in nodes:
            if node.reader is not None:
                node.reader.join(max(0.0, deadline - time.monotonic()))
            node.stream.shut()

    # -- before the ranks start

    def gather(self) -> None:
        """Wait for all nodes, see that they fit, and deal the ranks. Raises ConfigError; the nodes have been told."""
        try:
            self._measured = measured(self._config) if 0 in self._own else []
            self._await_nodes()
            ours = survey(self._config)
            self._await("find the model", lambda node: node.prepared is not None)
            for node in self._in_order():
                if error := node.unfit(ours, self._short):
                    raise error
            self._probe()
            for node in self._in_order():
                node.admitted = True
        except PhalanxError as error:
            for node in self._in_order():
                node.say(Refused(error.message, error.fix))
            raise
        groups = self._layout.mesh.widths * (self._layout.mesh.dp * self._layout.mesh.cp)
        cores = {number: node.hello.cores for number, node in self._nodes.items()}
        if 0 in self._own:
            cores[0] = usable_cores()
        # Nodes that are not here have their seats too: these are free to use when they come.
        dealt = dict(zip(self._own, deal(groups, [cores.get(n, min(cores.values())) for n in self._own]), strict=True))
        counts = tuple(dealt.get(number, 0) for number in range(self._nnodes))
        for first, last in crossing(groups, counts):
            log.warning(
                "Ranks %d to %d share every layer across nodes: each token waits for the network twice a layer. "
                "With a tensor group inside each node and --pipeline-parallel-size %d it would wait once a stage.",
                first, last, len(self._own),
            )  # fmt: skip
        if 0 in self._own:
            self._local = SupervisorLauncher(counts[0], self._config.model.device, supervisor=self._supervisor)
        self._counts = counts
        shares = [
            f"{_ranks(self._seats_of(number).start, counts[number])} on {name}"
            for number, name in ((0, "node 0"), *((node.hello.node, node.shown) for node in self._in_order()))
            if number in cores
        ]
        log.info("%d of %d nodes are here and reach each other: %s.", len(cores), len(self._own), ", ".join(shares))

    def _await_nodes(self) -> None:
        begin = said = time.monotonic()
        while True:
            with self._changed:
                missing = [n for n in self._wanted if n not in self._nodes]
                if not missing:
                    return
                self._changed.wait(0.25)
                now = time.monotonic()
                some = 0 in self._own or bool(self._nodes)
                if some and self._patience is not None and now - begin > self._patience:
                    log.warning("Going on without %s of %d.", numbers(missing), self._nnodes)
                    self._complete = True
                    return
            if now - begin > self._limit:
                raise ConfigError(
                    f"Waited {self._limit:g} s at {self._at} for {numbers(missing)} of {self._nnodes}, in vain.",
                    fix=f"On each, run the same command with --node-rank N --headless and --master-addr {self._host}; "
                    f"check that its output does not say that it cannot reach {self._at}.",
                )
            if now - said >= self._report:
                said = now
                log.info(
                    "Waiting at %s for %s of %d (%.0f s; gives up after %g s). Start it with --headless.",
                    self._at, numbers(missing), self._nnodes, now - begin, self._limit,
                )  # fmt: skip

    def _await(
        self, what: str, done: Callable[[Node], bool], limit: float | None = None, among: Sequence[Node] = ()
    ) -> None:
        """Until `done(node)` for all nodes, or those `among` them. Raises ConfigError when one leaves, or `limit`
        seconds are over."""
        begin = said = time.monotonic()
        while True:
            with self._changed:
                nodes = among or self._in_order()
                for node in nodes:
                    if node.lost is not None:
                        raise ConfigError(f"{capital(node.shown)} left before the start: {node.lost}.")
                waiting = [node for node in nodes if not done(node)]
                if not waiting:
                    return
                self._changed.wait(0.25)
            now, names = time.monotonic(), ", ".join(node.shown for node in waiting)
            if limit is not None and now - begin > limit:
                raise ConfigError(f"Waited {limit:g} s for {names} to {what}, in vain.")
            if now - said >= self._report:
                said = now
                log.info("Waiting for %s to %s (%.0f s).", names, what, now - begin)

    def _readmit(self, node: Node) -> None:
        """A node that joined later than the others, and has found the model: may it have ranks?"""
        try:
            if error := node.unfit(survey(self._config), self._short):
                raise error
            with self._probing:
                self._probe(node)
        except PhalanxError as error:
            log.warning("Turned away %s, which came back: %s", node.shown, error.message)
            node.say(Refused(error.message, error.fix))
            return
        with self._changed:
            node.admitted = True
            self._changed.notify_all()
        log.info("%s is back.", capital(node.shown))

    def _probe(self, newcomer: Node | None = None) -> None:
        """Try to connect from every node to every other one; with a `newcomer`, from the others to it and from it to
        here (nothing is open elsewhere any more). Raises ConfigError naming each pair that fails."""
        nodes = [node for node in self._in_order() if node.lost is None]
        host = self._host
        door = ProbeDoor(0, host, self._session_key)
        try:
            open_ones = nodes if newcomer is None else [newcomer]
            targets = {
                node.hello.node: Target(node.hello.node, node.hello.address, node.hello.probe_port)
                for node in open_ones
            }
            targets[0] = Target(0, host, door.port)
            for node in nodes:
                node.probed = None
                node.say(Probe([
                    target for target in targets.values() if target.node != node.hello.node
                    and (target.node or newcomer is None or node is newcomer)
                ]))  # fmt: skip
            failures = {0: probe_all([t for t in targets.values() if t.node != 0], self._session_key)}
            self._await("reach the other nodes", lambda node: node.probed is not None, _PROBE_S, nodes)
            failures |= {node.hello.node: node.probed.failures for node in nodes if node.probed is not None}
        finally:
            door.close()
        names = {0: self._short, **{n: node.short for n, node in self._nodes.items()}}
        if error := broken_pairs(failures, targets, names):
            raise error

    # -- listening

    def _hear(self, sock: socket.socket, peer: str) -> None:
        """A caller's whole life: prove the key, join, and be listened to until it is gone."""
        node = None
        notice_silence(sock, SILENCE_MS)
        stream = SecureStream(sock, self._never, f"the caller from {peer}")
        try:
            node = self._welcome(stream, peer)
            while node is not None:
                self._heard(node, decode_from_node(stream.receive(LIMIT)[1]))
        except (GroupBroken, msgspec.DecodeError) as error:
            if node is not None:
                self._lose(node, why_silent(node, error))

    def _welcome(self, stream: SecureStream, peer: str) -> Node | None:
        """None when the caller was turned away."""
        try:
            stream.handshake(self._join_key, client=False, encrypt=self._encrypt, timeout=_KNOCK_S)
            hello = decode_from_node(stream.receive(LIMIT, _KNOCK_S)[1])
        except (GroupBroken, msgspec.DecodeError) as error:
            why = "it does not have the transport key" if isinstance(error, Unauthenticated) else str(error)
            self._refuse(f"a caller from {peer}: {why}")
            return None
        if not self._doorkeeper.callers.leave(stream.sock):  # it has just had to make room: let it call again
            return None
        if not isinstance(hello, NodeHello):
            self._refuse(f"a caller from {peer}: it does not say which node it is")
            return None
        node = Node(hello, stream, time.monotonic(), reader=threading.current_thread())
        stream.peer = "it"
        with self._changed:
            refusal = self._refusal(hello)
            if refusal is None:
                node.say(Welcome(self._session, self._name))
                if before := self._nodes.get(hello.node):
                    why = self._lost_with_ranks(before)
                    node.processes = {rank: RankProcess(p.life, p.cause or why) for rank, p in before.processes.items()}
                self._nodes[hello.node] = node
                self._complete = self._complete or len(self._nodes) == len(self._wanted)
                self._changed.notify_all()
        if refusal is not None:
            self._refuse(f"{node.shown}: {refusal.message}")
            node.say(Refused(refusal.message, refusal.fix))
            return None
        log.info("Node %d of %d (%s, %s) has joined.", hello.node, self._nnodes, hello.name, hello.address)
        return node

    def _refusal(self, hello: NodeHello) -> ConfigError | None:
        if hello.nnodes != self._nnodes:
            return ConfigError(
                f"Node 0 was started with --nnodes {self._nnodes}, node {hello.node} ({hello.name}) with --nnodes "
                f"{hello.nnodes}.",
                fix="Give every node the same --nnodes.",
            )
        if not 1 <= hello.node < self._nnodes:
            return ConfigError(
                f"There is no node {hello.node}: node 0 was started with --nnodes {self._nnodes}.",
                fix=f"Number the other nodes from 1 to {self._nnodes - 1}. A machine beyond these is not used; to "
                "stand in for a node that is lost, it needs that node's --node-rank.",
            )
        if hello.node not in self._wanted:
            return ConfigError(f"Node {hello.node} belongs to another replica.", fix="Give all nodes the same -dp.")
        other = self._nodes.get(hello.node)
        if other is not None and other.lost is None:
            return ConfigError(
                f"There is a node {hello.node} already: {other.hello.name}, {other.hello.address}.",
                fix="Give each node a --node-rank of its own.",
            )
        name = f"node {hello.node} ({hello.name})"
        return version_difference(self._versions, hello.versions, self._short, name)

    def _refuse(self, what: str) -> None:
        with self._changed:
            self.refused += 1
            count = self.refused
        if is_worth_a_line(count):
            log.warning("Turned away %s. (%d turned away so far.)", what.rstrip("."), count)

    def _heard(self, node: Node, message: FromNode) -> None:
        with self._changed:
            node.heard = time.monotonic()
            match message:
                case Prepared():
                    node.prepared = message
                    if self._counts and not node.admitted:
                        threading.Thread(target=self._readmit, args=(node,), name="readmission", daemon=True).start()
                case Probed():
                    node.probed = message
                case RankEnded(rank=rank, life=life, cause=cause):
                    process = node.processes.get(rank)
                    if process is not None and process.life == life:
                        process.cause = cause
                case Leaving(reason=reason):
                    node.lost = node.lost or reason  # the end of its connection follows
                case Beat() | _:
                    pass
            self._changed.notify_all()

    def _lose(self, node: Node, why: str) -> None:
        with self._changed:
            if self._closed:
                return
            node.lost = node.lost or why
            if not self._complete:
                self._nodes.pop(node.hello.node, None)  # it may come back while the others are awaited
            self._changed.notify_all()
        if self._counts and self.on_loss is not None:
            self.on_loss(self._ranks_on(node))
        log.error("Lost %s%s: %s.", node.shown, f", with {self._ranks_of(node)}" if self._counts else "", node.lost)

    def _beat(self) -> None:
        while not self._closed:
            time.sleep(BEAT_S)
            for node in self._in_order():
                if node.lost is not None:
                    continue
                if time.monotonic() - node.heard > PATIENCE_S:
                    with self._changed:
                        node.lost = f"it has said nothing for {PATIENCE_S:g} s, though its network answers: it hangs"
                    node.say(Refused(  # should it wake up
                        f"Node 0 has given this node up: it had said nothing for {PATIENCE_S:g} s.",
                        "Start it again; it is taken in then.",
                    ))  # fmt: skip
                    node.stream.shut()
                elif not self._closed:
                    node.say(Beat())

    # -- small things

    def _in_order(self) -> list[Node]:
        return [node for _, node in sorted(self._nodes.items())]

    def _node_of(self, rank: int) -> Node | None:
        """None for node 0."""
        index = self._node_index(self._seats[rank])
        return self._nodes[index] if index else None

    def _node_index(self, seat: int) -> int:
        for index, end in enumerate(itertools.accumulate(self._counts)):
            if seat < end:
                return index
        return 0

    def _seats_of(self, node: int) -> range:
        first = sum(self._counts[:node])
        return range(first, first + self._counts[node])

    def _ranks_on(self, node: Node) -> list[int]:
        seats = self._seats_of(node.hello.node)
        return [rank for rank, seat in enumerate(self._seats) if seat in seats]

    def _ranks_of(self, node: Node) -> str:
        ranks = self._ranks_on(node)
        return _ranks(ranks[0], len(ranks)) if ranks else "no ranks"

    def _lost_with_ranks(self, node: Node) -> str:
        return f"{node.shown} was lost, with {self._ranks_of(node)}: {node.lost}"


def nodes_executor(
    config: EngineConfig, layout: Layout, *,
    choose: Choose | None = None, share: Share | None = None, door: socket.socket | None = None, replica: int = 0,
    patience: float | None = None,
) -> HubExecutor:  # fmt: skip
    """For node 0 of several, as its launcher. Raises ConfigError for an address or a port that cannot be used."""
    launcher = NodesLauncher(config, layout, door=door, replica=replica, patience=patience)
    executor = HubExecutor(
        launcher, layout, encrypt=config.parallel.encrypt_transport, key=launcher.hub_key, choose=choose, share=share
    )
    launcher.on_loss = executor.hang_up
    return executor


def _ranks(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
