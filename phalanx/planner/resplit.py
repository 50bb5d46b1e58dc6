"""How a model is split when devices are lost: over those that are left, as like the split before as can be.

Pure: starts nothing and asks nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import ConfigError
from phalanx.planner import search
from phalanx.planner.devices import Device
from phalanx.planner.memory import Demand
from phalanx.planner.report import layout_line
from phalanx.planner.search import Plan
from phalanx.worker.memory import readable


@dataclass(frozen=True)
class Resplit:
    plan: Plan
    used: tuple[int, ...]
    """Numbers of the devices that its ranks are on."""
    longest: int = 0
    """Tokens of the longest request that fits; 0 when --max-model-len does."""


class TooLittle(Exception):
    """The model does not fit; the text says what is missing."""


def resplit(demand: Demand, devices: Sequence[Device], stages: Sequence[int]) -> Resplit:
    """A plan for `devices` (each an object of its own), which are left of more, in rank order; `stages` are those that
    they were in.

    Stages keep the devices that they have left, if that fits; else any split goes. Where none has room for a request of
    --max-model-len, one goes that has room for a typical one. Raises TooLittle.
    """
    widths = tuple(stages.count(stage) for stage in sorted(set(stages)))
    plans: list[Plan] = []
    problem = ""
    for any_split in (False, True):
        try:
            found = search.choose(demand, devices) if any_split else [search.lay_out_widths(demand, widths, devices)]
        except ConfigError as error:
            problem = error.message
            continue
        fitting = [plan for plan in found if plan.budget.fits]
        if fitting:
            return Resplit(fitting[0], _numbers(fitting[0], devices))
        plans += found
    if not plans:
        raise TooLittle(problem or "a device")
    roomiest = max(plans, key=lambda plan: plan.budget.binding.kv_budget / plan.budget.binding.kv_bytes_per_block)
    longest = roomiest.budget.capacity * demand.cache.block_size
    if longest >= demand.typical:
        return Resplit(roomiest, _numbers(roomiest, devices), longest)
    raise TooLittle(_missing(roomiest))


def _numbers(plan: Plan, devices: Sequence[Device]) -> tuple[int, ...]:
    """Devices that are alike are told apart by identity."""
    return tuple(next(n for n, device in enumerate(devices) if device is used) for used in plan.devices)


def _missing(plan: Plan) -> str:
    """`1.5 GiB of memory more on each of 2 devices (2 tensor ranks), which have 3.0 GiB`."""
    budget, demand = plan.budget, plan.budget.demand
    short = [rank for rank in budget.ranks if rank.missing(demand.blocks_per_request)]
    most = max(rank.missing(demand.blocks_per_request) for rank in short)
    where = f"on {short[0].device.name}" if len(short) == 1 else f"on each of {len(short)} devices"
    have = min(rank.device.memory.available for rank in short)
    return (
        f"{readable(most)} of memory more {where}, where {readable(have)} can be used now; "
        f"{layout_line(budget.layout.widths)} would be the least bad layout"
    )
