"""One rank's groups for whoever is not the engine: the tensors' groups, messages beside them, exchanges in the
background, and a watch over the other ranks.

                     rank a                                rank b
    tensors          group of an axis ═══ shared memory or TCP ═══ group of that axis
    messages         mailbox          ─── a socket of their own ── mailbox
    watch            a socket on which nothing is said: when it ends, every wait here ends with the reason

Messages do not wait behind tensors: they have connections of their own, on one node too (Unix sockets there). Exchanges
of one axis are made in the order of the calls, whether in the background or not; all ranks must make the same ones.
Starts one thread, and one more an axis that is used in the background.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from phalanx.distributed.address import Address
from phalanx.distributed.bootstrap import Door, Meeting, close_groups, connect_groups
from phalanx.distributed.collectives import Group, Groups
from phalanx.distributed.mailbox import MESSAGE_LIMIT, Mailbox
from phalanx.distributed.mesh import AXES, Axis, Mesh
from phalanx.distributed.transports.abort import Abort, GroupBroken, PeerLost
from phalanx.distributed.transports.tcp import TcpGroup

_LOOK_MS = 500
_TOGETHER_S = 0.1
"""Ranks that hear of an end end too; so long, and the first one is among those that are named."""
_VERDICT_S = 3.0
_ENDED = "the process has ended, or has left"

Exchange = Callable[[Group], torch.Tensor]


@dataclass(frozen=True)
class Pending:
    """An exchange in the background. Its input must stay as it is until `wait` has returned."""

    _future: Future[torch.Tensor]

    @property
    def done(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return self._future.done()

    def wait(self) -> torch.Tensor:
        """The result. Raises GroupBroken when the exchange could not be finished."""
        return self._future.result()


class Channels:
    """Made in three steps: `Channels(…)` opens the door, the addresses of all ranks are collected by somebody, and
    `connect` meets the others. `close` ends everything; ranks that still exchange then are told that this one left."""

    def __init__(self, mesh: Mesh, rank: int, host: str | None):
        """`host` is this node's address for the others; None when all ranks are on one node. Raises OSError."""
        self.mesh, self.rank = mesh, rank
        self._door = Door(rank, host)
        self._abort = Abort()
        self._groups: dict[Axis, Group] = {}
        self._mailbox: Mailbox | None = None
        self._watched: TcpGroup | None = None
        self._background: dict[Axis, ThreadPoolExecutor] = {}
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watch: threading.Thread | None = None
        self._names: Sequence[str] = ()
        self._changed = threading.Condition()
        self._told = threading.Event()
        self._users = 0
        """Calls that use a group now; it must not be closed under them."""
        self._closed = False

    @property
    def address(self) -> Address:
        return self._door.address

    def connect(self, roster: Sequence[Address], meeting: Meeting, names: Sequence[str] = ()) -> None:
        """`roster[r]` is rank r's address, `names[r]` what its node is called. Raises GroupBroken; closed then."""
        self._names = names or [address.host for address in roster]
        here = sum(address.node == self.address.node for address in roster)
        crowded = here > len(os.sched_getaffinity(0))
        try:
            groups = connect_groups(self.mesh, self._door, roster, meeting, self._abort, crowded=crowded)
            self._groups = {axis: getattr(groups, axis) for axis in AXES}
            if self.mesh.world_size > 1:
                self._mailbox = Mailbox(self._beside(roster, meeting, 1))
                self._watched = self._beside(roster, meeting, 2)
        except BaseException:
            self.close()
            raise
        if self._watched is not None:
            self._watch = threading.Thread(target=self._look, name=f"phalanx-watch-{self.rank}", daemon=True)
            self._watch.start()

    def _beside(self, roster: Sequence[Address], meeting: Meeting, number: int) -> TcpGroup:
        """A socket to each other rank."""
        epoch, everybody = meeting.epoch + number, Mesh(dp=self.mesh.world_size)
        plain = replace(meeting, epoch=epoch, sockets=True, transport=None, exchange_timeout=None)
        return cast(TcpGroup, connect_groups(everybody, self._door, roster, plain, self._abort, crowded=True).dp)

    # Tensors

    def exchange(self, axis: Axis, call: Exchange) -> torch.Tensor:
        """Raises GroupBroken; the groups are of no more use then."""
        if axis in self._background:
            return self.start(axis, call).wait()
        with self._in_use():
            return call(self._group(axis))

    def start(self, axis: Axis, call: Exchange) -> Pending:
        """The same in the background, behind what was started before."""
        group = self._group(axis)
        if axis not in self._background:
            self._background[axis] = ThreadPoolExecutor(1, thread_name_prefix=f"phalanx-{axis}")
        inference = torch.is_inference_mode_enabled()

        def work() -> torch.Tensor:
            with self._in_use(), torch.inference_mode(inference):
                return call(group)

        return Pending(self._background[axis].submit(work))

    def size(self, axis: Axis) -> int:
        return len(self.mesh.group(axis, self.rank))

    def place(self, axis: Axis) -> int:
        """This rank's number in the group."""
        return self.mesh.group(axis, self.rank).index(self.rank)

    def _group(self, axis: Axis) -> Group:
        if self._closed or axis not in self._groups:
            raise GroupBroken(f"Rank {self.rank} is {'closed' if self._closed else 'not connected to the others'}.")
        return self._groups[axis]

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._changed:
            if self._closed:
                raise GroupBroken(f"Rank {self.rank} is closed.")
            self._users += 1
        try:
            yield
        except PeerLost:
            self._told.wait(_VERDICT_S)  # who was the first
            self._abort.check()
            raise
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    # Messages

    def send_message(self, data: bytes, to: int) -> None:
        """At most MESSAGE_LIMIT bytes, to any other rank. Raises GroupBroken; ValueError for what is too long."""
        mailbox = self._to(to)
        with self._in_use():
            mailbox.send(data, to)

    def receive_message(self, source: int) -> bytes:
        """The next one of that rank; waits until it comes, that rank is gone, or this is closed. Raises GroupBroken."""
        mailbox = self._to(source)
        with self._in_use():
            return mailbox.receive(source)

    def _to(self, peer: int) -> Mailbox:
        if not 0 <= peer < self.mesh.world_size or peer == self.rank:
            raise ValueError(f"rank {self.rank} of {self.mesh.world_size} has no mailbox with rank {peer}")
        if self._mailbox is None:
            raise GroupBroken(f"Rank {self.rank} is not connected to the others.")
        return self._mailbox

    # What is known, and the end

    def describe(self) -> dict[str, Any]:
        """By axis: its ranks and how they exchange (`Group.describe`); and how messages go."""
        axes: dict[str, dict[str, Any]] = {
            axis: {"ranks": list(self.mesh.group(axis, self.rank)), **group.describe()}
            for axis, group in self._groups.items()
        }
        sealed = self._mailbox is not None and self._mailbox.encrypted
        return {**axes, "messages": {"transport": "sockets", "at_most_bytes": MESSAGE_LIMIT, "encrypted": sealed}}

    def _look(self) -> None:
        """Until the end of this, or of another rank."""
        streams = {} if self._watched is None else self._watched.streams
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        for stream in streams.values():
            poll.register(stream, select.POLLRDHUP)
        while not (ready := poll.poll(_LOOK_MS)):
            for peer, stream in streams.items():
                try:
                    stream.check_answers()
                except GroupBroken as broken:
                    return self._gone([peer], getattr(broken, "words", broken.message.rstrip(".")))
        if all(fd != self._stop for fd, _ in ready):
            time.sleep(_TOGETHER_S)
            ended = {fd for fd, _ in poll.poll(0)}
            self._gone([peer for peer, stream in streams.items() if stream.fileno() in ended], _ENDED)

    def _gone(self, peers: Sequence[int], why: str) -> None:
        named = [f"rank {peer}" + (f" on {self._names[peer]}" if self._names[peer] else "") for peer in peers]
        self._abort.set(f"{', '.join(named)} {'is' if len(peers) == 1 else 'are'} gone: {why}")
        self._told.set()

    def close(self) -> None:
        """Idempotent. Waits of other threads end with GroupBroken."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._abort.set(f"rank {self.rank} is closed")
        self._told.set()
        os.eventfd_write(self._stop, 1)
        for background in self._background.values():
            background.shutdown(wait=True)
        with self._changed:
            self._changed.wait_for(lambda: not self._users)
        if self._watch is not None:
            self._watch.join()
        close_groups(Groups(**self._groups))
        for group in (self._mailbox, self._watched):
            if group is not None:
                group.close()
        self._door.close()
        os.close(self._stop)
        self._abort.close()
