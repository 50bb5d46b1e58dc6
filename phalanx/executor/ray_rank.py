"""The actor that holds a rank's place in Ray: it starts the rank under a supervisor of its own, and says how it ended.

The rank is not the actor's process. Ray then computes nothing beside it, a rank that died is forked anew in
milliseconds without asking Ray, and what it died of is known exactly (`supervisor`, `death`); Ray's view of its place,
its resources and its node stays true all the while. When the actor ends, supervisor and rank end with it. Light to
import: what a rank needs is imported by the supervisor.
"""

from __future__ import annotations

import os
import platform
import socket

import msgspec

from phalanx import env
from phalanx.config import EngineConfig
from phalanx.distributed.address import node_id
from phalanx.errors import PhalanxError
from phalanx.executor.interfaces import checked
from phalanx.executor.messages import RankStart
from phalanx.executor.multiprocess import SupervisorProcess, place_ranks
from phalanx.executor.node_messages import Survey
from phalanx.executor.survey import survey, versions
from phalanx.worker.capacity import Capacity, is_wanted, measure

_HOURS_S = 3600.0


class Introduction(msgspec.Struct, frozen=True):
    """What a rank's actor says of itself and its node."""

    name: str
    """The node's, for people."""
    node: str
    """As `phalanx.distributed.address.node_id` has it: equal where memory can be shared."""
    pid: int
    versions: dict[str, str]
    address: str = ""
    """This node's, on the way to the executor; empty when there is no way."""
    survey: Survey | None = None
    failure: str = ""
    """Why there is no survey: what is wrong with the model here."""
    capacity: Capacity | None = None
    """Of the device that a rank has here; only where shares are automatic."""


class RankActor:
    """Every argument and answer is plain data or bytes of `msgspec`."""

    def __init__(self, variables: dict[str, str], *, fork: bool):
        env.adopt(variables)
        self._supervisor = SupervisorProcess(zygote=fork)
        self._supervisor.start()

    def introduce(self, config: bytes, towards: str, measuring: bool) -> bytes:
        """An `Introduction`. `towards` is an address on the executor's node; `measuring`: the node's capacity is not
        known, if it is wanted."""
        import ray

        said = Introduction(
            platform.node(), node_id(), os.getpid(), {"Ray": ray.__version__, **versions()}, _address(towards)
        )
        told = msgspec.msgpack.decode(config, type=EngineConfig)
        try:
            found = survey(told)
        except PhalanxError as error:
            return msgspec.msgpack.encode(msgspec.structs.replace(said, failure=error.message))
        wanted = measuring and is_wanted(told.parallel)
        capacity = next(iter(measure(told.model.device)), None) if wanted else None
        return msgspec.msgpack.encode(msgspec.structs.replace(said, survey=found, capacity=capacity))

    def live(self, start: bytes, place: int, ranks: int, threads: int | None) -> str:
        """Start a rank, the `place`-th of `ranks` on this machine, and return what it died of. `threads` replaces the
        share of the machine's cores that it would have."""
        told = msgspec.msgpack.decode(start, type=RankStart)
        cores, share = place_ranks(ranks)[place] if threads is None else ((), threads)
        self._supervisor.launch([msgspec.structs.replace(told, cores=cores, threads=share)])
        while (cause := self._supervisor.cause(told.rank, _HOURS_S)) is None:
            pass
        return cause

    def kill(self, rank: int) -> None:
        """Returns when it is gone."""
        self._supervisor.kill(rank)

    def let_go(self) -> None:
        """Of what ranks have left here."""
        self._supervisor.let_go()


def _address(towards: str) -> str:
    own = env.host_ip()
    return checked(own, "PHALANX_HOST_IP") if own else address_towards(towards)


def address_towards(host: str) -> str:
    """This machine's address on the way to the address `host`, as its routes have it; empty when there is no way. Sends
    nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""
