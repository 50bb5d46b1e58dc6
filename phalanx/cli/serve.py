"""`phalanx serve`: read the flags and hand over to the server."""

from __future__ import annotations

from phalanx.cli.flags import Parser, settings
from phalanx.errors import ConfigError

_DESCRIPTION = """\
Serve a model over the OpenAI API. MODEL is a folder with safetensors, a .gguf file or a Hugging Face id; without one
the demo model is fetched. Every flag can also be a PHALANX_… variable (--max-model-len is PHALANX_MAX_MODEL_LEN) or a
line of a --config file; a flag wins over a variable, a variable over the file."""


def run(argv: list[str]) -> int:
    parser = Parser("serve", _DESCRIPTION, positional=True)
    parser.own.add_argument(
        "--dry-run", action="store_true", help="Say how the model would be laid out and whether it fits, and exit."
    )
    chosen = settings(parser, argv)
    if chosen.args.dry_run:
        from phalanx.cli.plan import show

        return show(chosen.config)
    parallel = chosen.config.parallel
    if chosen.config.server.router and (parallel.headless or parallel.node_rank > 0):
        raise ConfigError(
            "--router is for a machine that runs no ranks.", fix="Leave out --headless and --node-rank, or --router."
        )
    if parallel.headless:
        from phalanx.cli.headless import run_node

        return run_node(chosen.config)
    if parallel.node_rank > 0:
        raise ConfigError(
            f"Node {parallel.node_rank} cannot serve: node 0 does.",
            fix="Add --headless, so that this machine runs ranks for it.",
        )
    from phalanx.server.run import serve

    return serve(chosen.config)
