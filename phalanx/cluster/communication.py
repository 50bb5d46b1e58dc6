"""`RayCommunicationController`: the groups of a mesh of Ray actors, and exchanges of tensors within them.

    # in the program that made the actors               # in a method of an actor, which is one rank
    controller = RayCommunicationController(2)          def part(self, x):
    controller.connect(actors)                              return self.communication.all_gather(x, "tensor")

Ray only carries the addresses and a fresh key, once, when the actors meet. Tensors go through shared memory on a node
and over our own TCP connections between nodes; messages have connections of their own and do not wait behind tensors.
`describe` says which way a group goes and from which sizes. Tensors of a GPU take the way through their host.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from phalanx import env
from phalanx.cluster import ray_calls
from phalanx.distributed.address import Address, node_id
from phalanx.distributed.mesh import Axis, Mesh
from phalanx.errors import ConfigError, PhalanxError
from phalanx.executor.ray_session import import_ray

if TYPE_CHECKING:
    import torch

    from phalanx.distributed.channels import Channels, Pending

GroupType = Literal["tensor", "pipeline", "context"]
Operation = Literal["all_gather", "reduce_scatter", "broadcast", "all_reduce"]

_AXES: dict[str, Axis] = {"tensor": "tp", "pipeline": "pp", "context": "cp"}
_MEET_S = 15.0
"""Seconds for the actors to meet."""
_CALL_S = 30.0
"""Seconds for an actor to answer a call that takes none."""


class RayCommunicationController:
    """The sizes of a mesh; `tensor_parallel_groups`, `pipeline_parallel_groups`, `context_parallel_groups` are lists of
    lists of ranks. With `compress`, floating-point tensors of at least `compress_from` bytes travel between nodes as
    8-bit integers (`distributed.transports.compressed` has the error's bound); with `encrypt`, sealed. An exchange may
    take `exchange_timeout` seconds.

    Every exchange is made by all ranks of the group, in the same order; `group_type` is `tensor`, `pipeline` or
    `context`. Inputs are not changed. A mesh of one rank needs no `connect`. Raises ConfigError for sizes that are no
    positive integers.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        context_parallel_size: int = 1,
        *,
        compress: bool = False,
        compress_from: int | None = None,
        encrypt: bool = False,
        exchange_timeout: float = 60.0,
    ):
        sizes = {"tensor": tensor_parallel_size, "pipeline": pipeline_parallel_size, "context": context_parallel_size}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"`{name}_parallel_size` is {size!r}; it must be an integer of at least 1.")
        self.mesh = Mesh(tp=tensor_parallel_size, pp=pipeline_parallel_size, cp=context_parallel_size)
        self.compress, self.compress_from, self.encrypt = compress, compress_from, encrypt
        self.exchange_timeout = exchange_timeout
        self._channels: Channels | None = None
        self._actors: list[Any] = []

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def tensor_parallel_groups(self) -> list[list[int]]:
        return self._groups("tp")

    @property
    def pipeline_parallel_groups(self) -> list[list[int]]:
        return self._groups("pp")

    @property
    def context_parallel_groups(self) -> list[list[int]]:
        return self._groups("cp")

    def _groups(self, axis: Axis) -> list[list[int]]:
        return [list(ranks) for ranks in self.mesh.groups(axis)]

    # In the program that has the actors

    def connect(self, actors: Sequence[Any], *, attribute: str = "communication") -> None:
        """Make `actors[r]` rank r: each gets a connected controller as this attribute. Of any class; plain actors and
        those with `max_concurrency` alike. Raises ConfigError, or PhalanxError that names the rank and its node when an
        actor is gone or they do not reach each other; nothing is connected then."""
        ray = import_ray()
        if len(actors) != self.world_size:
            raise ConfigError(f"{len(actors)} actors are given for a mesh of {self.world_size} ranks.")
        if self._actors:
            raise ConfigError("These actors are connected already.", fix="Call close first.")
        self._actors = list(actors)
        try:
            places = self._ask(_where, names=[""] * len(actors))
            names = [place[0] for place in places]
            spans = len({place[1] for place in places}) > 1
            options = {
                "tensor_parallel_size": self.mesh.tp,
                "pipeline_parallel_size": self.mesh.pp,
                "context_parallel_size": self.mesh.cp,
                "compress": self.compress,
                "compress_from": self.compress_from,
                "encrypt": self.encrypt,
                "exchange_timeout": self.exchange_timeout,
            }
            each = [(attribute, options, rank, spans) for rank in range(self.world_size)]
            roster = self._ask(_open, each, names=names)
            key = secrets.token_bytes(32)
            self._ask(
                _join, [(attribute, roster, key, names)] * self.world_size, names=names, timeout=_CALL_S + _MEET_S
            )
        except BaseException:
            with contextlib.suppress(Exception):
                ray.wait([actor.__ray_call__.remote(_leave, attribute) for actor in self._actors], timeout=0)
            self._actors = []
            raise
        self._attribute = attribute

    def _ask(
        self, function: Callable[..., Any], each: Sequence[Sequence[Any]] = (), *, names: Sequence[str],
        timeout: float = _CALL_S,
    ) -> list[Any]:  # fmt: skip
        """`function(actor, *each[r])` in all actors at once. Raises PhalanxError about the first that fails."""
        ray = import_ray()
        arguments = each or [()] * len(self._actors)
        calls = [
            actor.__ray_call__.remote(function, *args) for actor, args in zip(self._actors, arguments, strict=True)
        ]
        waiting, deadline = list(calls), timeout
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=deadline)
            if not ready:
                late = ", ".join(str(calls.index(call)) for call in waiting)
                raise PhalanxError(
                    f"The actors of ranks {late} did not answer within {timeout:g} s.",
                    fix="An actor answers between two calls of its methods: connect while it is idle.",
                )
            for call in ready:
                try:
                    ray.get(call)
                except Exception as error:
                    rank = calls.index(call)
                    raise _failed(rank, names[rank], error) from None
        return list(ray.get(calls))

    # In an actor

    def open(self, rank: int, *, host: str | None = None) -> Address:
        """Where this rank can be reached; `host` is its node's address for the others, None when all are on one node.
        Raises ConfigError."""
        from phalanx.distributed.channels import Channels

        if not 0 <= rank < self.world_size:
            raise ConfigError(f"There is no rank {rank} in a mesh of {self.world_size}.")
        try:
            self._channels = Channels(self.mesh, rank, host)
        except OSError as error:
            raise ConfigError(
                f"{platform.node()} cannot listen on {host}: {error.strerror or error}.",
                fix="PHALANX_HOST_IP on that node sets the address that the others use.",
            ) from None
        return self._channels.address

    def join(self, roster: Sequence[Address], key: bytes, names: Sequence[str] = ()) -> None:
        """Meet the others: `roster[r]` is where rank r is, `key` 32 fresh bytes that all ranks are given. Raises
        GroupBroken."""
        from phalanx.distributed.bootstrap import Meeting
        from phalanx.distributed.transport import Packed
        from phalanx.distributed.transports.compressed import AT_LEAST

        packed = Packed(AT_LEAST if self.compress_from is None else self.compress_from) if self.compress else None
        meeting = Meeting(0, key, self.encrypt, _MEET_S, self.exchange_timeout, transport=packed)
        self._own().connect(roster, meeting, names)

    def _own(self) -> Channels:
        if self._channels is None and self.world_size == 1:
            self.join([self.open(0)], secrets.token_bytes(32))
        if self._channels is None:
            raise ConfigError(
                "This process is no rank of the mesh.",
                fix="Call connect(actors) where the actors are known, and exchange in methods of the actors.",
            )
        return self._channels

    @property
    def rank(self) -> int:
        return self._own().rank

    def all_gather(
        self,
        tensor: torch.Tensor,
        group_type: GroupType = "tensor",
        *,
        dim: int = 0,
        lengths: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """All ranks' tensors joined along `dim`, in the group's order; `lengths` are their entries along it where they
        differ. Raises GroupBroken when a rank is gone, is late, or makes another call."""
        return self._now("all_gather", tensor, group_type, dim=dim, lengths=lengths)

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        group_type: GroupType = "tensor",
        *,
        dim: int = 0,
        lengths: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """This rank's part, along `dim`, of the sum of all ranks' tensors; parts are as equal as can be, or `lengths`.
        Raises as `all_gather`."""
        return self._now("reduce_scatter", tensor, group_type, dim=dim, lengths=lengths)

    def broadcast(self, tensor: torch.Tensor, group_type: GroupType = "tensor", *, source: int = 0) -> torch.Tensor:
        """The tensor of member `source` of the group; the others pass one of the same shape and dtype. Raises as
        `all_gather`."""
        return self._now("broadcast", tensor, group_type, source=source)

    def all_reduce(self, tensor: torch.Tensor, group_type: GroupType = "tensor") -> torch.Tensor:
        """The sum of all ranks' tensors. Raises as `all_gather`."""
        return self._now("all_reduce", tensor, group_type)

    def start(
        self, operation: Operation, tensor: torch.Tensor, group_type: GroupType = "tensor", **rest: Any
    ) -> Pending:
        """The operation of that name in the background, so that this rank can compute meanwhile. Wait for it before
        `tensor` is changed. Exchanges of a group are made in the order of the calls."""
        axis, call = self._prepared(operation, tensor, group_type, **rest)
        return self._own().start(axis, call)

    def _now(self, operation: str, tensor: torch.Tensor, group_type: str, **rest: Any) -> torch.Tensor:
        axis, call = self._prepared(operation, tensor, group_type, **rest)
        return self._own().exchange(axis, call)

    def _prepared(
        self, operation: str, tensor: torch.Tensor, group_type: str, *, dim: int = 0,
        lengths: Sequence[int] | None = None, source: int = 0,
    ) -> tuple[Axis, Callable[[Any], torch.Tensor]]:  # fmt: skip
        """What to call with the group. Raises ConfigError before anything travels."""
        axis = _AXES.get(str(group_type).removesuffix("_parallel"))
        if axis is None:
            raise ConfigError(f"`group_type` is {group_type!r}.", fix=f"Choose one of {', '.join(_AXES)}.")
        if operation not in ("all_gather", "reduce_scatter", "broadcast", "all_reduce"):
            raise ConfigError(f"There is no operation {operation!r}.")
        channels = self._own()
        size, given = channels.size(axis), tensor.detach().cpu()
        if operation in ("all_gather", "reduce_scatter"):
            if not -given.dim() <= dim < given.dim():
                raise ConfigError(f"`dim` is {dim}, but the tensor has {given.dim()} dimensions.")
            dim %= given.dim()
            along = given.shape[dim]
            if lengths is None and operation == "all_gather":
                lengths = [along] * size
            elif lengths is None:
                lengths = [along * (r + 1) // size - along * r // size for r in range(size)]
            has = lengths[channels.place(axis)] if len(lengths) == size and operation == "all_gather" else sum(lengths)
            if len(lengths) != size or has != along:
                raise ConfigError(
                    f"`lengths` is {list(lengths)}, in a group of {size}, for {along} entries along dimension {dim}."
                )
        if operation == "broadcast" and not 0 <= source < size:
            raise ConfigError(f"`source` is {source}, in a group of {size}.")

        def call(group: Any) -> torch.Tensor:
            if operation == "all_reduce":
                out = group.all_reduce(given.clone())
            elif operation == "broadcast":
                out = group.broadcast(given, source)
            else:
                out = getattr(group, operation)(given, dim, lengths)
            return cast("torch.Tensor", out).to(tensor.device)

        return axis, call

    def send_message(self, data: bytes, to: int) -> None:
        """A short message (at most 64 KiB) to a rank of the mesh, whatever tensors are under way. Raises GroupBroken;
        ValueError for what is too long."""
        self._own().send_message(data, to)

    def receive_message(self, source: int) -> bytes:
        """The next message of that rank; waits for it. Raises GroupBroken when that rank is gone."""
        return self._own().receive_message(source)

    def describe(self) -> list[dict[str, Any]]:
        """Of each rank (in an actor: of this one): by group type its ranks, the transport they use, and the sizes in
        bytes from which it goes about it another way; and how messages go."""
        if self._actors:
            return self._ask(_describe, [(self._attribute,)] * len(self._actors), names=[""] * len(self._actors))
        told = self._own().describe()
        return [{**{name: told[axis] for name, axis in _AXES.items()}, "messages": told["messages"]}]

    def close(self) -> None:
        """Idempotent. Where `connect` was called, in all actors, when they have done what they were asked before."""
        actors, self._actors = self._actors, []
        channels, self._channels = self._channels, None
        if channels is not None:
            channels.close()
        if actors:
            with contextlib.suppress(Exception):  # Ray may be gone, and actors with it
                ray = import_ray()
                calls = [actor.__ray_call__.remote(_leave, self._attribute) for actor in actors]
                ray.wait(calls, num_returns=len(calls), timeout=_CALL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# What runs in the actors; `actor` is the user's object.


def _where(actor: Any) -> tuple[str, str]:
    return platform.node(), node_id()


def _open(actor: Any, attribute: str, options: dict[str, Any], rank: int, spans_nodes: bool) -> Address:
    controller = RayCommunicationController(**options)
    _leave(actor, attribute)
    setattr(actor, attribute, controller)
    return controller.open(
        rank, host=(env.host_ip() or str(import_ray().util.get_node_ip_address())) if spans_nodes else None
    )


def _join(actor: Any, attribute: str, roster: list[Address], key: bytes, names: list[str]) -> int:
    getattr(actor, attribute).join(roster, key, names)
    return os.getpid()


def _describe(actor: Any, attribute: str) -> dict[str, Any]:
    return dict(getattr(actor, attribute).describe()[0])


def _leave(actor: Any, attribute: str) -> None:
    old = getattr(actor, attribute, None)
    if isinstance(old, RayCommunicationController):
        old.close()


def _failed(rank: int, node: str, error: Exception) -> PhalanxError:
    """`error` as one sentence that names the rank and its node."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, PhalanxError):
        kind = type(cause) if isinstance(cause, ConfigError) else PhalanxError
        return kind(f"Rank {rank}{f' on {node}' if node else ''}: {cause.message}", fix=cause.fix)
    return PhalanxError(f"Rank {rank} cannot be connected: {ray_calls.why_it_failed(error, object, node)}.")
