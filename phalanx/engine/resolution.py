"""Where a front end asks the model's own configuration and the machine what `auto` means. Reads no weights.

The one place of the engine layer that knows recipes and hardware facts (neither needs torch); the engine itself
receives what is decided here.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from phalanx.config import EngineConfig, ServerConfig
from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.checkpoint.locate import Checkpoint
    from phalanx.executor.seating import Choice, Choose, Seat


def resolved(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """`config` without automatic values. Raises ConfigError, UnsupportedModel, and
    NotEnoughMemory when the model cannot fit several ranks on this machine."""
    from phalanx.planner import resolution

    return resolution.resolved(_with_ray(config), checkpoint)


def splitter(config: EngineConfig) -> Choose:
    """How the model of `config` (resolved) is split when places for its ranks are lost. Reads the model's description
    when it is first needed."""
    known: list[Checkpoint] = []

    def choose(seats: Sequence[Seat]) -> Choice:
        from phalanx.checkpoint.locate import locate
        from phalanx.distributed.mesh import Mesh
        from phalanx.executor.launcher import Layout
        from phalanx.executor.seating import Choice, NoFit
        from phalanx.planner.resolution import spec_of, split_anew
        from phalanx.planner.resplit import TooLittle

        model = config.model
        if not known:
            known.append(locate(model.model, revision=model.revision))
        try:
            found = split_anew(
                config, spec_of(config, known[0]), {seat.number: (seat.node, seat.memory) for seat in seats}
            )
        except TooLittle as error:
            raise NoFit(str(error)) from None
        shape = found.plan.budget.layout
        layout = Layout(Mesh.of_widths(shape.widths), shape.tensor_weights, shape.stage_layers)
        return Choice(layout, tuple(seats[n].number for n in found.used), found.longest)

    return choose


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
