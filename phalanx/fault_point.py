"""Places in the product where a test can have a fault happen, exactly there: `PHALANX_FAULT`.

    PHALANX_FAULT="at=after_commit,step=7,do=kill"            in the engine process, after step 7 is committed
    PHALANX_FAULT="at=step,rank=1,step=3,do=stop;at=load,…"   several, separated by ;

`at` is a name of `POINTS`. `rank` and `step` narrow it (any, without them); `life=N` means only in the Nth life of the
process (1 is the first; any, without it). `file=PATH` means only while that file is there, and takes it away: so a
fault that waits in a running server is let off from outside, once in all processes. `while=PATH` means as often as
that file is found there: with `sleep`, steps take their time until it is removed. `prompt=N` means only at a step
that takes in a request with token N in its prompt: each time that it is tried. `after=N` lets a process come by N
times first. `do` is one of `DEEDS`, `raise`, or, at one of `SKIPPABLE`, `skip`: what follows is left out. Unset, a
point costs one test for None.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from phalanx import env
from phalanx.errors import ConfigError
from phalanx.step import StepPlan, unpack

T = TypeVar("T")

POINTS = (
    "join",  # a rank, before it says that it is there
    "load",  # a rank, before it reads its weights
    "fill",  # a rank, when half of its weights are read
    "allocate",  # a rank, before it makes its cache
    "step",  # a rank, before it computes a step
    "exchange",  # a rank, before it sums something with the other ranks of its stage; its played blocks stop for it
    "computed",  # a rank, after it computed a step, before it reports the result
    "compile",  # the engine, before it compiles a grammar
    "before_commit",  # the engine, a result in hand
    "after_commit",  # the engine, committed and not sent
    "after_send",  # the engine, sent and not acknowledged
    "recover",  # the engine, before it restarts the workers
)

SKIPPABLE = ("step", "exchange")
NUMBERS = ("rank", "step", "life", "prompt", "after")


def _hold_the_lock(_: float) -> None:
    ctypes.PyDLL(None).pause()  # called with the interpreter's lock held


def _spin(_: float) -> None:
    while True:
        pass


DEEDS: dict[str, Callable[[float], object]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "abort": lambda _: os.abort(),
    "segfault": lambda _: ctypes.string_at(0),
    "exit": lambda _: os._exit(0),
    "hold": _hold_the_lock,
    "spin": _spin,
    "sleep": time.sleep,
}
"""By name; `raise` and those that take seconds (`sleep=2`) beside."""


class InjectedFault(RuntimeError):
    """What `do=raise` raises."""


@dataclass(frozen=True)
class Fault:
    at: str
    do: str
    amount: float = 0.0
    rank: int | None = None
    step: int | None = None
    life: int | None = None
    prompt: int | None = None
    file: str = ""
    lasting: str = ""
    after: int = 0
    _passed: Iterator[int] = field(init=False, default_factory=itertools.count, compare=False, repr=False)

    def meant(self, plan: StepPlan | None) -> bool:
        """Whether this step is one of those that it waits for."""
        if self.prompt is None:
            return True
        admissions = plan.admissions if plan is not None else ()
        return any(self.prompt in unpack(each.tokens)[: each.num_prompt] for each in admissions)

    def let_off(self) -> bool:
        """Whether it may happen now."""
        if not all(os.path.exists(path) for path in (self.lasting, self.file) if path):
            return False
        if next(self._passed) < self.after:
            return False
        if not self.file:
            return True
        try:
            os.unlink(self.file)
        except OSError:
            return False
        return True


def parse(text: str) -> tuple[Fault, ...]:
    """Raises ConfigError."""
    return tuple(_parse_one(part) for part in text.split(";") if part.strip())


def _parse_one(text: str) -> Fault:
    fields = dict(pair.strip().partition("=")[::2] for pair in text.split(","))
    do, _, amount = fields.pop("do", "").partition("=")
    at, file, lasting = (fields.pop(name, "") for name in ("at", "file", "while"))
    try:
        numbers = {name: int(fields.pop(name)) for name in NUMBERS if name in fields}
        fault = Fault(at, do, float(amount or 0), file=file, lasting=lasting, **numbers)
    except ValueError:
        fields["?"] = text
        fault = Fault(at, do)
    known = do == "raise" or do in DEEDS or (do == "skip" and at in SKIPPABLE)
    if fields or at not in POINTS or not known:
        raise ConfigError(
            f"PHALANX_FAULT has '{text[:80]}', which is no fault.",
            fix=f"Write at=POINT,do=DEED with a point of {', '.join(POINTS)} and a deed of raise, skip, "
            f"{', '.join(DEEDS)}.",
        )
    return fault


_faults = parse(env.fault()) if env.fault() else None


def reach(
    at: str, *, rank: int | None = None, step: int | None = None, life: int | None = None, plan: StepPlan | None = None
) -> bool:
    """The point `at` is reached. Whether to leave out what follows. Raises InjectedFault when it is told to."""
    if _faults is None:
        return False
    for fault in _faults:
        wanted = (fault.rank, fault.step, fault.life)
        if fault.at != at or any(w is not None and w != h for w, h in zip(wanted, (rank, step, life), strict=True)):
            continue
        if not fault.meant(plan) or not fault.let_off():
            continue
        if fault.do == "skip":
            return True
        if fault.do == "raise":
            raise InjectedFault(f"at {at}")
        DEEDS[fault.do](fault.amount)
    return False


def armed(at: str, *, rank: int) -> bool:
    """Whether something may happen at this point of this rank."""
    return _faults is not None and any(fault.at == at and fault.rank in (None, rank) for fault in _faults)


def skippable(call: Callable[[T], T], *, rank: int) -> Callable[[T], T]:
    """An exchange that gives its argument back when it is to be left out."""
    return lambda argument: argument if reach("exchange", rank=rank) else call(argument)
