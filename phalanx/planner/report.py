"""A layout in words and tables: for a plan (`serve --dry-run`) and for a started server alike. Pure text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from phalanx.errors import ConfigError, NotEnoughMemory
from phalanx.planner import cost
from phalanx.planner.devices import Device
from phalanx.planner.memory import Budget, Demand, RankMemory
from phalanx.planner.search import Plan, lay_out_widths
from phalanx.worker.limits import Memory
from phalanx.worker.memory import GPU_SHARE

_LARGEST_LAYOUT = 64
"""Devices; larger layouts are not proposed."""
_NAMED = 4
"""Ranks that a refusal describes."""
_COLUMNS = ("weights", "kv_cache", "activations", "free")


class RankFacts(Protocol):
    """One rank, planned or running (`WorkerStatus` has it)."""

    @property
    def rank(self) -> int: ...
    @property
    def node(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def layers(self) -> str: ...
    @property
    def heads(self) -> int: ...
    @property
    def memory(self) -> Mapping[str, int]: ...


class MeasuredRank(Protocol):
    @property
    def layers(self) -> str: ...
    @property
    def step_s(self) -> float: ...


@dataclass(frozen=True)
class Row:
    """A planned rank."""

    rank: int
    node: str
    device: str
    layers: str
    heads: int
    memory: dict[str, int]
    """Bytes: `weights`, `kv_cache`, `activations`, `free`; `kv_room` is the most that the cache could have here."""


def size(count: int) -> str:
    """`1.5 GiB`."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= step:
            return f"{count / step:.1f} {unit}"
    return f"{count} B"


def memory_table(ranks: Sequence[RankFacts]) -> list[str]:
    """A line a rank. No lines without ranks."""
    if not ranks:
        return []
    rows = [("rank", "node", "device", "layers", "heads", *(name.replace("_", " ") for name in _COLUMNS))]
    for rank in ranks:
        sizes = (size(rank.memory[name]) if name in rank.memory else "-" for name in _COLUMNS)
        rows.append((str(rank.rank), rank.node, rank.device, rank.layers, str(rank.heads), *sizes))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines: list[str] = []
    for row in rows:
        words = [cell.ljust(w) for cell, w in zip(row[:4], widths[:4], strict=True)]
        figures = [cell.rjust(w) for cell, w in zip(row[4:], widths[4:], strict=True)]
        lines.append(("Memory:  " if not lines else " " * 9) + "  ".join([*words, *figures]).rstrip())
    return lines


def cache_lines(device: str, *, blocks: int, block_size: int, kv_bytes: int, max_model_len: int) -> list[str]:
    """The two lines that people look for. `device` is a kind or a torch name, such as cuda:0."""
    word = "GPU" if device.startswith("cuda") else device.upper()
    tokens = blocks * block_size
    return [
        f"{word} KV cache size: {tokens:,} tokens ({size(kv_bytes)}, {blocks:,} blocks of {block_size})",
        f"Maximum concurrency for {max_model_len:,} tokens per request: {tokens / max_model_len:.2f}x",
    ]


def binding_line(ranks: Sequence[RankFacts]) -> list[str]:
    """Which device decides the size of the cache; nothing for one rank, or where ranks do not say what they could
    hold."""
    if len(ranks) < 2 or any(not rank.memory.get("kv_room") or not rank.memory.get("kv_cache") for rank in ranks):
        return []
    tight = min(ranks, key=lambda rank: rank.memory["kv_room"] / rank.memory["kv_cache"])
    if tight.memory["kv_room"] >= tight.memory["kv_cache"] * 1.001 + 2**20:
        return ["No device binds: the KV cache holds all requests at full length."]
    return [f"Binding device: rank {tight.rank} ({tight.device}); its memory decides the size of the KV cache."]


def stage_line(ranks: Sequence[MeasuredRank]) -> list[str]:
    """How long a token takes in each pipeline stage; nothing for one stage, or where it was not measured."""
    stages: dict[str, float] = {}
    for rank in ranks:
        stages[rank.layers] = max(rank.step_s, stages.get(rank.layers, 0.0))
    if len(stages) < 2 or not all(stages.values()):
        return []
    times = ", ".join(f"{seconds * 1e3:.1f} ms in layers {layers}" for layers, seconds in stages.items())
    return [f"Stages, measured: a token takes {times}."]


def layout_line(widths: Sequence[int]) -> str:
    """`3 workers (pp 2, tp 2+1)`."""
    ranks, axes = sum(widths), []
    if len(widths) > 1:
        axes.append(f"pp {len(widths)}")
    if max(widths) > 1:
        axes.append(f"tp {widths[0]}" if len(set(widths)) == 1 else f"tp {'+'.join(map(str, widths))}")
    return f"{ranks} worker{'s' if ranks > 1 else ''}" + (f" ({', '.join(axes)})" if axes else "")


# -- plans -------------------------------------------------------------------------------------------------------------


def rows(found: Budget) -> list[Row]:
    out = []
    for rank in found.ranks:
        cache = found.kv_bytes(rank)
        free = rank.device.memory.available - rank.weights - rank.activations - cache
        out.append(
            Row(
                rank=rank.rank,
                node=rank.device.node,
                device=rank.device.name,
                layers=f"{rank.layers[0]}-{rank.layers[1]}",
                heads=rank.heads,
                memory={
                    "weights": rank.weights,
                    "kv_cache": cache,
                    "activations": rank.activations,
                    "free": free,
                    "kv_room": max(rank.kv_budget, 0),
                },
            )
        )
    return out


def plan_lines(name: str, plan: Plan, others: Sequence[Plan] = (), *, unused: int = 0) -> list[str]:
    """The summary of a plan that fits, as a started server prints it, with what was decided and why.

    `others` are plans that were worse; `unused` devices are not in it.
    """
    found, demand = plan.budget, plan.budget.demand
    layout, device = found.layout, plan.devices[0].kind
    facts = rows(found)
    kv_bytes = sum(found.kv_bytes(rank) for rank in found.ranks)
    lines = [
        f"Model: {name} ({demand.dtype} on {device}, planned only)",
        f"Layout: {layout_line(layout.widths)}" + (f"; {unused} device(s) unused" if unused else ""),
        *split_lines(layout.tensor_weights, layout.stage_layers),
        *cache_lines(
            device,
            blocks=found.blocks,
            block_size=demand.cache.block_size,
            kv_bytes=kv_bytes,
            max_model_len=demand.max_model_len,
        ),
        *memory_table(facts),
        *(binding_line(facts) or [_bound_alone(found)]),
        _used(found),
        *_time_lines(plan),
    ]
    if plan.crosses_nodes:
        lines.append("Warning: tensor ranks of one stage are on several nodes; every layer waits for the network.")
    if others:
        lines += ["Considered:", *(f"  {_considered(other)}" for other in [plan, *others])]
    return lines


def _bound_alone(found: Budget) -> str:
    if not found.is_bound:
        return "No device binds: the KV cache holds all requests at full length."
    return f"Binding device: rank 0 ({found.binding.device.name}); its memory decides the size of the KV cache."


def split_lines(tensor_weights: Sequence[Sequence[float]], stage_layers: Sequence[int]) -> list[str]:
    """What is not split evenly; layers of stages always."""
    lines = []
    if any(len(set(stage)) > 1 for stage in tensor_weights):
        shares = ";".join(",".join(f"{100 * w / sum(s):.1f}" for w in s) for s in tensor_weights)
        lines.append(f"Tensor split: {shares} (percent)")
    if len(stage_layers) > 1:
        lines.append(f"Pipeline split: {','.join(map(str, stage_layers))} layers")
    return lines


def _used(found: Budget) -> str:
    total = sum(rank.device.memory.total for rank in found.ranks)
    what = f"Weights and KV cache: {size(found.taken)}, "
    return (
        f"{what}{found.taken / found.usable:.1%} of the {size(found.usable)} that they and activations may take, "
        f"{found.taken / total:.1%} of the {size(total)} that the devices have."
    )


def _time_lines(plan: Plan) -> list[str]:
    times = cost.stage_seconds(plan.budget, max(plan.load / len(plan.budget.layout.widths), 1.0))
    measured = all(device.speed for device in plan.devices)
    stages = ", ".join(f"{seconds * 1e3:.1f} ms" for seconds in times)
    ground = "" if measured else "; speeds assumed, give devices speed= for better ones"
    step = f"stages {stages}" if len(times) > 1 else stages
    typical = plan.budget.demand.typical
    rate = f"{plan.tokens_per_second:,.0f} tokens/s with {plan.load:.0f} requests of {typical:,} tokens"
    return [f"Estimated decoding step: {step}; {rate}{ground}"]


def _considered(plan: Plan) -> str:
    name = layout_line(plan.budget.layout.widths)
    if not plan.budget.fits:
        return f"{name}: does not fit"
    far = ", tensor ranks of one stage on several nodes" if plan.crosses_nodes else ""
    return f"{name}: {plan.tokens_per_second:,.0f} tokens/s, concurrency {plan.budget.concurrency:.2f}x{far}"


# -- refusals ----------------------------------------------------------------------------------------------------------


def check_fits(plan: Plan, devices: Sequence[Device]) -> None:
    """Raises NotEnoughMemory when no request of full length fits: what is missing on which device, and what would do.

    `devices` are all there are; a larger layout is sought among copies of them.
    """
    found = plan.budget
    if found.fits:
        return
    demand = found.demand
    short = [rank for rank in found.ranks if rank.missing(demand.blocks_per_request)]
    raise NotEnoughMemory(
        f"The model does not fit {layout_line(found.layout.widths)}. {_shortages(demand, short)}",
        fix=_remedy(demand, plan, devices),
    )


def _shortages(demand: Demand, short: Sequence[RankMemory]) -> str:
    """A sentence for all that lack the same, of those that lack the most."""
    alike: dict[str, list[RankMemory]] = {}
    for rank in short:
        alike.setdefault(_shortage(demand, rank), []).append(rank)
    described = sorted(alike.items(), key=lambda item: -item[1][0].missing(demand.blocks_per_request))[:_NAMED]
    sentences = [f"{_ranks_in_words([rank.rank for rank in ranks])} {text}" for text, ranks in described]
    if left := len(short) - sum(len(ranks) for _, ranks in described):
        sentences.append(f"{left} more rank(s) lack as much or less.")
    return " ".join(sentences)


def _ranks_in_words(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    more = f" and {len(ranks) - 2 * _NAMED} more" if len(ranks) > 2 * _NAMED else ""
    return f"Each of the ranks {', '.join(map(str, ranks[: 2 * _NAMED]))}{more}"


def _shortage(demand: Demand, rank: RankMemory) -> str:
    one = demand.blocks_per_request * rank.kv_bytes_per_block
    needed = rank.weights + rank.activations + one
    missing = rank.missing(demand.blocks_per_request)
    named = rank.device.node in ("-", rank.device.name.partition(" of ")[2])
    node = "" if named else f" on {rank.device.node}"
    return (
        f"({rank.device.name}{node}) needs {size(needed)}: {size(rank.weights)} for weights, "
        f"{size(rank.activations)} for activations, {size(one)} for the KV cache of one request of "
        f"{demand.max_model_len:,} tokens; {_available(demand, rank)}; {size(missing)} are missing."
    )


def _available(demand: Demand, rank: RankMemory) -> str:
    device, cache = rank.device, demand.cache
    memory = f"{size(device.memory.available)} of {size(device.memory.total)} are free"
    if cache.kv_cache_memory_bytes is not None:
        return f"{memory} and --kv-cache-memory-bytes asks for {size(cache.kv_cache_memory_bytes)}"
    if device.kind != "cpu" or cache.gpu_memory_utilization is not None:
        share = cache.gpu_memory_utilization or GPU_SHARE
        used = device.memory.total - device.memory.available
        usable = max(int(share * device.memory.total) - used, 0)
        return f"{size(usable)} are available ({memory}; --gpu-memory-utilization {share:g})"
    return f"{memory}, a quarter of what the weights leave goes to the KV cache"


def _remedy(demand: Demand, plan: Plan, devices: Sequence[Device]) -> str:
    found = plan.budget
    remedies = _other_cache(demand, found)
    context = found.capacity * demand.cache.block_size
    if context:  # at least a block, and less than one request of full length
        remedies.append(f"use --max-model-len {context} or less, which fits")
    larger = smallest_layout(demand, _machines(devices))
    if larger is not None:
        count, flags = larger
        if count == 1:
            remedies.append("use fewer ranks: one alone fits")
        else:
            which = f"devices ({devices[-1].name}) with {' or '.join(flags)}"
            if _is_part(devices[-1]):
                which = f"machines with --nnodes {count} and {' or '.join(reversed(flags))}"
            shares = " and automatic shares" if count <= found.layout.world_size else ""
            remedies.append(f"use {count} such {which}{shares}, the smallest layout that fits")
    if not remedies:
        remedies.append("use a smaller model or larger devices; no context length and no layout of such devices fits")
    text = "; or ".join(remedies)
    return f"{text[0].upper()}{text[1:]}."


def _is_part(device: Device) -> bool:
    """Whether it is a part of its node's memory, so that more of them would not be more: a CPU of a node."""
    return device.kind == "cpu" and device.node != "-"


def _machines(devices: Sequence[Device]) -> list[Device]:
    """`devices`, those that are parts of one node's memory as one."""
    wholes: dict[object, Device] = {}
    for number, device in enumerate(devices):
        key = device.node if _is_part(device) else number
        before = wholes[key].memory if key in wholes else Memory(0, 0)
        memory = Memory(before.total + device.memory.total, before.available + device.memory.available)
        wholes[key] = replace(device, memory=memory)
    return list(wholes.values())


def _other_cache(demand: Demand, found: Budget) -> list[str]:
    """Explicit sizes of the cache that would do: what a request of full length needs, up to what is free."""
    if demand.cache.kv_cache_memory_bytes is None:
        return []
    least = max(demand.blocks_per_request * rank.kv_bytes_per_block for rank in found.ranks)
    most = min(rank.device.memory.available - rank.weights - rank.activations for rank in found.ranks)
    low, high = -(-least // 2**20), most // 2**20
    return [f"set --kv-cache-memory-bytes to {low}M at least and {high}M at most"] if low <= high else []


def smallest_layout(demand: Demand, devices: Sequence[Device]) -> tuple[int, list[str]] | None:
    """The fewest devices, more of the last kind added to `devices`, on which the model fits in equal shares, and the
    flags for it; None when not even the largest layout does."""
    for count in range(1, _LARGEST_LAYOUT + 1):
        used = [*devices, *[devices[-1]] * count][:count]
        flags = []
        for flag, widths in (("-tp", (count,)), ("-pp", (1,) * count)):
            try:
                if lay_out_widths(demand, widths, used).budget.fits:
                    flags.append(f"{flag} {count}")
            except ConfigError:
                continue
        if flags:
            return count, flags
    return None
