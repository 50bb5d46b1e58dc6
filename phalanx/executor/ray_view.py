"""What Ray's head knows: nodes with what is free on them, the bundles of a group, and who holds what.

Asks the head directly, which also works where Ray has no dashboard (its public state API needs one). Ids are hex.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from phalanx.executor.placement import Site, Taker

_NODE_LABEL = "ray.io/node-id"
_OURS = "phalanx-"


def owner_in(name: str) -> str:
    """The actor that owns a group of this name; empty when it is not ours, or not an actor's."""
    owner = name.rsplit("-", 2)[1] if name.startswith(_OURS) and name.count("-") >= 4 else ""
    return "" if owner == "driver" else owner


@dataclass(frozen=True)
class ActorFacts:
    """One actor."""

    state: str
    """Ray's word: DEPENDENCIES_UNREADY, PENDING_CREATION, ALIVE, RESTARTING or DEAD."""
    node: str
    """Empty while it has none."""
    pid: int
    host: str


class RayView:
    def __init__(self, ray: ModuleType):
        self._ray = ray

    @property
    def home(self) -> str:
        """The node of this process."""
        return str(self._ray.get_runtime_context().get_node_id())

    def alive(self) -> dict[str, dict[str, Any]]:
        """The nodes that live, by id."""
        return {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}

    def nodes(self) -> list[Site]:
        free = _state().available_resources_per_node()
        return [
            Site(
                node=node_id,
                name=node["NodeManagerHostname"],
                free=free.get(node_id, {}),
                total=node["Resources"],
                labels=node.get("Labels", {}),
            )
            for node_id, node in sorted(self.alive().items())
        ]

    def bundles(self, group: Any) -> list[Site]:
        """Of a group that is placed. A bundle's resources have names of their own while it is there."""
        table = self._ray.util.placement_group_table(group)
        alive, free = self.alive(), _state().available_resources_per_node()
        sites = []
        for index, total in table["bundles"].items():
            node_id = table["bundles_to_node_id"].get(index, "")
            if node_id not in alive:
                continue
            ending = f"_group_{index}_{group.id.hex()}"
            left = {k.removesuffix(ending): v for k, v in free.get(node_id, {}).items() if k.endswith(ending)}
            name, labels = alive[node_id]["NodeManagerHostname"], alive[node_id].get("Labels", {})
            sites.append(Site(node_id, name, left, total, labels, bundle=index))
        return sites

    def takers(self) -> list[Taker]:
        """Groups by node, then actors that hold resources outside of groups. Tasks are not known to the head."""
        takers = []
        for key, group in self._ray.util.placement_group_table().items():
            if group["state"] in ("REMOVED", "PENDING"):
                continue
            by_node: dict[str, dict[str, float]] = {}
            for index, node_id in group["bundles_to_node_id"].items():
                _add(by_node.setdefault(node_id, {}), group["bundles"][index])
            name = group["name"] or key[:12]
            takers += [Taker(f"placement group {name}", node_id, held) for node_id, held in by_node.items() if node_id]
        return takers + [
            Taker(
                f"actor {actor.class_name.rpartition('.')[2]} (pid {actor.pid})",
                actor.address.node_id.hex(),
                dict(actor.required_resources),
            )
            for actor in self.living_actors()
            if actor.required_resources and not actor.placement_group_id.strip(b"\xff")
        ]

    def orphans(self) -> list[Any]:
        """Groups of ours whose owner, an actor, is dead. Ray keeps them until the owner's whole job ends."""
        from ray.util.placement_group import PlacementGroup

        living = {actor.actor_id.hex() for actor in self.living_actors()}
        orphans = []
        for key, group in self._ray.util.placement_group_table().items():
            owner = owner_in(group["name"])
            if group["state"] != "REMOVED" and owner and owner not in living:
                orphans.append(PlacementGroup(self._ray.PlacementGroupID.from_hex(key)))
        return orphans

    def new_name(self) -> str:
        """For a group of ours: who owns it, if that is an actor, and where."""
        owner = self._ray.get_runtime_context().get_actor_id() or ""
        return f"{_OURS}{platform.node()}-{os.getpid()}-{owner or 'driver'}-{secrets.token_hex(3)}"

    def living_actors(self) -> list[Any]:
        from ray.core.generated import gcs_pb2

        table: Any = gcs_pb2
        data = _state()._connect_and_get_accessor().get_actor_table(None, "ALIVE")
        return [table.ActorTableData.FromString(each) for each in data]

    def actor(self, handle: Any) -> ActorFacts | None:
        """What the head knows of an actor; None when it has forgotten it."""
        from ray.core.generated import gcs_pb2

        table: Any = gcs_pb2
        data = _state()._connect_and_get_accessor().get_actor_info(handle._actor_id)
        if data is None:
            return None
        found = table.ActorTableData.FromString(data)
        node_id = found.address.node_id.hex() if found.pid else ""  # until then it is its owner's
        return ActorFacts(table.ActorTableData.ActorState.Name(found.state), node_id, found.pid, self.host(node_id))

    def cause_of_death(self, actor_id: str) -> str:
        """What Ray says of an actor (by its id) that is dead, in one line; empty when it lives or is not known."""
        from ray.core.generated import gcs_pb2

        table: Any = gcs_pb2
        data = _state()._connect_and_get_accessor().get_actor_info(self._ray.ActorID.from_hex(actor_id))
        if data is None:
            return ""
        found = table.ActorTableData.FromString(data)
        if table.ActorTableData.ActorState.Name(found.state) != "DEAD":
            return ""
        cause = found.death_cause
        which = cause.WhichOneof("context")
        if which == "creation_task_failure_context":
            return "its constructor raised"
        said = getattr(getattr(cause, which or "", None), "error_message", "")
        return " ".join(said.split())[:300].rstrip(". ") or "Ray does not say why"

    def host(self, node_id: str) -> str:
        """The host name of a node, also of one that is gone; empty when it is not known."""
        return next((n["NodeManagerHostname"] for n in self._ray.nodes() if n["NodeID"] == node_id), "")

    def tied_to(self, node_id: str, labels: Mapping[str, str]) -> dict[str, str]:
        """The selector of a bundle that must be on this node."""
        return {_NODE_LABEL: node_id, **labels}


def _state() -> Any:
    from ray._private.state import state

    return state


def _add(into: dict[str, float], more: Mapping[str, float]) -> None:
    for name, amount in more.items():
        into[name] = into.get(name, 0.0) + amount
