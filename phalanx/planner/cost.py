"""How long a decoding step takes, by two numbers a device and two a link: an estimate to compare layouts with.

A step reads every weight and every cached key and value once, so a rank needs bytes / speed (the memory side of the
roofline of Williams et al., 2009; decoding is far below the point where arithmetic decides). Tensor ranks exchange
their hidden states twice a layer, stages once. Does not model prompts, which are bound by arithmetic, or overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.models.shares import kv_bytes_per_token, table_bytes
from phalanx.models.spec import BYTES_PER_ELEMENT
from phalanx.planner.devices import Device
from phalanx.planner.memory import Budget, Demand, RankMemory

ASSUMED_SPEED = {"cuda": 600e9, "cpu": 20e9}
"""Bytes per second of a device that nobody measured."""


@dataclass(frozen=True)
class Link:
    latency: float
    """Seconds of one exchange."""
    bandwidth: float
    """Bytes per second, each way."""


LINKS = {"cuda": Link(15e-6, 20e9), "cpu": Link(10e-6, 5e9)}
"""Between devices of one node, assumed: PCIe, and shared memory."""
NETWORK = Link(60e-6, 1.25e9)
"""Between nodes, assumed: 10 Gbit/s."""


def speed(device: Device) -> float:
    """Bytes per second."""
    return device.speed or ASSUMED_SPEED[device.kind]


def link(devices: Sequence[Device]) -> Link:
    """The slowest between any of these."""
    return NETWORK if len({device.node for device in devices}) > 1 else LINKS[devices[0].kind]


def read_bytes(demand: Demand, rank: RankMemory, budget: Budget) -> int:
    """Weights that the rank reads in a step: all but a token table that is only looked up."""
    split = budget.layout.split(demand.spec, rank.place.pp)
    spec, last = demand.spec, rank.place.pp == len(budget.layout.widths) - 1
    if rank.place.pp == 0 and not (last and spec.tie_embeddings):
        return rank.weights - table_bytes(spec, split, rank.place.tp, demand.dtype)
    return rank.weights


def exchange_seconds(demand: Demand, devices: Sequence[Device], rows: float) -> float:
    """One all-reduce of the hidden states of `rows` tokens over the tensor ranks on `devices`."""
    if len(devices) == 1:
        return 0.0
    between, ranks = link(devices), len(devices)
    size = rows * demand.spec.hidden_size * BYTES_PER_ELEMENT[demand.dtype]
    return between.latency + 2 * (ranks - 1) / ranks * size / between.bandwidth


def stage_seconds(budget: Budget, rows: float) -> tuple[float, ...]:
    """A decoding step of each pipeline stage with `rows` typical requests, half of each cached."""
    demand, layout = budget.demand, budget.layout
    context = demand.typical / 2
    times = []
    for stage in range(len(layout.widths)):
        ranks = [rank for rank in budget.ranks if rank.place.pp == stage]
        split = layout.split(demand.spec, stage)
        slowest = 0.0
        for rank in ranks:
            cached = kv_bytes_per_token(demand.spec, split, rank.place, demand.cache.kv_cache_dtype) * context * rows
            slowest = max(slowest, (read_bytes(demand, rank, budget) + cached) / speed(rank.device))
        layers = ranks[0].layers[1] - ranks[0].layers[0]
        times.append(slowest + 2 * layers * exchange_seconds(demand, [rank.device for rank in ranks], rows))
    return tuple(times)


def tokens_per_second(budget: Budget, rows: float) -> float:
    """Decoding `rows` requests at once; with several stages, as many plans are in flight as there are stages."""
    stages, demand = len(budget.layout.widths), budget.demand
    each = max(rows / stages, 1.0)
    times = stage_seconds(budget, each)
    hops = 0.0
    for before, after in zip(range(stages - 1), range(1, stages), strict=True):
        ends = [next(r.device for r in budget.ranks if r.place.pp == stage) for stage in (before, after)]
        between = link(ends)
        size = each * demand.spec.hidden_size * BYTES_PER_ELEMENT[demand.dtype]
        hops += between.latency + size / between.bandwidth
    return rows / max(sum(times) + hops, min(rows, stages) * max(times))


def full_load(budget: Budget) -> float:
    """Typical requests that run at once: what memory holds, at most what is allowed."""
    return max(1.0, min(budget.tokens / budget.demand.typical, budget.demand.max_num_seqs))
