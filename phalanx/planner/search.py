"""Which split: shares of tensor ranks, layers of stages, and the layout itself where only devices are given.

On devices of equal speed the KV cache comes first: it shall hold all requests at typical length, or as much as any
split allows; of the splits that give that, the fastest is taken. Where speeds differ, splits between "by memory" and
"by speed" are tried, and a percent of the cache is worth a percent of the estimated tokens per second under full load.
Layers are split exactly, by dynamic programming over contiguous ranges, embedding and head counted. Pure: no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from phalanx.config import ParallelConfig
from phalanx.distributed.partition import Partition
from phalanx.errors import ConfigError
from phalanx.models.shares import layer_bytes, layer_kv_bytes, outer_bytes, table_bytes
from phalanx.planner import cost
from phalanx.planner.devices import Device
from phalanx.planner.memory import Budget, Demand, Layout, budget

SLACK = 0.98
"""Part of the largest possible KV cache that a split must keep; the rest may be given up for speed."""

BUSY = 32
"""Requests for which stages are brought level: with more, caches weigh more than the head; with fewer, less."""

_ALIKE = 1.1
"""Speeds that differ by no more than this factor count as equal: measurements waver."""

_MIXTURES = (0.0, 0.25, 0.5, 0.75, 1.0)
_STEPS = (0.08, 0.04, 0.02, 0.01)
_FEW = 6
"""Up to so many devices every way to group them into stages is tried."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A layout on devices, and what it is expected to do."""

    budget: Budget
    devices: tuple[Device, ...]
    """One a rank."""
    load: float
    """Typical requests at once."""
    tokens_per_second: float
    """Under that load, estimated."""

    @property
    def crosses_nodes(self) -> bool:
        """Whether tensor ranks of one stage are on several nodes."""
        parts = _by_stage(self.budget.layout.widths, self.devices)
        return any(len({device.node for device in part}) > 1 for part in parts)

    @property
    def order(self) -> tuple[bool, bool, float, int]:
        """Better plans are greater: one that fits, then with tensor groups inside nodes, then the larger product of
        tokens per second and cache (as far as requests need it), then fewer devices."""
        fits, cache = self.budget.fits, min(self.budget.capacity, self.budget.demand.plenty)
        worth = self.tokens_per_second * cache if fits else float(self.budget.binding.kv_budget)
        return fits, not self.crosses_nodes, worth, -len(self.devices)


def lay_out(demand: Demand, parallel: ParallelConfig, devices: Sequence[Device]) -> Plan:
    """The layout with the sizes that `parallel` (resolved) has, what is automatic decided for `devices`, one a rank.

    Raises ConfigError when the model cannot be cut like this. A plan that does not fit is returned all the same.
    """
    return _lay_out(demand, Layout(parallel.widths, parallel.tensor_weights, parallel.stage_layers), devices)


def lay_out_widths(demand: Demand, widths: Sequence[int], devices: Sequence[Device]) -> Plan:
    """As `lay_out`, with everything but the stages' widths decided here."""
    return _lay_out(demand, Layout(tuple(widths)), devices)


def choose(demand: Demand, devices: Sequence[Device]) -> list[Plan]:
    """Plans for any number of `devices`, the best first. Raises ConfigError when none can be laid out."""
    plans: list[Plan] = []
    problem: ConfigError | None = None
    for widths, used in _candidates(devices):
        try:
            plans.append(_lay_out(demand, Layout(widths), used))
        except ConfigError as error:
            problem = error
    if not plans:
        raise problem or ConfigError("There are no devices to plan for.")
    return sorted(plans, key=lambda plan: plan.order, reverse=True)


def resolved(parallel: ParallelConfig, layout: Layout) -> ParallelConfig:
    """`parallel` with the layout's sizes and splits written out."""
    widths = layout.widths
    shares = ";".join(",".join(f"{share:.9g}" for share in stage) for stage in layout.tensor_weights)
    return replace(
        parallel,
        tensor_parallel_size=max(widths),
        pipeline_parallel_size=len(widths),
        pipeline_tensor_sizes=",".join(map(str, widths)) if len(set(widths)) > 1 else None,
        tensor_split=shares or parallel.tensor_split,
        pipeline_split=",".join(map(str, layout.stage_layers)) or parallel.pipeline_split,
    )


def _candidates(devices: Sequence[Device]) -> Iterator[tuple[tuple[int, ...], list[Device]]]:
    """Stage widths and devices to try: all of them, or only the roomiest ones, kept in their order."""
    by_room = sorted(range(len(devices)), key=lambda i: -devices[i].memory.available)
    for count in range(len(devices), 0, -1):
        used = [devices[i] for i in sorted(by_room[:count])]
        nodes = [used[0].node, *(b.node for a, b in pairwise(used) if a.node != b.node)]
        widths = {(count // stages,) * stages for stages in range(1, count + 1) if count % stages == 0}
        if len(nodes) == len(set(nodes)):
            widths.add(tuple(sum(device.node == node for device in used) for node in nodes))
        if count <= _FEW:
            widths |= set(_compositions(count))
        for layout in sorted(widths):
            yield layout, used


def _compositions(total: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for rest in _compositions(total - first):
            yield (first, *rest)


# -- one layout --------------------------------------------------------------------------------------------------------


def _lay_out(demand: Demand, given: Layout, devices: Sequence[Device]) -> Plan:
    stages = _by_stage(given.widths, devices)
    for stage in range(len(stages)):
        given.split(demand.spec, stage)  # what cannot be cut is said before anything is searched
    mixed = not given.tensor_weights and not all(_same(part) for part in stages)
    plans = []
    for mixture in _MIXTURES if mixed else (0.0,):
        weights = given.tensor_weights or tuple(_shares(demand, part, mixture) for part in stages)
        for layers in _stage_layers(demand, given, weights, stages, by_memory=_alike(devices)):
            layout = Layout(given.widths, weights, layers)
            if not given.tensor_weights and mixture == 0.0:
                layout = _refined(demand, layout, stages, devices)
            plans.append(_plan(demand, layout, devices))
    if _alike(devices):
        wanted = _wanted(demand, max(plan.budget.capacity for plan in plans))
        plans = [plan for plan in plans if plan.budget.capacity >= wanted]
    return max(plans, key=lambda plan: plan.order)


def _wanted(demand: Demand, most: float) -> float:
    """Blocks that a split must have room for where the best one has room for `most`."""
    return max(min(most * SLACK, demand.plenty, demand.enough), min(most, demand.blocks_per_request))


def _plan(demand: Demand, layout: Layout, devices: Sequence[Device]) -> Plan:
    found = budget(demand, layout, devices)
    load = cost.full_load(found)
    return Plan(found, tuple(devices), load, cost.tokens_per_second(found, load))


def _by_stage(widths: Sequence[int], devices: Sequence[Device]) -> list[tuple[Device, ...]]:
    ends = list(accumulate(widths, initial=0))
    return [tuple(devices[a:b]) for a, b in pairwise(ends)]


def _alike(devices: Sequence[Device]) -> bool:
    speeds = [cost.speed(device) for device in devices]
    return max(speeds) <= _ALIKE * min(speeds)


def _same(devices: Sequence[Device]) -> bool:
    return all(device.like(devices[0]) for device in devices)


def _shares(demand: Demand, devices: Sequence[Device], mixture: float) -> tuple[float, ...]:
    """In proportion to what each device can hold (`mixture` 0), to its speed (1), or something between."""
    if _same(devices):
        return (1.0,) * len(devices)
    rooms = [max(demand.kv_budget(device, 0), 1) for device in devices]
    shares = [room ** (1 - mixture) * cost.speed(d) ** mixture for room, d in zip(rooms, devices, strict=True)]
    return _scaled(shares)


def _scaled(shares: Sequence[float]) -> tuple[float, ...]:
    total = sum(shares)
    return tuple(round(share / total * 100, 3) or 0.001 for share in shares)


def _refined(
    demand: Demand, layout: Layout, stages: Sequence[Sequence[Device]], devices: Sequence[Device]
) -> Layout:  # fmt: skip
    """Shares moved in small steps from the rank that decides the size of the cache to the one with most room, stage by
    stage: whole heads make the first guess uneven. Cuts between groups of heads that share keys are a second guess."""
    for stage, part in enumerate(stages):
        if _same(part):
            continue
        best, shares = budget(demand, layout, devices), layout.tensor_weights[stage]
        kv_heads = min(layer.attention.num_kv_heads for layer in demand.spec.layers)
        if kv_heads >= len(part):
            whole = [float(length) for length in Partition.weighted(kv_heads, shares).lengths]
            tried = budget(demand, _with_shares(layout, stage, whole), devices)
            if _tightest(tried, stage) > _tightest(best, stage):
                best, layout, shares = tried, tried.layout, tried.layout.tensor_weights[stage]
        for step in _STEPS:
            while True:
                ranks = sorted(
                    (r for r in best.ranks if r.place.pp == stage), key=lambda r: r.kv_budget / r.kv_bytes_per_block
                )
                tight, roomy = ranks[0].place.tp, ranks[-1].place.tp
                moved = list(shares)
                moved[roomy] += moved[tight] * step
                moved[tight] *= 1 - step
                tried = budget(demand, _with_shares(layout, stage, moved), devices)
                if _tightest(tried, stage) <= _tightest(best, stage):
                    break
                best, layout, shares = tried, tried.layout, tried.layout.tensor_weights[stage]
    return layout


def _with_shares(layout: Layout, stage: int, shares: Sequence[float]) -> Layout:
    weights = [*layout.tensor_weights]
    weights[stage] = _scaled(shares)
    return replace(layout, tensor_weights=tuple(weights))


def _tightest(found: Budget, stage: int) -> float:
    return min(r.kv_budget / r.kv_bytes_per_block for r in found.ranks if r.place.pp == stage)


# -- layers over stages ------------------------------------------------------------------------------------------------


def _stage_layers(
    demand: Demand, given: Layout, weights: tuple[tuple[float, ...], ...], stages: Sequence[Sequence[Device]], *,
    by_memory: bool,
) -> list[tuple[int, ...]]:  # fmt: skip
    """Layers of each stage: what is given, else one or several proposals."""
    if given.stage_layers or len(stages) == 1:
        return [given.stage_layers]
    tables = [_Stage(demand, shares, part, i == 0, i == len(stages) - 1)
              for i, (shares, part) in enumerate(zip(weights, stages, strict=True))]  # fmt: skip
    layers = demand.spec.num_layers
    roomiest, _ = partition(layers, [lambda a, b, t=t: -t.blocks(a, b) for t in tables])  # type: ignore[misc]
    most = min(t.blocks(a, b) for t, (a, b) in zip(tables, _ranges(roomiest), strict=True))
    if most < demand.blocks_per_request:
        return [roomiest]
    targets = [_wanted(demand, most)]
    if not by_memory:
        targets += [max(targets[0] * part, demand.blocks_per_request) for part in (0.75, 0.5, 0.25, 0.0)]
    load = min(demand.max_num_seqs, most * demand.cache.block_size / demand.typical, BUSY)
    rows = max(1.0, load / len(stages))
    proposals = []
    for target in targets:

        def seconds(table: _Stage) -> Callable[[int, int], float]:
            return lambda a, b: table.seconds(a, b, rows) if table.blocks(a, b) >= target else math.inf  # noqa: B023

        found, slowest = partition(layers, [seconds(table) for table in tables])
        if slowest < math.inf and found not in proposals:
            proposals.append(found)
    return proposals or [roomiest]


def _ranges(layers: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(layers, initial=0)))


def partition(layers: int, costs: Sequence[Callable[[int, int], float]]) -> tuple[tuple[int, ...], float]:
    """How many of `layers` consecutive layers each stage takes, at least one, so that the largest of
    `costs[stage](first, end)` is smallest; and that largest cost.

    Exact: dynamic programming over the stages and the layer where each ends, O(stages · layers²) costs. There must be
    no more stages than layers.
    """
    stages = len(costs)
    worst: list[tuple[float, float]] = [(0.0, 0.0)] + [(math.inf, math.inf)] * layers
    choices: list[list[int]] = []
    for stage, price in enumerate(costs):
        now = [(math.inf, math.inf)] * (layers + 1)
        choice = [stage] * (layers + 1)
        ends = range(layers, layers + 1) if stage == stages - 1 else range(stage + 1, layers - (stages - stage - 1) + 1)
        for end in ends:
            for start in range(stage, end):
                if stage == 0 and start:
                    break
                most, total = worst[start]
                if most > now[end][0]:
                    continue
                here = price(start, end)
                found = (max(most, here) if stage else here, total + here)
                if found < now[end]:
                    now[end], choice[end] = found, start
        worst = now
        choices.append(choice)
    counts, end = [], layers
    for choice in reversed(choices):
        counts.append(end - choice[end])
        end = choice[end]
    return tuple(reversed(counts)), worst[layers][0]


class _Stage:
    """What any range of layers would cost one stage: bytes and seconds, from sums made once."""

    def __init__(self, demand: Demand, shares: Sequence[float], devices: Sequence[Device], first: bool, last: bool):
        spec, kv_dtype = demand.spec, demand.cache.kv_cache_dtype
        self._demand, self._devices = demand, devices
        whole = replace(Layout((len(shares),), (tuple(shares),)).split(spec, 0))
        ranks = range(len(shares))
        self._outer = [outer_bytes(spec, whole, r, demand.dtype, first=first, last=last) for r in ranks]
        self._read = [self._outer[r] - (table_bytes(spec, whole, r, demand.dtype) if first else 0) for r in ranks]
        self._weights = [
            list(accumulate((layer_bytes(spec, i, whole, r, demand.dtype) for i in range(spec.num_layers)), initial=0))
            for r in ranks
        ]
        self._kv = [list(accumulate((layer_kv_bytes(x, whole, r, kv_dtype) for x in spec.layers), initial=0))
                    for r in ranks]  # fmt: skip
        self._speeds = [cost.speed(device) for device in devices]
        # Ranks that hold as much on devices that are alike need not be asked twice.
        kinds = {(devices[r], self._outer[r], *self._weights[r], *self._kv[r]): r for r in ranks}
        self._asked = sorted(kinds.values())

    def blocks(self, start: int, end: int) -> float:
        """Of the KV cache, that the tightest rank has room for; negative by what is missing."""
        size = self._demand.cache.block_size
        return min(
            self._demand.kv_budget(self._devices[r], self._outer[r] + self._weights[r][end] - self._weights[r][start])
            / ((self._kv[r][end] - self._kv[r][start]) * size)
            for r in self._asked
        )

    def seconds(self, start: int, end: int, rows: float) -> float:
        """Of one decoding step with `rows` requests."""
        context = self._demand.typical / 2 * rows
        slowest = max(
            (
                self._read[r]
                + self._weights[r][end] - self._weights[r][start]
                + (self._kv[r][end] - self._kv[r][start]) * context
            )
            / self._speeds[r]
            for r in range(len(self._devices))
        )  # fmt: skip
        return slowest + 2 * (end - start) * cost.exchange_seconds(self._demand, self._devices, rows)
