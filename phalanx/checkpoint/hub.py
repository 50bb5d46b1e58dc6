"""Fetching a model's files from the Hugging Face hub, by way of huggingface_hub and its cache.

Only data files are fetched: configuration, safetensors and tokenizer files. Pickled weights and Python files never are.
The hub's own settings (cache folder, offline mode, end point, token) are honoured by the library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.checkpoint.progress import DownloadProgress, TerminalProgress
from phalanx.errors import CheckpointError

TEXT_FILES = ("*.json", "*.model", "*.tiktoken", "*.jinja", "merges.txt", "vocab.txt")
WEIGHT_FILES = ("*.safetensors",)
IGNORED = ("*/*", "consolidated*.safetensors", "adapter_*.safetensors")


def fetch_snapshot(
    repo_id: str, revision: str | None, progress: DownloadProgress | None = None, *, weights: bool = True
) -> Path:
    """The cached snapshot folder of `repo_id` at `revision` (default: main), fetched or completed first; with
    `weights=False` only configuration and tokenizer.

    Without network the cached snapshot is used. Raises CheckpointError, with the remedy, when there is none.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    options: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": [*TEXT_FILES, *(WEIGHT_FILES if weights else ())],
        "ignore_patterns": list(IGNORED),
    }
    try:
        # snapshot_download asks this too, but without a time limit: a silent network would hang it.
        info = HfApi().model_info(repo_id, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HfHubHTTPError as error:
        raise _explained(repo_id, revision, error) from error
    except Exception as error:
        try:
            return Path(snapshot_download(repo_id, local_files_only=True, **options))
        except Exception:
            raise _explained(repo_id, revision, error) from error
    if weights:
        _check_has_weights(repo_id, [sibling.rfilename for sibling in info.siblings or []])
    try:
        if progress is not None:
            return Path(snapshot_download(repo_id, tqdm_class=_reporting(repo_id, progress), **options))
        with TerminalProgress() as bar:
            return Path(snapshot_download(repo_id, tqdm_class=_reporting(repo_id, bar), **options))
    except Exception as error:
        raise _explained(repo_id, revision, error) from error


def _check_has_weights(repo_id: str, names: list[str]) -> None:
    """Say what is wrong with a repository before anything of it is fetched."""
    top = [name for name in names if "/" not in name]
    if any(name.endswith(".safetensors") and not name.startswith("adapter_") for name in top):
        return
    if any(name.endswith(".gguf") for name in names):
        raise CheckpointError(
            f"{repo_id} on the hub holds GGUF files, of which one has to be chosen.",
            fix=f"Run `hf download {repo_id} FILE.gguf --local-dir .` and name the file.",
        )
    if any(name.endswith((".bin", ".pt", ".pth")) for name in top):
        raise CheckpointError(
            f"{repo_id} on the hub has only pickled weights, which can run code when read and are therefore refused.",
            fix="Use a revision or a copy of the model with safetensors, or convert it where you trust it.",
        )
    raise CheckpointError(f"{repo_id} on the hub has no weights (*.safetensors).", fix="Check the name of the model.")


def _explained(repo_id: str, revision: str | None, error: Exception) -> CheckpointError:
    from huggingface_hub import errors

    at = f" at revision '{revision}'" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            f"{repo_id} on the hub is only for those who have accepted its terms.",
            fix=f"Accept them on https://huggingface.co/{repo_id}, then run `hf auth login` or set HF_TOKEN.",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"There is no folder or file '{repo_id}' here, and no such model on the hub that you may see.",
            fix="Check the name; for a private model run `hf auth login` or set HF_TOKEN.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{repo_id} on the hub has no revision '{revision}'.", fix="Check --revision.")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return CheckpointError(
            f"{repo_id}{at} is not completely in the hub's cache, and HF_HUB_OFFLINE forbids to fetch it.",
            fix="Unset HF_HUB_OFFLINE once, or name a local folder.",
        )
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, errors.HfHubHTTPError):
        return CheckpointError(
            f"{repo_id} could not be written to the hub's cache: {error.strerror}.",
            fix="Check the free space and the folder; HF_HOME chooses another one.",
        )
    first = next(iter(str(error).strip().splitlines()), "")[:200]
    return CheckpointError(
        f"{repo_id}{at} could not be fetched from the hub, and there is no folder or file of that name here "
        f"({type(error).__name__}: {first}).",
        fix="Check the name and the network, or name a local folder or .gguf file.",
    )


def _reporting(repo_id: str, progress: DownloadProgress) -> type[Any]:
    """A progress-bar class, as huggingface_hub wants one, that draws nothing and reports bytes to `progress`."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Reporting(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any):
            self._counts_bytes = kwargs.get("unit") == "B"
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts_bytes and self.n and self.total:
                progress(f"Fetching {repo_id}", int(self.n), int(self.total))

    return Reporting
