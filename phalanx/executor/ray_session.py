"""This process's connection to Ray: a cluster that runs is joined; where there is none, a local one is started.

A local cluster listens on the loopback interface only, has no dashboard, wants a token unless RAY_AUTH_MODE says
otherwise, and ends with the session or with this process. A cluster that was joined stays; a connection that was there
already is left as it is. Ray's command-line tools and other programs do not find the local cluster by themselves.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from phalanx import env
from phalanx.errors import ClusterMissing, ConfigError
from phalanx.executor.interfaces import is_loopback
from phalanx.executor.ray_reaper import MARK

log = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80_000_000
"""About the least that Ray allows; nothing of ours is put there."""

_SHORT = "/tmp"  # noqa: S108 (mkdtemp makes the folder in it)

_LONGEST_FOLDER = 30
"""Ray and we add 77 characters."""

_PROBE_S = 3.0
_REAP_S = 6.0

LOCAL_SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on these systems Ray keeps to the loopback interface; so do we on Linux
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # nobody else runs in it, and it would count what others on the machine use
    "RAY_kill_worker_timeout_milliseconds": "1000",
    "RAY_worker_niceness": "0",  # else ranks would run at 15: whatever else is running went before them
}


def import_ray() -> ModuleType:
    """Raises ConfigError where it is not installed, or is too old."""
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "This runs on Ray (--distributed-executor-backend ray), but Ray is not installed.",
            fix="pip install 'phalanx[ray]'",
        ) from None
    major, minor = (int(part) for part in ray.__version__.split(".")[:2])
    if (major, minor) < (2, 59):
        raise ConfigError(
            f"Ray {ray.__version__} is too old: Phalanx needs 2.59 or newer.", fix="pip install 'phalanx[ray]'"
        )
    return ray


class RaySession:
    """Connected when made. `cpus`, `gpus` (0: those of the machine) and `resources` are what a cluster that has to be
    started shall offer, `folder` is where it keeps its files. `address` goes before RAY_ADDRESS."""

    def __init__(
        self,
        *,
        cpus: float,
        gpus: float,
        resources: Mapping[str, float] | None = None,
        folder: str | None = None,
        address: str | None = None,
    ):
        """Raises ConfigError."""
        self.ray = import_ray()
        self.joined = False
        """By us; then `close` disconnects."""
        self.started = False
        self._reaper: subprocess.Popen[bytes] | None = None
        if self.ray.is_initialized():
            return
        found = _address(address)
        with quietly():
            if found is None:
                self._start(cpus, gpus, dict(resources or {}), folder)
            else:
                _join(self.ray, found)
        self.joined = True
        _start_no_other()
        if found is not None:
            warn_of_open_cluster(found)

    def _start(self, cpus: float, gpus: float, resources: dict[str, float], where: str | None) -> None:
        folder = _new_folder(where)
        mark = secrets.token_hex(16)
        command = [sys.executable, "-P", "-m", "phalanx.executor.ray_reaper", mark, folder]
        self._reaper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, start_new_session=True)
        options: dict[str, Any] = {"num_gpus": math.ceil(gpus)} if gpus else {}
        try:
            with env.changed(**LOCAL_SETTINGS, **{MARK: mark}), loopback():
                self.ray.init(
                    address="local",
                    num_cpus=math.ceil(cpus) or os.cpu_count() or 1,
                    resources=resources,
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    configure_logging=False,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=folder,
                    **options,
                )
        except BaseException as error:
            self._clean_up()
            if not isinstance(error, Exception):
                raise
            raise ConfigError(f"A local Ray cluster could not be started: {_line(error)}.") from error
        self.started = True
        log.debug("started a local Ray cluster in %s", folder)

    def close(self) -> None:
        """Idempotent."""
        if self.joined:
            self.joined = self.started = False
            with quietly():
                self.ray.shutdown()
        self._clean_up()

    def _clean_up(self) -> None:
        reaper, self._reaper = self._reaper, None
        if reaper is not None and reaper.stdin is not None:
            reaper.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                reaper.wait(_REAP_S)


def _start_no_other() -> None:
    """Most of Ray's calls start a cluster when there is no connection. A thread that comes late, after `close`, must
    not bring up another one than the one that was chosen."""
    from ray._private import auto_init_hook

    auto_init_hook.enable_auto_connect = False


def _new_folder(where: str | None) -> str:
    """Short, because sockets lie below and their paths may have 107 characters. Raises ConfigError."""
    if where is None:
        return tempfile.mkdtemp(prefix="phalanx-ray-", dir=_SHORT if os.path.isdir(_SHORT) else None)
    if len(os.fsencode(os.path.abspath(where))) > _LONGEST_FOLDER:
        raise ConfigError(
            f"The folder for Ray's files, {where}, has a path of more than {_LONGEST_FOLDER} characters: sockets below "
            "it could not be made.",
            fix="Choose a shorter one.",
        )
    try:
        os.makedirs(where, exist_ok=True)
        return tempfile.mkdtemp(prefix="ray-", dir=os.path.abspath(where))
    except OSError as error:
        raise ConfigError(f"The folder for Ray's files, {where}, cannot be used: {error.strerror or error}.") from None


def _address(asked: str | None = None) -> str | None:
    """Of the running cluster that is `asked` for, or that this machine belongs to; None when there is none. Raises
    ConfigError."""
    who, wanted = ("The address", asked) if asked not in (None, "auto") else ("RAY_ADDRESS", env.ray_address())
    if wanted == "local":
        return None
    if wanted not in (None, "auto"):
        if "://" in wanted:
            raise ConfigError(
                f"{who} is {wanted}: ranks cannot be started through a Ray client.",
                fix=f"Run on a node of the cluster, with {who} set to the head's address and port (host:6379).",
            )
        if not _answers(wanted):
            raise ClusterMissing(
                f"{who} is {wanted}, where nothing answers.",
                fix="Start the cluster (`ray start --head`), correct the address, or unset it to use a local cluster.",
            )
        return wanted
    from ray._private.services import find_bootstrap_address  # the last `ray start` on this machine

    found = find_bootstrap_address(None)
    return found if found and _answers(found) else None


def is_running() -> bool:
    """Whether Ray is installed, and this machine belongs to a cluster that was started with it."""
    if importlib.util.find_spec("ray") is None:
        return False
    try:
        return _address() is not None
    except ConfigError:
        return False


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except (OSError, ValueError):
        return False
    return True


def _speaks_tls(address: str) -> bool | None:
    """None when that cannot be seen. Nothing is proved to each other, and nothing said."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S) as plain:
            context.wrap_socket(plain).close()
    except ssl.SSLError as error:  # an alert, such as that a certificate is wanted, is TLS too
        return "ALERT" in (error.reason or "")
    except TimeoutError:
        return None
    except (OSError, ValueError):
        return False
    return True


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host == "localhost" or is_loopback(host)


def _join(ray: ModuleType, address: str) -> None:
    from ray._private import services

    found: Any = services
    if not found.find_node_ids():  # Ray would look for one of them for a minute
        raise _no_node_here(address)
    speaks_tls = _speaks_tls(address)
    if speaks_tls is not None and speaks_tls != env.ray_uses_tls():  # Ray would try for minutes
        says = "wants TLS, and RAY_USE_TLS is not set here" if speaks_tls else "has no TLS, and RAY_USE_TLS is set here"
        raise ConfigError(
            f"The Ray cluster at {address} {says}.", fix="Set RAY_USE_TLS and RAY_TLS_… as on the cluster's nodes."
        )
    own = env.host_ip()
    options = {"_node_ip_address": own} if own else {}
    # Ray would look for a cluster that keeps to the loopback interface at this machine's other address.
    as_it_is = loopback() if _is_loopback(address) else contextlib.nullcontext()
    try:
        with as_it_is:
            ray.init(address=address, log_to_driver=False, configure_logging=False, **options)
    except Exception as error:
        text = " ".join(_line(cause) for cause in _causes(error))
        if "No node info found" in text:  # there are nodes here, of other clusters
            raise _no_node_here(address) from error
        raise _refused(address, text) from error


def _no_node_here(address: str) -> ClusterMissing:
    return ClusterMissing(
        f"The Ray cluster at {address} cannot be joined: no Ray node of it runs on this machine.",
        fix="`ray start --address=…` makes this machine one.",
    )


def _refused(address: str, text: str) -> ConfigError:
    if "Version mismatch" in text:
        return ConfigError(
            f"The Ray cluster at {address} has other versions than this process: {text}",
            fix="Use the same versions of Ray and Python on all nodes.",
        )
    if "token" in text.lower():
        return ConfigError(
            f"The Ray cluster at {address} wants a token: {text}",
            fix="Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) as on the cluster's nodes.",
        )
    return ConfigError(
        f"The Ray cluster at {address} cannot be joined: {text}",
        fix="Run on a node of the cluster (`ray start --address=…` makes this machine one), with the RAY_AUTH_MODE and "
        "RAY_AUTH_TOKEN of the others.",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:400].rstrip(".")


def warn_of_open_cluster(address: str) -> None:
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    if not is_token_auth_enabled() and not _is_loopback(address):
        log.warning(
            "The Ray cluster at %s asks for no token: ANYBODY who can reach it can run programs on its nodes. Start it "
            "with RAY_AUTH_MODE=token.",
            address,
        )


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Ray's remarks on its own start are not for our output, and SIGTERM stays with whoever has it."""
    logger = logging.getLogger("ray")
    level, handlers = logger.level, list(logger.handlers)
    logger.setLevel(logging.CRITICAL)
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers
        if main:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def loopback() -> Iterator[None]:
    """Ray replaces 127.0.0.1 by an address that others reach, unless it believes that clusters are not wanted here. It
    reads the variable in `LOCAL_SETTINGS` when it is imported, which may have been long ago."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
