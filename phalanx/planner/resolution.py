"""From a configuration to a layout: what a start uses, and what a dry run prints. Reads no weights.

Devices are those that the user declares, else those of this machine; what other machines have is not known before
their ranks have places, and automatic shares are decided then (`shared_out`).
"""

from __future__ import annotations

import dataclasses
import logging
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx import env
from phalanx.checkpoint.locate import Checkpoint
from phalanx.checkpoint.quantized import read_layout
from phalanx.config import EngineConfig, ModelConfig, ParallelConfig, resolve
from phalanx.distributed.mesh import Mesh
from phalanx.errors import ConfigError, NotEnoughMemory
from phalanx.kernels.library import choice, native
from phalanx.models.registry import read_spec
from phalanx.models.spec import DecoderSpec
from phalanx.models.stored import with_stored
from phalanx.planner import report, search, sharing
from phalanx.planner.devices import Device, declared, of_this_machine
from phalanx.planner.hardware import Hardware, detect
from phalanx.planner.memory import Demand, Layout
from phalanx.planner.resplit import Resplit, resplit
from phalanx.planner.search import Plan
from phalanx.worker import capacity
from phalanx.worker.limits import Memory, host_memory

log = logging.getLogger(__name__)

_SHOWN = 3
"""Plans that a dry run names beside the one it takes."""


@dataclasses.dataclass(frozen=True)
class _Facts:
    """The hardware that a configuration is resolved for."""

    device: str
    native_bfloat16: bool


def resolved(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """`config` without automatic values. Raises ConfigError, CheckpointError, UnsupportedModel, and NotEnoughMemory
    when the model cannot fit several ranks on this machine."""
    spec, machine = read_spec(checkpoint.config), detect()
    asked = _check_quantization(config.model, checkpoint.name, checkpoint.config, checkpoint.format)
    config = resolve(config, spec, machine)
    known = _is_elsewhere(config.parallel) or _has_device(machine, config.model.device)
    config = dataclasses.replace(config, model=_with_quantization(config.model, checkpoint.name, asked, told=known))
    return with_layout(config, spec_of(config, checkpoint))


def spec_of(config: EngineConfig, checkpoint: Checkpoint) -> DecoderSpec:
    """The model as `config` (resolved) has its weights in memory."""
    return with_stored(read_spec(checkpoint.config), checkpoint, config.model.quantization)


def _check_quantization(model: ModelConfig, name: str, model_config: Mapping[str, Any], form: str) -> str:
    """What is asked for, or what the checkpoint has: integers stay as they are, unless float32 is asked for, which is
    for exact results. Raises ConfigError for a wish, or a format of files, that cannot be met."""
    if model.load_format == "safetensors" and form != "safetensors":
        raise ConfigError(f"--load-format is safetensors, but {name} is a {form.upper()} file.", fix="Leave it out.")
    layout = read_layout(model_config)
    has = "gguf" if form == "gguf" else None if layout is None else layout.method
    dummy = model.load_format == "dummy"
    if model.quantization is None:
        return has if has and model.dtype != "float32" and not dummy else "none"
    asked = model.quantization.lower()
    possible = ["none", *([has] if has and not dummy else []), *([] if has else ["int8"])]
    if asked not in possible:
        raise ConfigError(
            f"--quantization is '{asked[:60]}', but the weights of {name} can only be used as {' or '.join(possible)}.",
            fix="Leave it out, or name a checkpoint that is quantised so.",
        )
    return asked


def _has_device(machine: Hardware, kind: str) -> bool:
    """Whether there is such a device, as far as that can be seen without torch."""
    return kind in ("cpu", machine.device) or bool(capacity.gpus())


def _with_quantization(model: ModelConfig, name: str, wanted: str, *, told: bool) -> ModelConfig:
    """`told`: the user is told what is not as wanted (where there is no device, that is all there is to say)."""
    if wanted != "none" and (model.device != "cpu" or native() is None):
        why = "on a GPU" if model.device != "cpu" else f"here: products are {choice().reason}"
        if told:
            log.warning("The weights of %s are computed in %s, not as %s, %s.", name, model.dtype, wanted, why)
        wanted = "none"
    return dataclasses.replace(model, quantization=wanted)


def with_layout(config: EngineConfig, spec: DecoderSpec) -> EngineConfig:
    """`config` (resolved) with its splits written out, unless they are automatic and ranks may be on other machines;
    with several declared devices and no sizes, also the sizes; of replicas also the size of the KV cache, since none
    can see what the others will take.

    Raises ConfigError when the model cannot be split like that, NotEnoughMemory when it does not fit several ranks
    whose devices are known (a single rank says so itself).
    """
    parallel, devices = config.parallel, _declared(config)
    replicas = _sharing(parallel)
    if parallel.world_size == 1 and len(devices) < 2 and replicas == 1:
        return config
    known = devices or _of_this_machine(config)
    nowhere = sharing.devices(config.model.device, [sharing.Measured("-")] * parallel.world_size)
    plan, _ = _decide(config, spec, known or tuple(nowhere))
    if not devices and _is_elsewhere(parallel):
        return config  # which can be split like that, as is known now
    if known and (plan.budget.layout.world_size > 1 or replicas > 1):
        _check_fits(plan, known, replicas)
    cache = config.cache
    if known and replicas > 1:
        ranks = plan.budget.ranks
        each = max(min(rank.kv_budget for rank in ranks), *(plan.budget.kv_bytes(rank) for rank in ranks))
        cache = dataclasses.replace(cache, kv_cache_memory_bytes=each)
    return dataclasses.replace(config, cache=cache, parallel=_written_out(parallel, plan))


def _sharing(parallel: ParallelConfig) -> int:
    """Replicas that share this machine's memory."""
    return parallel.data_parallel_size if parallel.replicas_share_machine else 1


def _check_fits(plan: Plan, devices: tuple[Device, ...], replicas: int) -> None:
    """Raises NotEnoughMemory."""
    try:
        report.check_fits(plan, devices)
    except NotEnoughMemory as error:
        if replicas == 1:
            raise
        fix = "Use fewer replicas, a smaller --max-model-len or --kv-cache-memory-bytes, or a smaller model."
        raise NotEnoughMemory(
            f"Each of {replicas} replicas has 1/{replicas} of this machine's memory, and that is not enough. "
            f"{error.message}",
            fix=fix,
        ) from None


def dry_run(
    config: EngineConfig, name: str, model_config: dict[str, object], checkpoint: Checkpoint | None = None
) -> list[str]:
    """The lines of a plan for the model that `model_config` (of config.json) describes. Starts nothing. Without a
    `checkpoint` no weights are looked at, and those that a quantised one would have are taken to be plain.

    Raises ConfigError, and NotEnoughMemory with what is missing and what would fit.
    """
    spec, devices = read_spec(model_config), _declared(config)
    machine, form = detect(), "safetensors" if checkpoint is None else checkpoint.format
    asked = _check_quantization(config.model, name, model_config, form)
    config = resolve(config, spec, _Facts(devices[0].kind if devices else machine.device, machine.native_bfloat16))
    if checkpoint is None and asked not in ("none", "int8"):
        log.warning("How much of %s is %s only its weights tell: planned as numbers.", name, asked)
        asked = "none"
    known = devices or _of_this_machine(config)
    config = dataclasses.replace(config, model=_with_quantization(config.model, name, asked, told=bool(known)))
    spec = with_stored(spec, checkpoint, config.model.quantization)
    if known and not devices and known[0].kind == "cpu":
        each = capacity.read_speed(machine.cores) / len(known)
        known = tuple(dataclasses.replace(device, speed=each) for device in known)
    if not known and not _is_elsewhere(config.parallel):
        raise ConfigError(
            "The device is cuda, but nvidia-smi shows no GPU here for every rank.",
            fix="Use --device cpu, or describe the GPUs: --declare-device name=a10,memory=24G",
        )
    if not known:
        raise ConfigError(
            "What devices the ranks would have is not known.", fix="Describe them: --declare-device name=a10,memory=24G"
        )
    plan, others = _decide(config, spec, known)
    _check_fits(plan, known, _sharing(config.parallel))
    lines = report.plan_lines(name, plan, others[:_SHOWN], unused=len(known) - len(plan.devices))
    replicas = config.parallel.data_parallel_size
    if replicas > 1:
        lines.insert(1, f"Replicas: {replicas}; what follows is for each of them")
    return lines


def is_shared_out_later(parallel: ParallelConfig) -> bool:
    """Whether `shared_out` has something to decide; `parallel` is as `with_layout` left it."""
    return _is_elsewhere(parallel) and capacity.is_wanted(parallel)


def shared_out(config: EngineConfig, spec: DecoderSpec, measured: Sequence[sharing.Measured]) -> tuple[Layout, str]:
    """The layout of `config` (resolved, with automatic shares) on devices that were measured, one a rank, and why it is
    so. Raises ConfigError when the model cannot be split like that, NotEnoughMemory when it does not fit."""
    plan, why = sharing.share_out(Demand.of(spec, config), config.parallel, config.model.device, measured)
    report.check_fits(plan, plan.devices)
    return plan.budget.layout, why


def split_anew(config: EngineConfig, spec: DecoderSpec, left: Mapping[int, sharing.Measured]) -> Resplit:
    """How the model is split over what is left of the ranks of `config` (resolved), by rank. `memory` is what a rank's
    device has without us. Raises TooLittle."""
    parallel, kind, known = config.parallel, config.model.device, _declared(config)
    mesh = Mesh.of_widths(parallel.widths)
    found = sharing.devices(kind, [left[rank] for rank in sorted(left)])
    devices = [
        dataclasses.replace(known[rank] if rank < len(known) else device)
        for rank, device in zip(sorted(left), found, strict=True)
    ]
    return resplit(Demand.of(spec, config), devices, [mesh.place(rank).pp for rank in sorted(left)])


def _decide(config: EngineConfig, spec: DecoderSpec, devices: tuple[Device, ...]) -> tuple[Plan, list[Plan]]:
    """The plan, and others that were worse where the layout was chosen here. Raises ConfigError."""
    parallel, demand = config.parallel, Demand.of(spec, config)
    ranks = parallel.world_size
    if ranks == 1 and len(devices) > 1:
        best, *others = search.choose(demand, devices)
        return best, others
    if len(devices) < ranks:
        raise ConfigError(
            f"The layout has {report.layout_line(parallel.widths)}, but there are only {len(devices)} device(s).",
            fix="Declare more devices, or choose a smaller layout.",
        )
    return search.lay_out(demand, parallel, devices[:ranks]), []


def _declared(config: EngineConfig) -> tuple[Device, ...]:
    kind = None if config.model.device == "auto" else config.model.device
    return declared(config.parallel.declare_device, kind=kind)


def _of_this_machine(config: EngineConfig) -> tuple[Device, ...]:
    """One device for each rank of a replica; none where they are elsewhere, or the GPUs cannot be asked."""
    parallel = config.parallel
    if _is_elsewhere(parallel):
        return ()
    ranks, kind, replicas = parallel.world_size, config.model.device, parallel.data_parallel_size
    host = host_memory()
    host = Memory(host.total // replicas, host.available // replicas)
    return of_this_machine(kind, ranks, host, node=platform.node(), gpus=env.visible_gpus()) or ()


def _is_elsewhere(parallel: ParallelConfig) -> bool:
    """Whether ranks may be on other machines."""
    return parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray"


def _written_out(parallel: ParallelConfig, plan: Plan) -> ParallelConfig:
    several = plan.budget.layout.world_size > 1
    backend = parallel.distributed_executor_backend
    return dataclasses.replace(
        search.resolved(parallel, plan.budget.layout),
        distributed_executor_backend="mp" if several and backend == "inprocess" else backend,
    )
