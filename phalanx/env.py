"""The only file that reads the process environment."""

from __future__ import annotations

import os
from pathlib import Path

PREFIX = "PHALANX_"


def cache_dir() -> Path:
    """Where fetched models are kept: `PHALANX_CACHE`, else `~/.cache/phalanx`."""
    return Path(os.environ.get("PHALANX_CACHE") or Path.home() / ".cache" / "phalanx").expanduser()


def variables() -> dict[str, str]:
    """Every `PHALANX_…` variable, by its name without the prefix, in lower case."""
    return {name[len(PREFIX) :].lower(): value for name, value in os.environ.items() if name.startswith(PREFIX)}


def debug() -> bool:
    """`PHALANX_DEBUG=1`: user errors show their traceback."""
    return os.environ.get("PHALANX_DEBUG", "") not in ("", "0")


_REPORTED = (
    "PHALANX_",
    "OMP_",
    "KMP_",
    "MKL_",
    "GOMP_",
    "TORCH_",
    "CUDA_",
    "NVIDIA_",
    "HF_",
    "TOKENIZERS_",
    "RAY_",
    "PYTHON",
)


def reported() -> dict[str, str]:
    """Every variable that can change how Phalanx runs, for a bug report. Redact the values before showing them."""
    more = ("LD_PRELOAD", "MALLOC_ARENA_MAX", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "TRANSFORMERS_OFFLINE")
    return {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(_REPORTED) or name.upper() in more
    }


def for_child(**values: str) -> dict[str, str]:
    """The environment for a child process: this one's, with `values` set."""
    return {**os.environ, **values}
