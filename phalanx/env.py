"""The only file that reads or changes the process environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PREFIX = "PHALANX_"


def cache_dir() -> Path:
    """Where fetched models are kept: `PHALANX_CACHE`, else `~/.cache/phalanx`."""
    return Path(os.environ.get("PHALANX_CACHE") or Path.home() / ".cache" / "phalanx").expanduser()


def variables() -> dict[str, str]:
    """Every `PHALANX_…` variable, by its name without the prefix, in lower case."""
    return {name[len(PREFIX) :].lower(): value for name, value in os.environ.items() if name.startswith(PREFIX)}


def host_ip() -> str | None:
    """`PHALANX_HOST_IP`: this machine's address for other nodes, where the route to them is not to decide."""
    return os.environ.get("PHALANX_HOST_IP") or None


def visible_gpus() -> list[int] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, by number; None when it says nothing (or names them otherwise)."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [int(number) for number in named] if all(number.strip().isdigit() for number in named) else None


def debug() -> bool:
    """`PHALANX_DEBUG=1`: user errors show their traceback."""
    return os.environ.get("PHALANX_DEBUG", "") not in ("", "0")


def kernels() -> str:
    """`PHALANX_KERNELS`: an instruction set for the native kernels, `torch` for none of them, or empty: the best."""
    return os.environ.get("PHALANX_KERNELS", "")


def fault() -> str:
    """`PHALANX_FAULT`: faults that a test wants, see `phalanx.fault_point`."""
    return os.environ.get("PHALANX_FAULT", "")


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


_COMPUTING = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "ONEDNN_",
    "NCCL_",
    "CUDA_",
    "NVIDIA_",
    "GLOO_",
    "UCX_",
    "LD_PRELOAD",
    "MALLOC_",
)


def computing() -> dict[str, str]:
    """The variables that decide how this process computes and which devices and networks it sees. No secrets."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_COMPUTING)}


def for_child(**values: str) -> dict[str, str]:
    """The environment for a child process: this one's, with `values` set."""
    return {**os.environ, **values}


def for_engine(threads: int = 0) -> dict[str, str]:
    """The environment for a process that computes; what the user has set stands. It gets at most `threads` OpenMP
    threads, if that is not 0.

    OpenMP threads wait for each other after every operation, and spin for a millisecond before they sleep. On a machine
    with other work, the one that is waited for may not run while the other spins, which made steps 5 to 20 times
    slower; with a short spin an idle machine is about 5 % slower. PyTorch's CPU library keeps what it has prepared for
    each shape of a product, 1,024 of them, which grew by some 80 MB over the first thousands of requests.
    """
    quick = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "1000"}
    return {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", **quick, **os.environ, **_at_most(threads)}


def _at_most(threads: int) -> dict[str, str]:
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return {"OMP_NUM_THREADS": str(threads)} if threads and not (wanted.isdigit() and int(wanted) <= threads) else {}


_OURS = (PREFIX, "HF_")
_OF_ONE_HOST = ("PHALANX_HOST_IP", "PHALANX_NODE_RANK", "PHALANX_HOST", "PHALANX_PORT")
_NOT_FOR_RANKS = ("PHALANX_API_KEY", "PHALANX_TRANSPORT_KEY")


def for_ranks() -> dict[str, str]:
    """The variables that travel to ranks on other nodes: ours, Hugging Face's and OMP_NUM_THREADS. What describes one
    host (`PHALANX_HOST_IP`, `*_SOCKET_IFNAME`, `CUDA_VISIBLE_DEVICES`) stays there, and secrets that no rank needs."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_OURS) or name == "OMP_NUM_THREADS")
        and not name.endswith("_SOCKET_IFNAME")
        and name not in (*_OF_ONE_HOST, *_NOT_FOR_RANKS)
    }


def ray_address() -> str | None:
    """`RAY_ADDRESS`: the cluster to join."""
    return os.environ.get("RAY_ADDRESS") or None


def ray_uses_tls() -> bool:
    """`RAY_USE_TLS`, as Ray reads it."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def at_start(name: str) -> str | None:
    """A variable as this process was started with it, whatever has set it since. None where that cannot be seen."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((e[len(name) + 1 :].decode() for e in entries if e.startswith(name.encode() + b"=")), None)


def adopt(variables: dict[str, str]) -> None:
    """Take over variables of the process that this one works for, and drop the OMP_NUM_THREADS that Ray has set.
    Children import this Phalanx, wherever Ray has found it."""
    if at_start("OMP_NUM_THREADS") is None:
        os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.update(variables)
    paths = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


@contextlib.contextmanager
def changed(**values: str) -> Iterator[None]:
    """Sets variables of this process for a while: for a library that reads them when it is loaded."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
