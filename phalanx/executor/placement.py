"""Where ranks go: a mesh, what each rank takes, and the places that have it, to one place per rank. Pure data, no Ray.

A place is a node, or a bundle of a placement group that is there already. A tensor group stays on one node where it
fits, because its ranks talk in every layer; stages may be on different nodes. What the strategies move is a unit: a
tensor group, or, when the mesh has only one, a rank.

    PACK           as few nodes as possible, this one first
    SPREAD         units on different nodes, as far as there are any
    STRICT_PACK    one node, or a refusal
    STRICT_SPREAD  every unit on a node of its own, or a refusal

Does not reserve anything: between looking and taking somebody else may be faster, and the caller looks again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.distributed.mesh import Mesh
from phalanx.errors import ConfigError

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

_ALMOST = 1e-6
"""Ray counts in ten-thousandths; sums of fractions may miss a whole number by less."""


@dataclass(frozen=True)
class Demand:
    """What one rank takes, and where it may go."""

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        text = amounts(self.resources)
        return text + "".join(f", label {key}={value}" for key, value in self.labels.items())


@dataclass(frozen=True)
class Site:
    """A place for ranks."""

    node: str
    """Ray's id of the node; nodes are never told apart by addresses."""
    name: str
    """The node's host name, for people."""
    free: Mapping[str, float]
    total: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    bundle: int | None = None
    """Number of a bundle of an existing group; None when the whole node is offered."""

    def room(self, demand: Demand, *, when_empty: bool = False) -> int:
        """How many ranks fit; `when_empty`: if nothing else ran here. 0 where a label is missing."""
        if any(self.labels.get(key) != value for key, value in demand.labels.items()):
            return 0
        have = self.total if when_empty else self.free
        wanted = [(name, amount) for name, amount in demand.resources.items() if amount > 0]
        return min((int(have.get(name, 0.0) / amount + _ALMOST) for name, amount in wanted), default=1 << 20)


@dataclass(frozen=True)
class Arrangement:
    sites: tuple[int, ...]
    """For each rank the index of its site."""
    split_groups: tuple[tuple[int, ...], ...] = ()
    """Tensor groups that had to be spread over nodes."""


class NoRoom(Exception):
    """The ranks do not fit; the text says what is missing."""


def arrange(
    mesh: Mesh, demand: Demand, sites: Sequence[Site], strategy: str,
    *, home: str = "", span: int = 1, when_empty: bool = False,
) -> Arrangement:  # fmt: skip
    """One site per rank. `home` is the node of whoever asks: it is preferred, since plans reach it through memory.
    `span` above 1 is the number of nodes to use, evenly.

    `when_empty` answers whether the ranks would fit if nothing else ran. Raises NoRoom.
    """
    room: Counter[str] = Counter()
    for site in sites:
        room[site.node] += site.room(demand, when_empty=when_empty)
    nodes = _Nodes(room, home)
    groups = mesh.groups("tp")
    units = groups if len(groups) > 1 or "PACK" in strategy else tuple((rank,) for rank in groups[0])
    if room.total() < mesh.world_size:
        raise NoRoom(f"there is room for {room.total()} of {mesh.world_size} ranks")
    if span > 1:
        placed = _over(span, groups, nodes, strategy)
    elif strategy == "STRICT_PACK" or (strategy == "PACK" and nodes.fits(mesh.world_size)):
        placed = _together(mesh, nodes)
    else:
        placed = _apart(units, nodes, spread="SPREAD" in strategy, strict=strategy == "STRICT_SPREAD")
    split = tuple(group for group in groups if len({placed[rank] for rank in group}) > 1)
    return Arrangement(_sites(placed, demand, sites, when_empty), split)


class _Nodes:
    """Room that is left on each node while ranks are being placed."""

    def __init__(self, room: Mapping[str, int], home: str):
        self.left = dict(room)
        self.home = home
        self.units: Counter[str] = Counter()

    def fits(self, ranks: int) -> list[str]:
        return [node for node, left in self.left.items() if left >= ranks]

    def take(self, node: str, ranks: int) -> None:
        self.left[node] -= ranks
        self.units[node] += 1


def _together(mesh: Mesh, nodes: _Nodes) -> list[str]:
    """All on one node: this one, or else the one that the ranks fill best."""
    fitting = nodes.fits(mesh.world_size)
    if not fitting:
        most = max(nodes.left.values(), default=0)
        raise NoRoom(f"no single node has room for {mesh.world_size} ranks; the roomiest takes {most}")
    node = min(fitting, key=lambda n: (n != nodes.home, nodes.left[n]))
    return [node] * mesh.world_size


def _over(span: int, groups: Sequence[tuple[int, ...]], nodes: _Nodes, strategy: str) -> list[str]:
    """Over exactly `span` nodes: whole tensor groups where there is one for each of them, single ranks otherwise."""
    units = groups if len(groups) >= span else tuple((rank,) for group in groups for rank in group)
    most = sorted(nodes.fits(1), key=lambda n: (n != nodes.home, -nodes.left[n]))[:span]
    placed = []
    if len(most) == span and strategy != "STRICT_PACK" and sum(nodes.left[n] for n in most) >= sum(map(len, units)):
        few = _Nodes({node: nodes.left[node] for node in most}, nodes.home)
        placed = _apart(units, few, spread=True, strict=strategy == "STRICT_SPREAD")
    if len(set(placed)) < span:
        raise NoRoom(f"--nnodes asks for {span} nodes with room, and that cannot be had with {strategy}")
    return placed


def _apart(units: Sequence[tuple[int, ...]], nodes: _Nodes, *, spread: bool, strict: bool) -> list[str]:
    """Node of each rank, unit by unit: the widest first, since they find room hardest, whole ones before split ones."""
    placed = [""] * sum(map(len, units))
    homeless = []
    for unit in sorted(units, key=len, reverse=True):
        fitting = [n for n in nodes.fits(len(unit)) if not strict or nodes.units[n] == 0]
        if not fitting:
            homeless.append(unit)
            continue
        if spread:
            node = min(fitting, key=lambda n: (nodes.units[n], n != nodes.home, -nodes.left[n]))
        else:
            node = min(fitting, key=lambda n: (nodes.units[n] == 0, n != nodes.home, -nodes.left[n]))
        nodes.take(node, len(unit))
        for rank in unit:
            placed[rank] = node
    if homeless and strict:
        raise NoRoom(
            f"STRICT_SPREAD needs {len(units)} nodes with room for {max(map(len, units))} rank(s) each, and only "
            f"{len(units) - len(homeless)} can be had"
        )
    for unit in homeless:
        for rank in unit:
            node = max(nodes.left, key=lambda n: (nodes.left[n], n == nodes.home))
            nodes.take(node, 1)
            placed[rank] = node
    return placed


def _sites(placed: Sequence[str], demand: Demand, sites: Sequence[Site], when_empty: bool) -> tuple[int, ...]:
    """On each node its sites are filled in their order."""
    open_sites: dict[str, list[int]] = {node: [] for node in placed}
    for index, site in enumerate(sites):
        if site.node in open_sites:
            open_sites[site.node] += [index] * min(site.room(demand, when_empty=when_empty), len(placed))
    return tuple(open_sites[node].pop(0) for node in placed)


def ray_strategy(strategy: str, arrangement: Arrangement, sites: Sequence[Site]) -> str:
    """The strategy to tell Ray, whose unit is always the rank, for bundles that are tied to their nodes anyway."""
    nodes = [sites[index].node for index in arrangement.sites]
    if strategy == "STRICT_SPREAD" and len(set(nodes)) < len(nodes):
        return "SPREAD"
    return strategy


@dataclass(frozen=True)
class Taker:
    """Somebody who holds resources."""

    who: str
    """Such as "actor Trainer (pid 4711)" or "placement group a1b2"."""
    node: str
    resources: Mapping[str, float]


def refusal(
    mesh: Mesh, demand: Demand, sites: Sequence[Site], strategy: str, takers: Sequence[Taker], why: str, *, within: str
) -> ConfigError:
    """What is asked, what exists, what is taken by whom, and what to do, as one error. `within` is where the ranks
    were to go: "the Ray cluster", or a placement group."""
    ranks = mesh.world_size
    asked = f"{ranks} × {demand}, strategy {strategy}"
    why = f"{within} has no place for {ranks} rank{'s' if ranks > 1 else ''}: {why}"
    return ConfigError(f"{why}. {shortage(asked, demand, sites, takers)}", fix=_remedy(mesh, demand, sites, strategy))


def shortage(asked: str, demand: Demand, sites: Sequence[Site], takers: Sequence[Taker]) -> str:
    """What is asked, what exists, what is taken by whom."""
    names = {site.node: f"{site.name} ({site.node[:8]})" for site in sites}
    exists = "; ".join(_describe(site, demand) for site in sites) or "nothing"
    gone = "a node that is gone"
    held = "; ".join(
        f"{taker.who} holds {amounts(dict(sorted(taker.resources.items())))} on {names.get(taker.node, gone)}"
        for taker in takers
    )
    return f"Asked: {asked}. There is: {exists}. Taken: {held or 'nothing that Ray knows of'}."


def _describe(site: Site, demand: Demand) -> str:
    parts = [
        f"{name} {_number(name, site.free.get(name, 0.0))} of {_number(name, site.total.get(name, 0.0))} free"
        for name in demand.resources
    ]
    parts += [
        f"{key}={site.labels[key]}" if key in site.labels else f"no label {key}"
        for key, value in demand.labels.items()
        if site.labels.get(key) != value
    ]
    bundle = "" if site.bundle is None else f"bundle {site.bundle} on "
    return f"{bundle}{site.name} ({site.node[:8]}): {', '.join(parts)}"


def _remedy(mesh: Mesh, demand: Demand, sites: Sequence[Site], strategy: str) -> str:
    try:
        arrange(mesh, demand, sites, strategy, when_empty=True)
    except NoRoom:
        room = sum(site.room(demand, when_empty=True) for site in sites)
        relaxed = ", or use --placement-strategy PACK" if strategy != "PACK" and room >= mesh.world_size else ""
        labels = any(site.room(Demand(demand.resources), when_empty=True) for site in sites) and room == 0
        if demand.labels and labels:
            return f"Add nodes with `ray start --address=…`, or change --worker-labels{relaxed}."
        less = "--num-cpus-per-worker, --num-gpus-per-worker, --worker-resources"
        return f"Add nodes with `ray start --address=…`, or ask for fewer ranks or less for each ({less}){relaxed}."
    return "End what holds them, add nodes with `ray start --address=…`, or ask for fewer ranks or less for each."


def amounts(resources: Mapping[str, float]) -> str:
    """Such as "CPU 1, fast 0.5"."""
    return ", ".join(f"{name} {_number(name, amount)}" for name, amount in resources.items()) or "nothing"


def _number(name: str, amount: float) -> str:
    if name.endswith("memory") and amount >= 1e6:
        return f"{amount / 1e9:.4g} GB"
    return f"{round(amount, 4):.10g}"
