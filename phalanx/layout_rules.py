"""What no model and no machine makes up for: splits, replicas and nodes that do not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx import plug_ins
from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from phalanx.config import ParallelConfig

MAX_REPLICAS = 64
TRANSPORTS = ("auto", "packed")
"""Ours (`distributed.transport`, which needs torch)."""


def check_splits(parallel: ParallelConfig) -> None:
    """Raises ConfigError."""
    widths, layers, weights = parallel.widths, parallel.stage_layers, parallel.tensor_weights
    if layers and len(layers) != len(widths):
        raise ConfigError(
            f"--pipeline-split {parallel.pipeline_split} names {len(layers)} stages, but there are {len(widths)}.",
            fix=f"Set --pipeline-parallel-size {len(layers)}, or name {len(widths)} number(s).",
        )
    if weights and (len(weights) != len(widths) or any(len(w) != n for w, n in zip(weights, widths, strict=True))):
        ranks = " and ".join(map(str, widths)) if len(set(widths)) > 1 else str(widths[0])
        stages = f" in each of {len(widths)} stages" if len(widths) > 1 else ""
        raise ConfigError(
            f"--tensor-split {parallel.tensor_split} does not name a share for each of {ranks} tensor ranks{stages}.",
            fix="Name one share a rank (stages apart with ;), or change --tensor-parallel-size.",
        )


def check_replicas(parallel: ParallelConfig) -> None:
    """Raises ConfigError."""
    size = parallel.data_parallel_size
    if size < 1:
        raise ConfigError(f"--data-parallel-size is {size}; it must be at least 1.")
    if size > MAX_REPLICAS:
        raise ConfigError(f"--data-parallel-size is {size}; at most {MAX_REPLICAS} replicas can have one server.")
    if parallel.nnodes > 1 and parallel.nnodes % size and parallel.distributed_executor_backend != "ray":
        raise ConfigError(
            f"--data-parallel-size is {size}, but {parallel.nnodes} nodes cannot be shared out among so many replicas.",
            fix="Each has nodes of its own: use a number that divides --nnodes, and --tensor-parallel-size in a node.",
        )
    if size > 1 and parallel.port_of(size - 1) > 65535:
        raise ConfigError(f"--master-port is {parallel.master_port}; {size} replicas need as many ports from it on.")


def check_transport(parallel: ParallelConfig) -> None:
    """That there is such a one; the ranks make it. Raises ConfigError."""
    if parallel.transport not in TRANSPORTS:
        plug_ins.find(plug_ins.TRANSPORT, "--transport", parallel.transport, TRANSPORTS)


def check_nodes(parallel: ParallelConfig) -> None:
    """Raises ConfigError."""
    if parallel.nnodes < 1:
        raise ConfigError(f"--nnodes is {parallel.nnodes}; it must be at least 1.")
    if not 0 <= parallel.node_rank < parallel.nnodes:
        raise ConfigError(
            f"--node-rank is {parallel.node_rank}, but with --nnodes {parallel.nnodes} nodes are numbered from 0 to "
            f"{parallel.nnodes - 1}."
        )
    if not 0 < parallel.master_port <= 65535:
        raise ConfigError(f"--master-port is {parallel.master_port}; it must be between 1 and 65535.")
    if parallel.nnodes > 1 and not parallel.master_addr and parallel.distributed_executor_backend != "ray":
        raise ConfigError(
            f"--nnodes is {parallel.nnodes}, but the nodes do not know where to meet, and no Ray cluster runs here.",
            fix="Give every node the same --master-addr: an address of node 0 that all can reach.",
        )
    each = parallel.nnodes if parallel.distributed_executor_backend == "ray" else len(parallel.nodes_of(0))
    if each > parallel.world_size:
        raise ConfigError(
            f"{each} nodes cannot share {parallel.world_size} rank(s).",
            fix="Set --tensor-parallel-size or --pipeline-parallel-size so that each node has a rank.",
        )
    if parallel.headless and parallel.node_rank == 0:
        raise ConfigError(
            "--headless is for nodes other than 0, which serves.", fix="Set --node-rank, or leave it out."
        )
