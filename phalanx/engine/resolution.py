"""Where a front end asks the model's own configuration and the machine what `auto` means. Reads no weights.

The one place of the engine layer that knows recipes and hardware facts (neither needs torch); the engine itself
receives what is decided here.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING

from phalanx.config import EngineConfig, ServerConfig
from phalanx.engine.routing import make_routing
from phalanx.engine.scheduling import make_policy
from phalanx.errors import ConfigError
from phalanx.layout_rules import check_transport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.checkpoint.locate import Checkpoint
    from phalanx.executor.launcher import Layout
    from phalanx.executor.seating import Choice, Choose, Seat, Share
    from phalanx.planner.memory import Layout as PlannedLayout
    from phalanx.planner.sharing import Measured


def resolved(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """`config` without automatic values. Raises ConfigError, UnsupportedModel, and
    NotEnoughMemory when the model cannot fit several ranks on this machine."""
    from phalanx.planner import resolution

    check_transport(config.parallel)
    return resolution.resolved(_with_ray(config), checkpoint)


def check_named(config: EngineConfig) -> None:
    """That what is named is there: parts that a package may supply, the chat template. Raises ConfigError."""
    from phalanx.text.chat_template import check_syntax, load_source

    check_transport(config.parallel)
    make_policy(config.scheduler.scheduling_policy)
    make_routing(config.parallel.routing_policy)
    template = load_source(config.model.chat_template, None)
    if template is not None:
        check_syntax(template)


def splitter(config: EngineConfig) -> Choose:
    """How the model of `config` (resolved) is split when places for its ranks are lost. Reads the model's description
    when it is first needed."""
    described = _description(config)

    def choose(seats: Sequence[Seat]) -> Choice:
        from phalanx.executor.seating import Choice, NoFit
        from phalanx.planner.resolution import spec_of, split_anew
        from phalanx.planner.resplit import TooLittle

        try:
            spec = spec_of(config, described())
            found = split_anew(config, spec, {seat.number: _measured(seat) for seat in seats})
        except TooLittle as error:
            raise NoFit(str(error)) from None
        return Choice(_layout(found.plan.budget.layout), tuple(seats[n].number for n in found.used), found.longest)

    return choose


def sharer(config: EngineConfig) -> Share | None:
    """How the model of `config` (resolved) is shared out among ranks when it is known what they have; None where that
    is decided already."""
    from phalanx.planner.resolution import is_shared_out_later

    if not is_shared_out_later(config.parallel):
        return None
    described = _description(config)

    def share(seats: Sequence[Seat]) -> tuple[Layout, str]:
        from phalanx.planner.resolution import shared_out, spec_of

        layout, why = shared_out(config, spec_of(config, described()), [_measured(seat) for seat in seats])
        return _layout(layout), why

    return share


def _description(config: EngineConfig) -> Callable[[], Checkpoint]:
    """The model's; looked for when it is first called."""

    @cache
    def read() -> Checkpoint:
        from phalanx.checkpoint.locate import locate

        return locate(config.model.model, revision=config.model.revision)

    return read


def _measured(seat: Seat) -> Measured:
    from phalanx.planner.sharing import Measured

    return Measured(seat.node, seat.memory, seat.speed)


def _layout(planned: PlannedLayout) -> Layout:
    from phalanx.distributed.mesh import Mesh
    from phalanx.executor.launcher import Layout

    return Layout(Mesh.of_widths(planned.widths), planned.tensor_weights, planned.stage_layers)


def _with_ray(config: EngineConfig) -> EngineConfig:
    """Several nodes, and no word of where they meet: Ray, if this machine belongs to a cluster."""
    from phalanx.executor.ray_session import is_running

    parallel = config.parallel
    if parallel.distributed_executor_backend == "ray" and parallel.data_parallel_size > 1 and not is_running():
        raise ConfigError(
            f"--data-parallel-size is {parallel.data_parallel_size}, and no Ray cluster runs here for the replicas.",
            fix="Start one with `ray start --head` or set RAY_ADDRESS; on one machine leave Ray out.",
        )
    if parallel.distributed_executor_backend or parallel.nnodes == 1 or parallel.master_addr or not is_running():
        return config
    return dataclasses.replace(config, parallel=dataclasses.replace(parallel, distributed_executor_backend="ray"))


def for_engine(config: EngineConfig, checkpoint: Checkpoint) -> tuple[EngineConfig, str]:
    """What the engine is told: the resolved configuration with local files instead of names to look up, and without
    keys or certificates; and what the model is called. Raises CheckpointError when the tokenizer is not to be had."""
    from phalanx.checkpoint.locate import locate_tokenizer

    model, server = config.model, config.server
    path = checkpoint.weight_files[0] if checkpoint.format == "gguf" else checkpoint.folder
    tokenizer = None if model.tokenizer is None else str(locate_tokenizer(model.tokenizer, revision=model.revision))
    local = dataclasses.replace(
        config,
        model=dataclasses.replace(model, model=str(path), tokenizer=tokenizer, revision=None),
        server=ServerConfig(log_level=server.log_level, log_format=server.log_format),
    )
    return local, (*model.served_model_name, checkpoint.name)[0]
