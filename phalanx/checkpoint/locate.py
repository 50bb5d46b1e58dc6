"""From what the user calls a model to its files and configuration.

A model is a folder (safetensors with config.json, or one .gguf file), a .gguf file, a hub id, or nothing: the demo
model. Nothing outside the model's folder is read (the hub cache's own links to its blobs excepted), no Python file of a
model is ever looked at, and pickled weights are refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from phalanx.checkpoint import demo, gguf_config, hub
from phalanx.checkpoint.gguf_header import GGUFFile, read_gguf
from phalanx.checkpoint.progress import DownloadProgress
from phalanx.checkpoint.quantized import fold, read_layout
from phalanx.checkpoint.safetensors_header import read_headers
from phalanx.checkpoint.tensor_info import READABLE_TYPES, TensorInfo
from phalanx.errors import CheckpointError, FormatError, UnsupportedModel

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_JSON = 64 * 2**20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_READ_SUFFIXES = (".json", ".safetensors", ".gguf", ".model", ".tiktoken", ".jinja", ".txt")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model's files, found and checked to be where they may be; no weight has been read yet.

    `config` has config.json's keys and `generation_config` generation_config.json's (empty when there is none); for a
    GGUF file both are made from its metadata. `name` is what the model is called when the user gives it no other name.
    """

    name: str
    folder: Path
    format: Literal["safetensors", "gguf"]
    weight_files: tuple[Path, ...]
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    gguf: GGUFFile | None = None

    def tensors(self) -> dict[str, TensorInfo]:
        """Every stored tensor by its name in the file(s); those of a quantised matrix are one. Raises FormatError, and
        UnsupportedModel for a type of element that cannot be read."""
        tensors = self.gguf.tensors if self.gguf is not None else read_headers(self.weight_files)
        _check_types(self.folder if self.gguf is None else self.gguf.path, tensors)
        return tensors if self.gguf is not None else fold(tensors, read_layout(self.config))

    def file(self, name: str) -> Path | None:
        """A file of the model's folder by its plain name, such as `tokenizer.json`; None when there is none, and
        always for GGUF, which holds all it needs. Raises FormatError when it lies outside the folder."""
        return inside(self.folder, name) if self.gguf is None else None


def locate(model: str | None, *, revision: str | None = None, progress: DownloadProgress | None = None) -> Checkpoint:
    """Find `model`, fetching it first when it is a hub id or None, the demo model. `progress` hears of a fetch; without
    it a bar is drawn on standard error.

    Raises CheckpointError (FormatError, UnsupportedModel) with what is wrong and what to do.
    """
    if model is None:
        _check_revision("this is the demo model, which", revision)
        found = _from_gguf(demo.demo_model(progress=progress), demo.DEMO.name)
        return replace(found, generation_config={**demo.SAMPLING, **found.generation_config})
    path = _local(model, revision)
    if path is None:
        return _from_folder(hub.fetch_snapshot(model, revision, progress), model)
    return _from_folder(path, _folder_name(path)) if path.is_dir() else _from_file(path)


def locate_text(
    model: str | None, *, revision: str | None = None, progress: DownloadProgress | None = None
) -> Checkpoint:
    """As `locate`, for who only turns text into tokens and back: a folder needs no weights, and of a model on the hub
    none are fetched, unless everything is in one GGUF file. Raises CheckpointError as `locate` does.
    """
    path = None if model is None else _local(model, revision)
    if model is not None and path is None:
        path = hub.fetch_snapshot(model, revision, progress, weights=False)
    if path is not None and path.is_dir():
        weights = [name for name in _check_links(path) if name.endswith((".safetensors", ".gguf"))]
        config = None if weights else _read_json(path, "config.json")
        if config is not None:
            generation = _read_json(path, "generation_config.json") or {}
            return Checkpoint(_folder_name(path), path, "safetensors", (), config, generation)
    return locate(model, revision=revision, progress=progress)


def locate_config(model: str | None, *, revision: str | None = None) -> tuple[str, dict[str, Any], Checkpoint | None]:
    """What `model` is called, its configuration as in `Checkpoint.config`, and the checkpoint where its weights are
    looked at for that. A folder needs no weights, and of a model on the hub none are fetched. Raises CheckpointError as
    `locate` does.
    """
    path = None if model is None else _local(model, revision)
    if model is not None and path is None:
        path = hub.fetch_snapshot(model, revision, weights=False)
    if path is not None and path.is_dir():
        names = _check_links(path)
        config = _read_json(path, "config.json")
        if config is not None:
            # How much of a model is quantised, only its tensors tell.
            looked_at = read_layout(config) is not None and bool(_weight_files(path, names))
            return _folder_name(path), config, _from_folder(path, _folder_name(path)) if looked_at else None
    checkpoint = locate(model, revision=revision)
    return checkpoint.name, checkpoint.config, checkpoint


def locate_tokenizer(tokenizer: str, *, revision: str | None = None) -> Path:
    """The folder of a tokenizer's files: `tokenizer` itself, or what is fetched from the hub for it (no weights).

    Raises CheckpointError as `locate` does.
    """
    path = _local(tokenizer, revision)
    if path is None:
        path = hub.fetch_snapshot(tokenizer, revision, weights=False)
    elif not path.is_dir():
        raise CheckpointError(f"{path} is not a folder.", fix="Name the folder that holds the tokenizer's files.")
    _check_links(path)
    return path


def _local(name: str, revision: str | None) -> Path | None:
    """The existing file or folder of that name; None when it can only be a hub id."""
    if not name.strip() or "\0" in name:
        raise CheckpointError(
            "The model's name is empty or not a name.", fix="Name a folder, a .gguf file or a hub id."
        )
    try:
        path = Path(name).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: `~user` of no known user
        raise CheckpointError(f"{name[:200]!r} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if exists:
        _check_revision(f"{name} is a local path, which", revision)
    if not exists and (name.lower().endswith(".gguf") or not _HUB_ID.fullmatch(name)):
        raise CheckpointError(
            f"There is no file or folder {name[:200]!r}.", fix="Check the path. A model on the hub is named OWNER/NAME."
        )
    return path if exists else None


def _check_revision(what: str, revision: str | None) -> None:
    """Of a model that is not from the hub."""
    if revision is not None:
        raise CheckpointError(f"A revision ('{revision}') was given, but {what} has none.", fix="Leave out --revision.")


def _folder_name(path: Path) -> str:
    """The folder's name; for a snapshot in the hub's cache, the hub id."""
    path = path.resolve()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name or "model"


# -- kinds of checkpoint ---------------------------------------------------------------------------------------------


def _from_file(path: Path) -> Checkpoint:
    if path.suffix.lower() == ".gguf" and path.is_file():
        return _from_gguf(path, path.stem)
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path} is one file of a model; its configuration and tokenizer are needed too.",
            fix=f"Name its folder: {path.parent}.",
        )
    if path.suffix in _PICKLES:
        raise _pickled(path.parent)
    raise CheckpointError(f"{path} is neither a folder nor a .gguf file.")


def _from_gguf(path: Path, name: str) -> Checkpoint:
    gguf = read_gguf(path)
    if not gguf.tensors:
        raise CheckpointError(f"{path} holds no tensors, only a vocabulary or metadata.", fix="Name a model's file.")
    _check_types(path, gguf.tensors)
    return Checkpoint(
        name=name,
        folder=path.parent,
        format="gguf",
        weight_files=(path,),
        config=gguf_config.hf_config(gguf),
        generation_config=gguf_config.generation_config(gguf),
        gguf=gguf,
    )


def _from_folder(folder: Path, name: str) -> Checkpoint:
    names = _check_links(folder)
    weights = _weight_files(folder, names)
    if not weights:
        return _without_safetensors(folder, name, names)
    config = _read_json(folder, "config.json")
    if config is None:
        raise CheckpointError(
            f"{folder} has weights but no config.json, which says what model they are.",
            fix="Copy the model's config.json (and its tokenizer files) there.",
        )
    return Checkpoint(
        name=name,
        folder=folder,
        format="safetensors",
        weight_files=weights,
        config=config,
        generation_config=_read_json(folder, "generation_config.json") or {},
    )


def _without_safetensors(folder: Path, name: str, names: set[str]) -> Checkpoint:
    files = sorted(entry for entry in names if entry.endswith(".gguf"))
    if len(files) == 1:
        path = inside(folder, files[0])
        if path is not None:
            return _from_gguf(path, name)
    if files:
        raise CheckpointError(
            f"{folder} holds {len(files)} .gguf files.", fix=f"Name one of them, such as {folder / files[0]}."
        )
    if "adapter_config.json" in names:
        raise CheckpointError(
            f"{folder} holds an adapter (LoRA), not a whole model.", fix="Merge it into its base model first."
        )
    if any(entry.endswith(_PICKLES) for entry in names):
        raise _pickled(folder)
    raise CheckpointError(
        f"{folder} holds no model: there is neither a *.safetensors nor a .gguf file.",
        fix="Check the path, or whether the download is complete.",
    )


def _pickled(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} has only pickled weights (pytorch_model.bin and the like), which can run code when read and are "
        "therefore refused.",
        fix="Fetch the model's safetensors files, or convert it where you trust it: with transformers, "
        "`AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)` writes them.",
    )


def _check_links(folder: Path) -> set[str]:
    """The names in the folder. FormatError when one that a reader of models may open is a link out of it."""
    try:
        entries = list(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}.") from None
    for entry in entries:
        if entry.suffix in _READ_SUFFIXES and entry.is_symlink():
            inside(folder, entry.name)
    return {entry.name for entry in entries}


# -- files -----------------------------------------------------------------------------------------------------------


def _weight_files(folder: Path, names: set[str]) -> tuple[Path, ...]:
    """The safetensors files that make up the model; none when there are none."""
    if _INDEX in names:
        return _indexed(folder)
    if _SINGLE in names:
        return (_required(folder, _SINGLE),)
    candidates = sorted(
        name for name in names if name.endswith(".safetensors") and not name.startswith(("consolidated", "adapter_"))
    )
    shards = [match for name in candidates if (match := _SHARD.fullmatch(name))]
    if len(candidates) <= 1 and not shards:
        return tuple(_required(folder, name) for name in candidates)
    sets = {(match[1], match[3]) for match in shards}
    if len(shards) != len(candidates) or len(sets) != 1:
        raise CheckpointError(
            f"{folder} holds several safetensors files and no {_INDEX} that says which belong to the model.",
            fix="Copy the index there, or leave only the model's files in the folder.",
        )
    expected = int(shards[0][3])
    if [int(match[2]) for match in shards] != list(range(1, expected + 1)):
        raise CheckpointError(
            f"{folder} holds {len(shards)} of the {expected} files of the model.", fix="Fetch the missing ones."
        )
    return tuple(_required(folder, name) for name in candidates)


def _indexed(folder: Path) -> tuple[Path, ...]:
    index = _read_json(folder, _INDEX) or {}
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise FormatError(f"{folder / _INDEX} has no `weight_map` from tensors to files.", fix="Fetch it again.")
    names = sorted(set(places.values()))
    wrong = next((name for name in names if not name.endswith(".safetensors")), None)
    if wrong is not None:
        raise FormatError(f"{folder / _INDEX} names {wrong[:80]!r}, which is not a safetensors file.")
    return tuple(_required(folder, name) for name in names)


def _required(folder: Path, name: str) -> Path:
    path = inside(folder, name)
    if path is None:
        raise CheckpointError(
            f"{folder} is incomplete: {name[:80]} is missing.", fix="Fetch the missing files of the model."
        )
    return path


def inside(folder: Path, name: str) -> Path | None:
    """`folder / name` when that is an existing file; FormatError when it leads out of the folder."""
    outside = FormatError(
        f"{folder} refers to {name[:80]!r}, which is outside the model's folder.",
        fix="Put the files themselves into the folder.",
    )
    if not name or "\\" in name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise outside
    path = folder / name
    try:
        home, real = folder.resolve(strict=True), path.resolve(strict=True)
    except (OSError, RuntimeError):  # missing, a dead link, or a circle of links
        return None
    homes = [home]
    if home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--"):
        homes.append(home.parent.parent / "blobs")  # the hub's cache keeps files there and links to them
    if not any(real.is_relative_to(allowed) for allowed in homes):
        raise outside
    return path if real.is_file() else None


def _read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in a file of the folder, or None when there is no such file."""
    path = inside(folder, name)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_JSON + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    if len(raw) > _MAX_JSON:
        raise FormatError(f"{path} has more than {_MAX_JSON} bytes.")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise FormatError(f"{path} is not valid JSON.", fix="Fetch it again.") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path} does not hold a JSON object.", fix="Fetch it again.")
    return value


def _check_types(where: Path, tensors: dict[str, TensorInfo]) -> None:
    wrong = sorted({info.dtype for info in tensors.values()} - READABLE_TYPES)
    if wrong:
        raise UnsupportedModel(
            f"{where} has tensors of the type {', '.join(wrong)}, which is not supported.",
            fix=f"Supported: {', '.join(sorted(READABLE_TYPES))}.",
        )
