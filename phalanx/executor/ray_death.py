"""What an actor died of, in words: Ray says it in exceptions, whose texts are made for logs.

Knows the texts of Ray 2.60 by what is in them; an unknown one is passed on, cut short.
"""

from __future__ import annotations

import re
import time
from typing import Any

_SYSTEM_EXIT = re.compile(r"Worker exits with an exit code (\d+)")
_USED = re.compile(r"was ([\d.]+)GB used / ([\d.]+)GB limit")
_THRESHOLD = re.compile(r"exceeded threshold of \d+B \(([\d.]+)% of")
_PAUSE_S = 0.02
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*: ")


def death_in_words(error: Exception, node: str) -> str:
    """Why Ray says that an actor on `node` is gone."""
    text, name = " ".join(str(error).split()), type(error).__name__
    if name.startswith("RayTaskError") or getattr(error, "actor_init_failed", False):  # whatever its text says
        return f"its actor failed: {last_exception(str(error))[:300]}"
    if name == "OutOfMemoryError" or "running low on memory" in text:
        return f"Ray's memory monitor ended it, because {node} was running out of memory{_usage(text)}"
    if name == "NodeDiedError" or "node has died" in text:
        reason = text.partition("the actor's node was ")[2]
        return f"its node {node} is gone: {reason[:160].rstrip('.') or 'Ray lost it'}"
    if name == "ActorUnavailableError":
        return f"its actor's connection ended; Ray does not know yet whether the process or its node {node} is gone"
    if "killed by `ray.kill`" in text:
        return "its actor was ended by ray.kill"
    if "placement group was removed" in text:
        return "its actor is gone: somebody removed its placement group"
    if "owner has died" in text:
        return "its actor is gone: the process that started it has died"
    if code := _SYSTEM_EXIT.search(text):
        return f"its actor's process on {node} ended with status {code[1]}"
    if "worker process has died" in text:
        return f"its actor's process on {node} was killed or crashed; Ray saw its connection end"
    return f"its actor is gone: {text[:300].rstrip('.')}"


def last_word(ray: Any, actor: Any, error: Exception, wait: float) -> Exception:
    """`error`, or what Ray says within `wait` seconds where that is only that the actor is unavailable: it hears that a
    connection has ended before it hears why."""
    deadline = time.monotonic() + wait
    while type(error).__name__ == "ActorUnavailableError" and (left := deadline - time.monotonic()) > 0:
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=left)
        except ray.exceptions.GetTimeoutError:
            break
        except ray.exceptions.RayError as later:
            error = later
        else:
            break
        time.sleep(_PAUSE_S)
    return error


def _usage(text: str) -> str:
    used, threshold = _USED.search(text), _THRESHOLD.search(text)
    found = [f"{used[1]} of {used[2]} GB in use"] if used else []
    found += [f"it steps in at {float(threshold[1]):g}%"] if threshold else []
    return f" ({', '.join(found)})" if found else ""


def last_exception(text: str) -> str:
    """The exception that a traceback ends with, and the first line of what it says."""
    end = text.rpartition('\n  File "')[2].splitlines()
    plain = next((line for line in end if _EXCEPTION.match(line)), text.splitlines()[-1].strip())
    name, _, rest = plain.partition(": ")
    return " ".join(f"{name.rpartition('.')[2]}: {rest}".split())[:1500].rstrip(". ")
