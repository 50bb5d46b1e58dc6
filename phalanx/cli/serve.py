"""`phalanx serve`: read the flags and hand over to the server."""

from __future__ import annotations

from phalanx.cli.flags import Parser, settings

_DESCRIPTION = """\
Serve a model over the OpenAI API. MODEL is a folder with safetensors, a .gguf file or a Hugging Face id; without one
the demo model is fetched. Every flag can also be a PHALANX_… variable (--max-model-len is PHALANX_MAX_MODEL_LEN) or a
line of a --config file; a flag wins over a variable, a variable over the file."""


def run(argv: list[str]) -> int:
    parser = Parser("serve", _DESCRIPTION, positional=True)
    chosen = settings(parser, argv)
    from phalanx.server.run import serve

    return serve(chosen.config)
