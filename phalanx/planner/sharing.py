"""What `auto` shares mean where ranks are on several nodes: by what each node has measured of itself, and why.

Measurements waver, and a split that wavers with them would be another one at each start. Devices whose speeds, or free
memories, are nearly the same are therefore taken to be the same. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.config import ParallelConfig
from phalanx.planner import report, search
from phalanx.planner.devices import Device
from phalanx.planner.memory import Demand
from phalanx.planner.search import Plan
from phalanx.worker.limits import Memory

SPEEDS = 1.25
"""Speeds that differ by less than this factor are taken to be the same."""

MEMORIES = 1.1
"""Free memories, likewise."""

_UNKNOWN = Memory(2**60, 2**60)
_SHOWN = 8
"""Figures in a line."""


@dataclass(frozen=True)
class Measured:
    """What one rank would have, as its node measured it."""

    node: str
    memory: Memory | None = None
    speed: float | None = None


def devices(kind: str, measured: Sequence[Measured]) -> list[Device]:
    """One a rank. A memory that is not known is taken to be large; where one speed is not known, none counts."""
    fast = all(found.speed is not None for found in measured)
    return [
        Device(f"{kind} of {found.node}", kind, found.memory or _UNKNOWN, found.speed if fast else None, found.node)
        for found in measured
    ]


def share_out(demand: Demand, parallel: ParallelConfig, kind: str, measured: Sequence[Measured]) -> tuple[Plan, str]:
    """A plan for ranks that have this, in rank order, and why its shares are as they are. The sizes of `parallel` and
    the shares that it names stay. Raises ConfigError when the model cannot be cut like that. A plan that does not fit
    is returned all the same."""
    silent = list(dict.fromkeys(found.node for found in measured if found.memory is None))
    if silent:
        plan = search.lay_out(demand, parallel, devices(kind, [Measured(found.node) for found in measured]))
        return plan, f"equal, because {', '.join(silent[:_SHOWN])} did not measure what there is"
    exact = devices(kind, measured)
    level = _levelled(exact)
    plan = search.lay_out(demand, parallel, level)
    if not plan.budget.fits:  # every byte counts
        plan = search.lay_out(demand, parallel, exact)
    return plan, _why(exact, level)


def _levelled(exact: Sequence[Device]) -> list[Device]:
    out = list(exact)
    for group in alike([device.memory.available for device in exact], MEMORIES):
        memories = [exact[i].memory for i in group]
        least = Memory(min(m.total for m in memories), min(m.available for m in memories))
        for i in group:
            out[i] = dataclasses.replace(out[i], memory=least)
    speeds = [device.speed for device in exact if device.speed is not None]
    for group in alike(speeds, SPEEDS):
        for i in group:
            out[i] = dataclasses.replace(out[i], speed=min(speeds[j] for j in group))
    return out


def alike(values: Sequence[float], factor: float) -> list[list[int]]:
    """Groups of values (by number) that are nearly the same: from the largest down, those that differ from the largest
    of the group by less than `factor`."""
    groups: list[list[int]] = []
    for i in sorted(range(len(values)), key=lambda i: -values[i]):
        if groups and (values[groups[-1][0]] < values[i] * factor or values[groups[-1][0]] == values[i]):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _why(exact: Sequence[Device], level: Sequence[Device]) -> str:
    """`by measured speed 1.00 / 0.40 and free memory 5.8 GiB / 5.7 GiB`."""
    facts = []
    if exact[0].speed is not None:
        fastest = max(device.speed or 0.0 for device in exact)
        facts.append(f"speed {_figures(exact, lambda d: f'{(d.speed or 0.0) / fastest:.2f}')}")
    facts.append(f"free memory {_figures(exact, lambda d: report.size(d.memory.available))}")
    what = " and ".join(facts)
    if all(device.like(level[0]) for device in level):
        return f"equal, because measured {what} are nearly the same"
    return f"by measured {what}"


def _figures(exact: Sequence[Device], text: Callable[[Device], str]) -> str:
    """In rank order; what comes several times in a row on a node is shown once."""
    shown: list[str] = []
    node = ""
    for device in exact:
        figure = text(device)
        if device.node != node or figure != shown[-1]:
            shown.append(figure)
        node = device.node
    return " / ".join(shown if len(shown) <= _SHOWN else [*shown[: _SHOWN - 1], "…", shown[-1]])
