"""`phalanx doctor`: what this machine has, what is missing for serving, and what to do about it.

Each check is a small function that returns one `Finding`; nothing is changed, fetched or loaded (torch is only looked
up, not imported). Exit code 1 when a check fails; a warning does not fail.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from phalanx import env
from phalanx.cli.flags import Parser, settings
from phalanx.config import EngineConfig
from phalanx.errors import ConfigError
from phalanx.kernels.library import choice
from phalanx.planner.hardware import Hardware, detect, torch_has_cuda

OK, WARN, FAIL = "ok", "warn", "fail"

_LEAST_MEMORY = 2**30
_LEAST_DISK = 2**30
_PACKAGES = ("torch", "tokenizers", "huggingface_hub", "llguidance", "msgspec", "fastapi", "uvicorn", "jinja2", "rich")


class Finding(NamedTuple):
    status: str
    name: str
    detail: str
    remedy: str = ""


def run(argv: list[str]) -> int:
    parser = Parser(
        "doctor", "Check this machine: each line says ok, warn or fail, and what to do.", sections=("server",)
    )
    parser.own.add_argument("--json", action="store_true", help="Print the findings as JSON.")
    chosen = settings(parser, argv)
    hardware = detect()
    findings = [check() for check in _checks(chosen.config, hardware)]
    if chosen.args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        _show(findings)
    return 1 if any(finding.status == FAIL for finding in findings) else 0


def _checks(config: EngineConfig, hardware: Hardware) -> list[Callable[[], Finding]]:
    return [
        python,
        packages,
        torch_build,
        lambda: processor(hardware),
        kernels,
        lambda: cores(hardware),
        lambda: memory(hardware),
        lambda: device(hardware, Path("/")),
        lambda: cache_folder(env.cache_dir()),
        lambda: disk(env.cache_dir()),
        lambda: shared_memory(Path("/dev/shm")),  # noqa: S108
        lambda: port(config.server.host, config.server.port),
    ]


def _show(findings: list[Finding]) -> None:
    for finding in findings:
        print(f"{finding.status:<5}{finding.name:<15}{finding.detail}")
        if finding.remedy:
            print(f"{'':<20}-> {finding.remedy}")
    counts = {status: sum(finding.status == status for finding in findings) for status in (OK, WARN, FAIL)}
    print(f"\n{counts[OK]} ok, {counts[WARN]} warnings, {counts[FAIL]} failed")


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):  # noqa: UP036
        return Finding(FAIL, "python", version, "Install Python 3.11 or newer.")
    if sys.platform != "linux":
        return Finding(WARN, "python", f"{version} on {sys.platform}", "Linux is the platform that is tested.")
    return Finding(OK, "python", version)


def packages() -> Finding:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        return Finding(
            FAIL, "packages", f"missing: {', '.join(missing)}", "Run 'pip install phalanx' in this environment."
        )
    return Finding(OK, "packages", f"all {len(_PACKAGES)} that matter are installed")


def torch_build() -> Finding:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Finding(FAIL, "torch", "not installed", "Run 'pip install torch'.")
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()) < (2, 13):
        return Finding(FAIL, "torch", version, "Run 'pip install --upgrade torch'; 2.13 or newer is needed.")
    return Finding(OK, "torch", f"{version}, {'with' if torch_has_cuda() else 'without'} CUDA")


def processor(hardware: Hardware) -> Finding:
    known = [
        flag
        for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
        if flag in hardware.cpu_flags
    ]
    detail = f"{hardware.cpu_model} ({', '.join(known) or hardware.architecture})"
    if hardware.architecture == "x86_64" and "avx2" not in hardware.cpu_flags:
        return Finding(WARN, "processor", detail, "Without AVX2 answers will be slow.")
    if not hardware.native_bfloat16:
        return Finding(OK, "processor", f"{detail}; no bfloat16 products, so --dtype auto means float32")
    return Finding(OK, "processor", f"{detail}; bfloat16 products, so --dtype auto means bfloat16")


def kernels() -> Finding:
    try:
        chosen = choice()
    except ConfigError as error:
        return Finding(FAIL, "kernels", error.message, error.fix or "")
    status = OK if chosen.native or env.kernels() == "torch" else WARN
    return Finding(status, "kernels", chosen.reason, chosen.remedy if status == WARN else "")


def cores(hardware: Hardware) -> Finding:
    present = os.cpu_count() or 1
    if hardware.cores < present:
        return Finding(OK, "cores", f"{hardware.cores} usable of {present} (affinity or a container's quota)")
    return Finding(OK, "cores", f"{hardware.cores}")


def memory(hardware: Hardware) -> Finding:
    detail = f"{_gib(hardware.memory_available)} free of {_gib(hardware.memory_total)}"
    if hardware.memory_available < _LEAST_MEMORY:
        return Finding(WARN, "memory", detail, "Stop other programs; even the demo model wants 1 GiB.")
    return Finding(OK, "memory", detail)


def device(hardware: Hardware, root: Path) -> Finding:
    if hardware.device == "cuda":
        return Finding(OK, "device", "an NVIDIA GPU, so --device auto means cuda")
    if (root / "dev/nvidia0").exists():
        remedy = "Install a CUDA build of torch to use it; until then --device auto means cpu."
        return Finding(WARN, "device", "an NVIDIA GPU, but torch was built without CUDA", remedy)
    return Finding(OK, "device", "no GPU, so --device auto means cpu")


def cache_folder(folder: Path) -> Finding:
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    remedy = "Set PHALANX_CACHE to a folder you can write."
    if not existing.is_dir():
        return Finding(FAIL, "cache folder", f"{existing} is not a folder", remedy)
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Finding(FAIL, "cache folder", f"{existing} cannot be written: {error.strerror}", remedy)
    state = "" if folder.exists() else " (made when first needed)"
    return Finding(OK, "cache folder", f"{folder}{state}")


def disk(folder: Path) -> Finding:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < _LEAST_DISK:
        return Finding(
            WARN, "disk", f"{_gib(free)} free at {folder}", "Free some space, or point PHALANX_CACHE elsewhere."
        )
    return Finding(OK, "disk", f"{_gib(free)} free at {folder}")


def shared_memory(folder: Path) -> Finding:
    if not folder.is_dir():
        return Finding(
            WARN, "shared memory", f"no {folder}", "Mount a tmpfs there; several workers on a machine use it."
        )
    free = shutil.disk_usage(folder).free
    if free < 64 * 2**20:
        remedy = "Several workers on a machine use it; in Docker give --shm-size=1g."
        return Finding(WARN, "shared memory", f"{free // 2**20} MiB free at {folder}", remedy)
    return Finding(OK, "shared memory", f"{_gib(free)} free at {folder}")


def port(host: str, number: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except (OSError, OverflowError) as error:
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                remedy = "Stop the program that has it, or choose another with --port."
                return Finding(WARN, "port", f"{host}:{number} is in use", remedy)
            return Finding(
                FAIL, "port", f"cannot listen on {host}:{number}: {error}", "Choose another --host or --port."
            )
    return Finding(OK, "port", f"{host}:{number} is free")


def _gib(amount: int) -> str:
    return f"{amount / 2**30:.1f} GiB"
