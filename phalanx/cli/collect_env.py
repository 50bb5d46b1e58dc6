"""`phalanx collect-env`: versions, hardware and settings for a bug report, with secrets hidden.

Nothing is sent anywhere. Prompts, host names, user names and addresses are not collected.
"""

from __future__ import annotations

import importlib.util
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import phalanx
from phalanx import env
from phalanx.cli.flags import Parser
from phalanx.cli.redact import redact
from phalanx.errors import ConfigError
from phalanx.kernels.library import choice
from phalanx.planner.hardware import detect

_PACKAGES = (
    *("torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "llguidance", "msgspec", "pydantic", "fastapi"),
    *("starlette", "uvicorn", "uvloop", "httptools", "prometheus-client", "jinja2", "rich", "pyyaml", "psutil"),
    *("ray", "transformers", "openai", "triton"),
)


def run(argv: list[str]) -> int:
    parser = Parser(
        "collect-env", "Print versions, hardware and settings for a bug report; secrets are hidden.", sections=()
    )
    parser.own.add_argument("--json", action="store_true", help="Print JSON.")
    args = parser.parse(argv)
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    for section, values in facts.items():
        print(f"{section}:")
        for name, value in values.items():
            print(f"  {name:<22} {value}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Sections of facts, in the order they are printed."""
    hardware = detect()
    return {
        "phalanx": {"version": phalanx.__version__, "python": platform.python_version(), "commit": _commit()},
        "system": {
            "os": _os_name(),
            "kernel": platform.release(),
            "libc": " ".join(platform.libc_ver()),
            "container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        },
        "hardware": {
            "cpu": hardware.cpu_model,
            "architecture": hardware.architecture,
            "cores": hardware.cores,
            "memory_total": hardware.memory_total,
            "memory_available": hardware.memory_available,
            "native_bfloat16": hardware.native_bfloat16,
            "instructions": " ".join(
                sorted(f for f in hardware.cpu_flags if f.startswith(("avx", "amx", "sve", "bf16")))
            ),
            "kernels": _kernels(),
        },
        "torch": _torch(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "environment": {name: redact(name, value) for name, value in env.reported().items()},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _kernels() -> str:
    try:
        return choice().reason
    except ConfigError as error:
        return str(error)


def _torch() -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return {"installed": False}
    import torch

    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.cuda.is_available():
        facts["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _commit() -> str | None:
    """The commit of a source checkout, read from its files; None for an installed wheel."""
    git = Path(phalanx.__file__).resolve().parents[1] / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        return (git / head[5:]).read_text().strip() if head.startswith("ref: ") else head
    except OSError:
        return None
