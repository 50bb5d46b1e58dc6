"""What clients and onlookers saw while faults happened, and what is wrong with it. Pure: no clock, no sockets.

A `Log` is what one client got, event by event with times. Every check returns complaints in words; none is a pass.

    complaints = check_stream(log, oracle) + check_gap(log, 5.0) + check_health(samples, recoveries) + …

The checks are themselves checked with bad histories in tests/unit/test_history.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"
TRUTH_S = 1.0
"""Health tells the truth this long after an event, at the latest."""
LOGPROB_TOLERANCE = 2e-4
"""In nats. A split into other ranks sums in another order."""


@dataclass
class Event:
    at: float
    """Seconds, of one clock for the whole history."""
    data: str
    """After `data: `."""


@dataclass
class Log:
    """What one client sent and saw."""

    ask: str
    """The name of what it asked: which oracle holds."""
    sent: float = 0.0
    status: int | None = None
    """None while there is no answer at all."""
    retry_after: str | None = None
    body: str = ""
    """Of a refusal."""
    events: list[Event] = field(default_factory=list)
    closed: float | None = None
    broken: str = ""
    """Why the connection ended before its time."""

    @property
    def accepted(self) -> bool:
        return self.status == 200


@dataclass
class Choice:
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    """Only with logprobs."""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Answer:
    """A stream, put together."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    errors: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    """What is wrong with the stream itself, whatever it says."""


def assemble(log: Log) -> Answer:
    answer = Answer()
    ids: set[str] = set()
    ends = [i for i, event in enumerate(log.events) if event.data == DONE]
    if len(ends) != 1:
        answer.complaints.append(f"{len(ends)} ends instead of one")
    if ends and ends[0] != len(log.events) - 1:
        answer.complaints.append(f"{len(log.events) - 1 - ends[0]} events after the end")
    for event in log.events:
        if event.data == DONE:
            continue
        try:
            frame = json.loads(event.data)
        except ValueError:
            answer.complaints.append(f"an event that is no JSON: {event.data[:80]!r}")
            continue
        if answer.errors:
            answer.complaints.append("an event after the error")
        if "error" in frame:
            answer.errors.append(str(frame["error"].get("message")))
            continue
        ids.add(frame["id"])
        for part in frame["choices"]:
            _add(answer, part)
        if frame.get("usage"):
            if answer.usage is not None:
                answer.complaints.append("usage twice")
            answer.usage = {name: frame["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    if len(ids) > 1:
        answer.complaints.append(f"{len(ids)} ids in one answer")
    return answer


def _add(answer: Answer, part: dict[str, Any]) -> None:
    choice = answer.choices.setdefault(part["index"], Choice())
    if choice.finish_reason is not None:
        answer.complaints.append(f"choice {part['index']} goes on after it finished")
    text = part["text"] if "text" in part else part["delta"].get("content") or ""
    choice.text += text
    logprobs = part.get("logprobs")
    if logprobs and "tokens" in logprobs:
        choice.tokens += logprobs["tokens"]
        choice.logprobs += [value or 0.0 for value in logprobs["token_logprobs"]]
    choice.finish_reason = part["finish_reason"] or choice.finish_reason


# ---------------------------------------------------------------------------------------------------- one client


def check_stream(log: Log, oracle: Answer) -> list[str]:
    """Against the answer of the undisturbed run. A refusal is right when it says when to come again."""
    return [f"{log.ask}: {complaint}" for complaint in _stream(log, oracle)]


def _stream(log: Log, oracle: Answer) -> list[str]:
    if not log.accepted:
        if log.status == 503 and log.retry_after:
            return []
        return [f"no answer, status {log.status}: {log.broken or log.body[:200]}"]
    answer = assemble(log)
    found = list(answer.complaints)
    if log.broken:
        found.append(f"the stream broke off: {log.broken}")
    found += [f"it ended with an error: {error}" for error in answer.errors]
    if answer.choices.keys() != oracle.choices.keys():
        found.append(f"choices {sorted(answer.choices)} instead of {sorted(oracle.choices)}")
    for index in answer.choices.keys() & oracle.choices.keys():
        found += [f"choice {index} {text}" for text in _differences(answer.choices[index], oracle.choices[index])]
    if answer.usage != oracle.usage:
        found.append(f"usage is {answer.usage} instead of {oracle.usage}")
    return found


def _differences(got: Choice, wanted: Choice) -> list[str]:
    found = []
    if got.text != wanted.text:
        found.append(_first_difference("text", got.text, wanted.text))
    if got.tokens != wanted.tokens:
        found.append(_first_difference("tokens", got.tokens, wanted.tokens))
    elif any(abs(a - b) > LOGPROB_TOLERANCE for a, b in zip(got.logprobs, wanted.logprobs, strict=True)):
        worst = max(abs(a - b) for a, b in zip(got.logprobs, wanted.logprobs, strict=True))
        found.append(f"has other logprobs, by up to {worst:.2g}")
    if got.finish_reason != wanted.finish_reason:
        found.append(f"finished with {got.finish_reason} instead of {wanted.finish_reason}")
    return found


def _first_difference(what: str, got: Sequence[Any], wanted: Sequence[Any]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    around = slice(max(0, at - 6), at + 10)
    return f"differs in its {what} at {at} of {len(wanted)}: {got[around]!r} instead of {wanted[around]!r}"


def longest_gap(log: Log) -> tuple[float, float]:
    """(when it began, how long it was) of the longest time without an event."""
    times = [log.sent, *(event.at for event in log.events)]
    if log.closed is not None:
        times.append(log.closed)
    gaps = [(after - before, before) for before, after in itertools.pairwise(times)]
    longest, began = max(gaps, default=(0.0, log.sent))
    return began, longest


def check_gap(log: Log, bound: float) -> list[str]:
    began, longest = longest_gap(log)
    if longest <= bound:
        return []
    return [
        f"{log.ask}: silent for {longest:.2f} s, {began - log.sent:.2f} s after it was sent; the bound is {bound:g} s"
    ]


def next_event_after(logs: Iterable[Log], moment: float) -> float | None:
    """Seconds from `moment` until the last of the streams that were under way then moved again: until the end of its
    longest silence from then on, since what was in flight may still come at once. None when no stream was under way.
    """
    waits = []
    for log in logs:
        times = [event.at for event in log.events]
        later = [(after - max(before, moment), after) for before, after in itertools.pairwise(times) if after > moment]
        if later and times[0] <= moment:
            waits.append(max(later)[1] - moment)
    return max(waits, default=None)


# ------------------------------------------------------------------------------------------------------- health


@dataclass(frozen=True)
class Sample:
    """One look at `/health/ready`."""

    at: float
    ready: bool | None
    """None: no answer within a second."""


@dataclass(frozen=True)
class Outage:
    began: float
    """The last sign of life."""
    noticed: float
    ended: float
    """All workers were there again."""


def check_health(samples: Sequence[Sample], outages: Sequence[Outage], *, able: tuple[float, float]) -> list[str]:
    """Never ready while it is known to be unable, never unready while able; each with the time that the truth may
    take. `able` is from when to when the server was there at all, apart from the outages."""
    found = []
    for sample in samples:
        if sample.ready is None:
            found.append(f"health did not answer at {sample.at - able[0]:.2f} s")
        elif sample.ready and any(o.noticed + TRUTH_S < sample.at < o.ended - 0.05 for o in outages):
            found.append(f"ready in the midst of an outage, at {sample.at - able[0]:.2f} s")
        elif (
            not sample.ready
            and able[0] < sample.at < able[1]
            and not any(o.began - 0.5 <= sample.at <= o.ended + TRUTH_S for o in outages)
        ):
            found.append(f"not ready without a reason, at {sample.at - able[0]:.2f} s")
    return found[:5]


# --------------------------------------------------------------------------------------------- counts and baseline


@dataclass(frozen=True)
class Baseline:
    """What a server at rest holds."""

    free_blocks: int
    blocks: int
    processes: Mapping[str, int]
    """How many by role."""
    shared: frozenset[str] = frozenset()
    """Names in /dev/shm."""
    ports: int = 0
    """Listening TCP sockets."""
    running: int = 0
    waiting: int = 0


def check_rest(before: Baseline, after: Baseline) -> list[str]:
    """Of the same server, before and after."""
    found = []
    if after.free_blocks != after.blocks:
        found.append(f"{after.blocks - after.free_blocks} of {after.blocks} KV blocks are not free")
    if after.running or after.waiting:
        found.append(f"{after.running} requests run and {after.waiting} wait, and nobody asked")
    if dict(after.processes) != dict(before.processes):
        found.append(f"processes {dict(after.processes)} instead of {dict(before.processes)}")
    if len(after.shared) > len(before.shared):
        found.append(f"more in shared memory: {sorted(after.shared - before.shared)}")
    if after.ports != before.ports:
        found.append(f"{after.ports} ports listen instead of {before.ports}")
    return found


def check_counts(wanted: Sequence[frozenset[str]], counted: Mapping[str, int]) -> list[str]:
    """`wanted` has, for each loss that was caused, the kinds that it may count as."""
    left = {kind: number for kind, number in counted.items() if number}
    for kinds in sorted(wanted, key=len):
        kind = next((kind for kind in sorted(kinds) if left.get(kind)), None)
        if kind is None:
            return [f"losses are counted as {dict(counted)}; caused were {[sorted(kinds) for kinds in wanted]}"]
        left[kind] -= 1
    if any(left.values()):
        return [f"losses are counted as {dict(counted)}; caused were {[sorted(kinds) for kinds in wanted]}"]
    return []


def tells(answer: Answer) -> bool:
    """Whether this oracle would show a lost, repeated or swapped token: its end is not one piece over and over."""
    for choice in answer.choices.values():
        pieces: Sequence[str] = choice.tokens or choice.text
        tail = pieces[-min(12, len(pieces)) :]
        if len(set(tail)) < min(4, len(tail)):
            return False
    return bool(answer.choices)
