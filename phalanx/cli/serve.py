"""`phalanx serve`: read the flags and hand over to the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from phalanx.cli.flags import Parser, settings
from phalanx.cli.messages import warn
from phalanx.config import EngineConfig, options_by_name
from phalanx.errors import ConfigError

_DESCRIPTION = """\
Serve a model over the OpenAI API. MODEL is a folder with safetensors, a .gguf file or a Hugging Face id; without one
the demo model is fetched. Every flag can also be a PHALANX_… variable (--max-model-len is PHALANX_MAX_MODEL_LEN) or a
line of a --config file; a flag wins over a variable, a variable over the file."""


_OF_ENGINES = ("model", "cache", "scheduler", "parallel", "recovery")
"""Sections of the configuration that are for engines, mostly."""
_WITHOUT_ENGINES = frozenset({
    "model", "tokenizer", "revision", "served_model_name", "chat_template", "generation_config", "seed",
    "max_num_seqs", "max_num_queued_reqs", "transport_key", "encrypt_transport",
    "enable_recovery", "hang_timeout", "recovery_timeout",
})  # fmt: skip
"""What matters to an API server, too, that runs no engine (`--router`)."""


def run(argv: list[str]) -> int:
    parser = Parser("serve", _DESCRIPTION, positional=True)
    parser.own.add_argument(
        "--dry-run", action="store_true", help="Say how the model would be laid out and whether it fits, and exit."
    )
    chosen = settings(parser, argv)
    config = chosen.config
    parallel, server = config.parallel, config.server
    if server.router and (parallel.headless or parallel.node_rank > 0):
        raise ConfigError(
            "--router is for a machine that runs no ranks.", fix="Leave out --headless and --node-rank, or --router."
        )
    if parallel.node_rank > 0 and not parallel.headless:
        raise ConfigError(
            f"Node {parallel.node_rank} cannot serve: node 0 does.",
            fix="Add --headless, so that this machine runs ranks for it.",
        )
    if chosen.args.dry_run:
        return _dry_run(config)
    if server.router:
        _say_what_the_router_decides(chosen.origins)
    if parallel.headless:
        from phalanx.cli.headless import run_node

        return run_node(config)
    from phalanx.server.run import serve

    return serve(config)


def _say_what_the_router_decides(origins: Mapping[str, str]) -> None:
    given = [
        "--" + name.replace("_", "-")
        for name, (section, _) in options_by_name().items()
        if origins[name] != "default" and section in _OF_ENGINES and name not in _WITHOUT_ENGINES
    ]
    if given:
        warn(f"{', '.join(given)}: ignored with --router, the machine of the engines decides.")


def _dry_run(config: EngineConfig) -> int:
    """Raises what a start would, as far as it can be known without loading; the port may be in use."""
    from phalanx.cli.plan import show
    from phalanx.server.listening import bind, check, tls_context

    if config.server.router:
        raise ConfigError("--router runs no engine, so there is nothing to lay out.", fix="Leave out --dry-run.")
    if not config.parallel.headless:
        check(config.server)
        tls_context(config.server)
        bind(dataclasses.replace(config.server, port=0)).close()
    return show(config)
