"""Small facts about calls to Ray actors that several modules need: what a class is, how its actor is made so that it
answers while it works, and what Ray's errors mean in words."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from phalanx.errors import ConfigError
from phalanx.executor.ray_death import death_in_words, last_exception

CONTROL = "phalanx_control"
"""The concurrency group in which an actor answers probes while its other methods work."""
_CONTROL_THREADS = 4


def plain_class(given: Any) -> tuple[type, dict[str, Any]]:
    """The class itself, and the options that `@ray.remote(...)` gave it. Raises ConfigError for anything else."""
    metadata = getattr(given, "__ray_metadata__", None)
    if metadata is not None:
        modified = metadata.modified_class
        options = {name: value for name, value in given._default_options.items() if value is not None}
        return getattr(modified, "__ray_actor_class__", modified), options
    if not isinstance(given, type):
        raise ConfigError(
            f"An actor's class is needed, got {given!r:.80}.", fix="Give a class, plain or decorated with @ray.remote."
        )
    return given, {}


def actor_class(ray: ModuleType, cls: type, options: Mapping[str, Any]) -> Any:
    """`cls` as a Ray actor class. Raises ConfigError for options that Ray does not take."""
    groups = {**(options.get("concurrency_groups") or {}), CONTROL: _CONTROL_THREADS}
    try:
        return ray.remote(**{**options, "concurrency_groups": groups})(cls)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"The options for {cls.__name__} are no good: {one_line(error)}.") from None


def probe(actor: Any, method: str | None) -> Any:
    """Ask an actor whether it is well: by its own method, or whether it is there at all."""
    asked = getattr(actor, method) if method is not None else actor.__ray_ready__
    return asked.options(concurrency_group=CONTROL, max_task_retries=0).remote()


def has_method(cls: type, name: str) -> bool:
    return callable(getattr(cls, name, None))


def end(ray: ModuleType, actor: Any) -> None:
    """At once, whatever it does. Its resources are free a little later."""
    with contextlib.suppress(Exception):  # it is dead already, or Ray is
        ray.kill(actor, no_restart=True)


def one_line(error: BaseException, longest: int = 600) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:longest].rstrip(". ")


def why_it_failed(error: Exception, cls: type, host: str) -> str:
    """Why an actor is gone or a method of it has raised: one sentence without a traceback or a full stop."""
    where = f" on {host}" if host else ""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{cls.__name__}{where} raised {type(cause).__name__}: {one_line(cause)}"
    text = str(error)
    if "raised in its creation task" in text or getattr(error, "actor_init_failed", False):
        return f"the constructor of {cls.__name__}{where} raised {last_exception(text)}"
    for module in ("phalanx", "msgspec", cls.__module__.partition(".")[0]):
        if f"No module named '{module}" in text or f"No module named {module}" in text:
            return f"the module {module} is not installed{where}, in the Python that Ray uses there"
    return f"{cls.__name__}{where}: {death_in_words(error, host or 'its node')}"
