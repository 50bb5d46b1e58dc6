"""Which executor a resolved configuration means. Imports each kind only when it is chosen, and no torch."""

from __future__ import annotations

from phalanx.config import EngineConfig
from phalanx.distributed.mesh import Mesh
from phalanx.errors import ConfigError
from phalanx.executor.base import Executor


def make_executor(config: EngineConfig) -> Executor:
    """Not started. Raises ConfigError for a layout that the model cannot be cut into, before any process starts, and
    CheckpointError when the model cannot be read."""
    parallel = config.parallel
    backend = parallel.distributed_executor_backend
    if backend in (None, "inprocess"):
        from phalanx.executor.inprocess import InProcessExecutor

        return InProcessExecutor()
    if backend != "mp":
        raise ConfigError(f"--distributed-executor-backend {backend} is not in this version.", fix="Use mp.")
    from phalanx.executor.hub import Layout
    from phalanx.executor.multiprocess import multiprocess_executor

    layout = Layout(Mesh.of_widths(parallel.widths), parallel.tensor_weights, parallel.stage_layers)
    _check(config, layout.mesh)
    if parallel.nnodes > 1:
        from phalanx.executor.nodes import nodes_executor

        return nodes_executor(config, layout)
    return multiprocess_executor(layout, device=config.model.device)


def _check(config: EngineConfig, mesh: Mesh) -> None:
    from phalanx.checkpoint.locate import locate
    from phalanx.models.registry import read_spec
    from phalanx.models.split import Split

    spec = read_spec(locate(config.model.model, revision=config.model.revision).config)
    for stage in range(mesh.pp):
        Split.of(
            spec, mesh, stage, stage_layers=config.parallel.stage_layers, tensor_weights=config.parallel.tensor_weights
        )
