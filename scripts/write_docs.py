"""Write the generated pages of docs/: configuration.md from the declared options, models.md from the support table.

`pages()` gives their texts; a test compares them with the files. Needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.checkpoint.quantized import SUPPORTED
from phalanx.cli.flags import SECTIONS
from phalanx.config import options_by_name
from phalanx.models.registry import supported
from phalanx.vllm_options import IGNORED, REFUSED

DOCS = Path(__file__).resolve().parents[1] / "docs"
NOTE = "<!-- Written by scripts/write_docs.py (`make docs`). Do not edit. -->"

CONFIGURATION = """\
# Configuration

{note}

Every option can be set in four ways. The first that is given wins:

1. a flag: `phalanx serve --max-model-len 4k`
2. a variable: `PHALANX_MAX_MODEL_LEN=4k phalanx serve`
3. a line of a YAML file, `max-model-len: 4k`, with `phalanx serve --config FILE` (or `PHALANX_CONFIG=FILE`)
4. the default

In Python the same names are keyword arguments: `LLM(max_model_len=4096)`. In names `-` and `_` mean the same. Sizes
are numbers with an optional unit: `k`, `m`, `g` are powers of 1000, `K`, `M`, `G` powers of 1024. An option that
takes several values is repeated as a flag, separated by commas in a variable, and a list in the file. A switch is
turned off with `--no-…`, or with `false` in a variable or file. A misspelt flag or key is an error that suggests the
right name; a misspelt variable is a warning.

`phalanx config show --origin` prints every effective value and where it came from; `phalanx config check FILE` checks
a file without starting anything.

More variables that are no options: `PHALANX_CACHE` (the folder of the demo model, by default `~/.cache/phalanx`),
`PHALANX_DEBUG=1` (errors show their traceback), `PHALANX_CONFIG`, `PHALANX_HOST_IP` (this machine's address
[for other nodes](multi-node.md)) and `PHALANX_KERNELS` ([what computes on a CPU](kernels.md)). Files from the Hugging
Face hub are kept where its own variables say (`HF_HOME`, `HF_HUB_OFFLINE`, `HF_TOKEN`).

"""

VLLM = """\
## Flags of vLLM

The flags above have vLLM's names where vLLM has them. These are accepted too, also as keyword arguments and as lines of
a file, with a line that says why they change nothing:

{ignored}

And these are refused, because going on without them would not be what was asked for:

{refused}
"""

MODELS = """\
# Models

{note}

A model is a folder with `config.json` and safetensors files (one or several), a `.gguf` file, or the name of such a
repository on the Hugging Face hub. Without one, the demo model is used: SmolLM2-135M-Instruct, Apache-2.0, a Llama of
135 million parameters in Q4_1.

| family | `model_type` in config.json | GGUF architecture | covers |
|---|---|---|---|
{rows}

Block types of GGUF files: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K.

Quantised safetensors checkpoints, by what `quantization_config` in config.json says:

| format | `quant_method` | covers |
|---|---|---|
{quantized}

Groups are of a multiple of 32 inputs (32, 64, 128, …) or whole rows. Layers that were left out of quantising are plain.
All of these are [computed as they are](kernels.md), or expanded where `--dtype float32` or `--quantization none` asks
for that.

Not supported: other families, mixture-of-experts models, pictures and sound, LoRA adapters, and checkpoints quantised
by other means (8-bit GPTQ, Marlin, fp8, sparse ones, …). Such a model is refused with a message that names what was
found and what works. Code from a model's repository is never run.

A family is a recipe of a few dozen lines in `phalanx/models/families/`: a function from the checkpoint's
configuration to a description of the decoder, and a table of weight names. Each is compared with the implementation
in `transformers` on small random checkpoints in `tests/parity/`."""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _default(value: Any) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


def configuration() -> str:
    parts = [CONFIGURATION.format(note=NOTE)]
    for section, title in SECTIONS.items():
        parts.append(f"## {title[0].upper()}{title[1:]}\n\n| option | default | meaning |\n|---|---|---|\n")
        for name, (own, declared) in options_by_name().items():
            if own != section:
                continue
            about = declared.metadata
            flags = ", ".join(f"`{flag}`" for flag in [*about["flags"], "--" + name.replace("_", "-")])
            choices = f" One of {', '.join(f'`{choice}`' for choice in about['choices'])}." if about["choices"] else ""
            parts.append(f"| {flags} | {_default(declared.default)} | {_cell(about['help'] + choices)} |\n")
        parts.append("\n")
    ignored = "\n".join(f"- `{flag}`: {reason}" for flag, (_, reason) in IGNORED.items())
    refused = "\n".join(f"- `{flag}`: {reason}" for flag, reason in REFUSED.items())
    return "".join(parts) + VLLM.format(ignored=ignored, refused=refused)


def models() -> str:
    rows = [
        f"| {family.title} | {_codes(family.model_types)} | {_codes(family.gguf)} | {family.notes} |"
        for family in supported()
    ]
    quantized = [f"| {title} | {method} | {covers} |" for title, method, covers in SUPPORTED]
    return MODELS.format(note=NOTE, rows="\n".join(rows), quantized="\n".join(quantized))


def _codes(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"


def pages() -> dict[Path, str]:
    """Every generated page: its path and its text."""
    return {DOCS / "configuration.md": configuration(), DOCS / "models.md": models()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
        print(f"wrote docs/{path.name}")
