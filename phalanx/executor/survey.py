"""What a node knows of itself that must be the same on all: the model's files, what they are turned into, versions.

Compared before any weight is read. Files are compared by name, size and a checksum of their beginning (where the header
is), not by every byte: two nodes with different weights of one shape are not told apart.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import msgspec

from phalanx.checkpoint.locate import Checkpoint, inside, locate, locate_tokenizer
from phalanx.config import EngineConfig
from phalanx.errors import ConfigError
from phalanx.executor.node_messages import FileFact, Survey
from phalanx.worker.capacity import Capacity, is_wanted, measure

_BEGINNING = 1 << 20
_LEFT_OPEN = ("--tensor-split", "--pipeline-split")
"""What a node may leave to node 0."""


def versions() -> dict[str, str]:
    import phalanx

    return {
        "Phalanx": phalanx.__version__,
        "Python": ".".join(map(str, sys.version_info[:2])),
        "torch": metadata.version("torch").partition("+")[0],
        "the byte order": sys.byteorder,
        "the processor": platform.machine(),
    }


def text_versions() -> dict[str, str]:
    """What must be the same where only text is worked on."""
    import phalanx

    return {"Phalanx": phalanx.__version__}


def survey(config: EngineConfig) -> Survey:
    """`config` is resolved, its model a local path. Raises CheckpointError."""
    model, cache, parallel = config.model, config.cache, config.parallel
    checkpoint = locate(model.model, revision=model.revision)
    facts = {
        "the model's path": str(model.model),
        "--dtype": model.dtype,
        "--quantization": model.quantization or "none",
        "--load-format": model.load_format,
        "--kv-cache-dtype": cache.kv_cache_dtype,
        "--device": model.device,
        "--tensor-parallel-size": str(parallel.tensor_parallel_size),
        "--pipeline-parallel-size": str(parallel.pipeline_parallel_size),
        "--pipeline-tensor-sizes": parallel.pipeline_tensor_sizes or "none",
        "--tensor-split": parallel.tensor_split,
        "--pipeline-split": parallel.pipeline_split,
        "--encrypt-transport": str(parallel.encrypt_transport).lower(),
    }
    return Survey(facts, [_fact(path) for path in checkpoint.weight_files])


_MODEL_TEXTS = ("config.json", "generation_config.json")
_TOKENIZER_TEXTS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "qwen.tiktoken", "vocab.json", "merges.txt",
    "added_tokens.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def text_survey(config: EngineConfig, checkpoint: Checkpoint) -> Survey:
    """What must be the same where only text is worked on, wherever the files are: descriptions, the tokenizer and, as
    far as they are there, the weights. Raises CheckpointError."""
    tokenizer, find = config.model.tokenizer, checkpoint.file
    if tokenizer is not None:
        find = partial(inside, locate_tokenizer(tokenizer, revision=config.model.revision))
    found = [*map(checkpoint.file, _MODEL_TEXTS), *map(find, _TOKENIZER_TEXTS), *checkpoint.weight_files]
    return Survey({}, [msgspec.structs.replace(_fact(path), name=path.name) for path in found if path is not None])


def text_difference(ours: Survey, theirs: Survey, here: str, there: str) -> ConfigError | None:
    """As `difference`; weights that are not `there` are not missed."""
    if not any(_is_weights(file) for file in theirs.files):
        ours = msgspec.structs.replace(ours, files=[file for file in ours.files if not _is_weights(file)])
    return difference(ours, theirs, here, there)


def _is_weights(file: FileFact) -> bool:
    return file.name not in (*_MODEL_TEXTS, *_TOKENIZER_TEXTS)


def measured(config: EngineConfig) -> list[Capacity]:
    """What this node has for ranks; nothing where shares are decided by the configuration (resolved)."""
    return measure(config.model.device) if is_wanted(config.parallel) else []


def _fact(path: Path) -> FileFact:
    with path.open("rb") as file:
        beginning = hashlib.sha256(file.read(_BEGINNING)).hexdigest()
    return FileFact(str(path), path.stat().st_size, beginning)


def version_difference(ours: dict[str, str], theirs: dict[str, str], here: str, there: str) -> ConfigError | None:
    """The first one; `here` and `there` are the nodes' names."""
    for what, value in ours.items():
        other = theirs.get(what, "unknown")
        if other != value:
            return ConfigError(
                f"Nodes differ: {what} is {value} on {here} and {other} on {there}.",
                fix=f"Install the same version of {what} on all nodes." if what[0] not in "t" or what == "torch"
                else "Nodes of different kinds cannot share a model.",
            )  # fmt: skip
    return None


def difference(ours: Survey, theirs: Survey, here: str, there: str) -> ConfigError | None:
    """The first one, in words; None when there is none."""
    for what, value in ours.facts.items():
        other = theirs.facts.get(what, "unknown")
        if other != value and not (what in _LEFT_OPEN and "auto" in (value, other)):
            fix = f"Give {what} the same value on every node; `auto` may mean different things on different machines."
            if what == "the model's path":
                fix = (
                    "Name the same path on every node; models that are fetched need the same PHALANX_CACHE or HF_HOME."
                )
            return ConfigError(f"Nodes differ: {what} is {value} on {here} and {other} on {there}.", fix=fix)
    have = {file.name: file for file in theirs.files}
    for file in ours.files:
        if file.name not in have:
            return ConfigError(f"{there} lacks {file.name}.", fix=f"Copy it from {here}, to the same path.")
        other_file = have.pop(file.name)
        if other_file.size != file.size:
            return ConfigError(
                f"Nodes differ: {file.name} has {file.size} bytes on {here} and {other_file.size} on {there}.",
                fix="Copy the model from one node to the other again.",
            )
        if other_file.sum != file.sum:
            return ConfigError(
                f"Nodes differ: {file.name} begins differently on {here} and {there}, though its size is the same.",
                fix="Copy the model from one node to the other again.",
            )
    for name in have:
        return ConfigError(f"{here} lacks {name}, which {there} has.", fix="Have the same files on all nodes.")
    return None
