"""Which executor a resolved configuration means. Imports each kind only when it is chosen, and no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.config import EngineConfig
from phalanx.distributed.mesh import Mesh
from phalanx.executor.base import Executor

if TYPE_CHECKING:
    import socket

    from phalanx.executor.multiprocess import SupervisorProcess
    from phalanx.executor.seating import Choose, Share
    from phalanx.loading.image import Keeper


def make_executor(
    config: EngineConfig,
    *,
    supervisor: SupervisorProcess | None = None,
    choose: Choose | None = None,
    share: Share | None = None,
    door: socket.socket | None = None,
    replica: int = 0,
    life: int = 1,
    keeper: Keeper | None = None,
    weights: str = "",
) -> Executor:
    """Not started. A `supervisor` that was started early ends with the executor, or at once when it needs none.
    `choose` splits the model anew when places for ranks are lost; without it, lost places are waited for. `share`
    decides automatic shares that are still open, when ranks have places; without it they are equal. Other nodes call at
    `door`, if it is open already, for `replica`; in a later `life` those that do not come back are done without. A
    rank in this process leaves the image of its weights with `keeper`, and has those that `weights` is the fingerprint
    of, where that is known. Raises ConfigError for a layout that the model cannot be cut into, before any rank starts,
    and CheckpointError when the model cannot be read."""
    parallel = config.parallel
    if supervisor is not None and not parallel.forks_ranks(replica):
        supervisor.close()
        supervisor = None
    backend = parallel.distributed_executor_backend
    if backend in (None, "inprocess"):
        from phalanx.executor.inprocess import InProcessExecutor

        return InProcessExecutor(keeper=keeper, weights=weights, life=life)
    from phalanx.executor.launcher import Layout
    from phalanx.executor.multiprocess import multiprocess_executor

    layout = Layout(Mesh.of_widths(parallel.widths), parallel.tensor_weights, parallel.stage_layers)
    _check(config, layout.mesh)
    patience = config.recovery.replacement_timeout if life > 1 else None
    if backend == "ray":
        from phalanx.executor.ray import ray_executor

        return ray_executor(config, layout, choose=choose, share=share, patience=patience)
    if parallel.nodes_of(replica) != range(1):
        from phalanx.executor.nodes import nodes_executor

        return nodes_executor(
            config, layout, choose=choose, share=share, door=door, replica=replica, patience=patience
        )  # fmt: skip
    return multiprocess_executor(
        layout, device=config.model.device, supervisor=supervisor, choose=choose, share=share
    )  # fmt: skip


def _check(config: EngineConfig, mesh: Mesh) -> None:
    from phalanx.checkpoint.locate import locate
    from phalanx.models.registry import read_spec
    from phalanx.models.split import Split

    spec = read_spec(locate(config.model.model, revision=config.model.revision).config)
    for stage in range(mesh.pp):
        Split.of(
            spec, mesh, stage, stage_layers=config.parallel.stage_layers, tensor_weights=config.parallel.tensor_weights
        )
