"""`phalanx serve … --headless`: this machine only runs ranks for node 0."""

from __future__ import annotations

import sys

from phalanx.config import EngineConfig
from phalanx.errors import ConfigError
from phalanx.logging import configure
from phalanx.lossy_output import never_wait


def run_node(config: EngineConfig) -> int:
    """Until node 0 ends. Raises UserError when this node cannot join it."""
    from phalanx.executor.node_agent import NodeAgent

    parallel = config.parallel
    if parallel.nnodes < 2 or parallel.node_rank < 1 or not parallel.master_addr:
        raise ConfigError(
            "--headless needs to know where it belongs.",
            fix="Give --nnodes (2 or more), --node-rank (1 or more) and --master-addr, the address of node 0.",
        )
    never_wait()
    configure(config.server.log_level, config.server.log_format)

    def say(text: str) -> None:
        print(f"Node {parallel.node_rank} of {parallel.nnodes}: {text}", file=sys.stderr, flush=True)

    def prepare() -> EngineConfig:
        from phalanx.checkpoint.locate import locate
        from phalanx.engine.resolution import for_engine, resolved

        checkpoint = locate(config.model.model, revision=config.model.revision)
        return for_engine(resolved(config, checkpoint), checkpoint)[0]

    if not parallel.transport_key:
        say("WARNING: no transport key: anybody who answers at the address of node 0 is believed.")
    return NodeAgent(config, prepare, say).run()
