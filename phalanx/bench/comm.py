"""`phalanx bench comm`: how fast the ranks of one machine exchange tensors and messages, beside gloo.

Forks the ranks, lets them time (`phalanx.distributed.speed`), and makes JSON and a table of what they say. A time is
the slowest rank's. Nothing is left behind, whatever happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.bench.report import machine
from phalanx.errors import PhalanxError, UserError
from phalanx.planner.hardware import Hardware

if TYPE_CHECKING:
    from phalanx.distributed.speed import Speed, Timing

TRANSPORTS = ("shm", "tcp", "tcp-encrypted", "tcp-packed", "gloo")
YARDSTICK = "gloo"
SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 20, 1 << 22)
_PR_SET_PDEATHSIG = 1
_DONE, _FAILED = b"+", b"-"
_LARGE = 1 << 22
"""From this many bytes on, a sum is compared with what copying allows."""


class _Order(msgspec.Struct, frozen=True):
    transports: list[str]
    sizes: list[int]
    seconds: float
    meeting: str
    cores: list[int]
    key: bytes


def measure(
    ranks: int, transport: str, sizes: Sequence[int], *, seconds: float, cores: Sequence[int] = ()
) -> list[Speed]:
    """What every rank measured, `transport` beside gloo. `cores` are given to the ranks in turn; by default one to each
    where there are enough, as a server does.

    Raises PhalanxError when a rank fails, UserError where ranks cannot be forked.
    """
    if sys.platform != "linux":
        raise UserError("Measuring the exchange between ranks needs Linux.")
    from phalanx.distributed.address import Address
    from phalanx.distributed.speed import Speed  # and with it torch, which the ranks inherit

    usable = sorted(os.sched_getaffinity(0))
    cores = cores or (usable if ranks <= len(usable) else [])
    # gloo meets in a file: one without a name, which forked ranks have too, and which ends with the last of us
    with open(os.memfd_create("phalanx-bench"), "wb") as file, _ranks(ranks) as pipes:
        transports, meeting = list(dict.fromkeys((transport, YARDSTICK))), f"/proc/self/fd/{file.fileno()}"
        order = _Order(transports, list(sizes), seconds, meeting, list(cores), secrets.token_bytes(32))
        for pipe in pipes:
            pipe.send_bytes(msgspec.msgpack.encode(order))
        roster = [msgspec.msgpack.decode(_hear(pipe, rank), type=Address) for rank, pipe in enumerate(pipes)]
        for pipe in pipes:
            pipe.send_bytes(msgspec.msgpack.encode(roster))
        return [msgspec.msgpack.decode(data, type=Speed) for data in _hear_all(pipes)]


@contextlib.contextmanager
def _ranks(count: int) -> Iterator[list[Connection]]:
    """Forked processes, each at the other end of a pipe; gone at the end."""
    context = multiprocessing.get_context("fork")
    processes, pipes = [], []
    try:
        for rank in range(count):
            ours, theirs = context.Pipe()
            pipes.append(ours)
            processes.append(
                context.Process(target=_rank, args=(rank, count, theirs), name=f"rank {rank}", daemon=True)
            )
            processes[-1].start()
            theirs.close()
        yield pipes
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
        for pipe in pipes:
            pipe.close()


def _hear_all(pipes: Sequence[Connection]) -> list[bytes]:
    """Answers as they come, so that the first failure is the one that is told."""
    found: dict[int, bytes] = {}
    while len(found) < len(pipes):
        waiting = {id(pipe): rank for rank, pipe in enumerate(pipes) if rank not in found}
        for pipe in wait([pipes[rank] for rank in waiting.values()]):
            rank = waiting[id(pipe)]
            found[rank] = _hear(pipes[rank], rank)
    return [found[rank] for rank in range(len(pipes))]


def _hear(pipe: Connection, rank: int) -> bytes:
    try:
        answer = pipe.recv_bytes()
    except (EOFError, ConnectionResetError):
        raise PhalanxError(f"Rank {rank} of the measurement died.") from None
    if answer[:1] == _FAILED:
        raise PhalanxError(f"Rank {rank} of the measurement failed: {answer[1:].decode()}")
    return answer[1:]


def _rank(rank: int, count: int, pipe: Connection) -> None:
    """One rank's process: it is told what to do, and answers with its address, then with what it measured."""
    from phalanx.distributed import speed
    from phalanx.distributed.address import Address
    from phalanx.distributed.bootstrap import Door

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us, and we end with it
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        order = msgspec.msgpack.decode(pipe.recv_bytes(), type=_Order)
        speed.one_thread()
        crowded = count > (len(order.cores) or len(os.sched_getaffinity(0)))
        door = Door(rank, "127.0.0.1")
        pipe.send_bytes(_DONE + msgspec.msgpack.encode(door.address))
        roster = msgspec.msgpack.decode(pipe.recv_bytes(), type=list[Address])
        ways = {n: speed.connect(n, door, roster, order.key, order.meeting, crowded) for n in order.transports}
        if order.cores:  # this thread only: gloo's own, started already, may run anywhere
            os.sched_setaffinity(0, {order.cores[rank % len(order.cores)]})
        measured = speed.measure(ways, speed.OPERATIONS, order.sizes, order.seconds)
        pipe.send_bytes(_DONE + msgspec.msgpack.encode(measured))
        pipe.recv_bytes()  # nobody leaves before all are done
    except EOFError:
        return
    except Exception as error:
        text = str(error) if isinstance(error, PhalanxError) else f"{type(error).__name__}: {error}"
        pipe.send_bytes(_FAILED + text.encode())


# -- what is told ----------------------------------------------------------------------------------------------------


def report(speeds: Sequence[Speed], transport: str, hardware: Hardware) -> dict[str, Any]:
    """The JSON object. Times are in microseconds, of the slowest rank; `bytes` is the whole tensor, also where each
    rank has only its part; bandwidths are bytes / median."""
    rows = []
    for timings in zip(*(speed.timings for speed in speeds), strict=True):
        if timings[0].group == transport:
            rows.append(_row(timings))
    if transport != YARDSTICK:
        others = {
            (timings[0].operation, timings[0].nbytes): _row(timings)
            for timings in zip(*(speed.timings for speed in speeds), strict=True)
            if timings[0].group == YARDSTICK
        }
        for row in rows:
            row[YARDSTICK] = other = others[row["operation"], row["bytes"]]
            row["speedup"] = round(other["median_us"] / row["median_us"], 1)
    copied = {str(nbytes): round(min(s.copied[nbytes] for s in speeds) / 1e9, 3) for nbytes in speeds[0].copied}
    for row in rows:
        if row["operation"] == "all_reduce" and row["bytes"] >= _LARGE:
            row["of_copy_speed"] = _of_copy_speed(row, copied[str(row["bytes"])], len(speeds))
    return {
        "ranks": len(speeds),
        "transport": transport,
        "results": rows,
        "how": speeds[0].how.get(transport, {}),
        "copy_gb_s": copied,
        "machine": machine(hardware),
    }


def _row(timings: Sequence[Timing]) -> dict[str, Any]:
    first, median = timings[0], max(t.median for t in timings)
    row = {
        "operation": first.operation,
        "bytes": first.nbytes,
        "median_us": round(median * 1e6, 2),
        "p90_us": round(max(t.p90 for t in timings) * 1e6, 2),
        "count": first.count,
    }
    if first.nbytes:
        row["gb_s"] = round(first.nbytes / median / 1e9, 3)
    return row


def _of_copy_speed(row: dict[str, Any], copy_gb_s: float, ranks: int) -> float:
    """The time that copying alone would take, as a share of the time of a sum.

    Each of R ranks hands over R-1 of R slices of n bytes, adds up R slices into one (as much memory as (R+1)/2 copies
    of n/R bytes), and takes R-1 summed slices: 2n(R-1)/R + n(R+1)/2R bytes at the speed that all ranks reach at once.
    """
    n: int = row["bytes"]
    seconds: float = row["median_us"] * 1e-6
    least = 2 * n * (ranks - 1) / ranks + n * (ranks + 1) / (2 * ranks)
    return round(least / (copy_gb_s * 1e9) / seconds, 3)


def table(result: dict[str, Any]) -> str:
    """For people."""
    transport, beside = result["transport"], result["transport"] != YARDSTICK
    title = f"{result['ranks']} ranks on {result['machine']['cores']} cores, {transport}"
    head = ["operation", "size", "median", "p90", "bandwidth"]
    if beside:
        title += f", beside {YARDSTICK}"
        head += [f"{YARDSTICK} median", f"{YARDSTICK} p90", f"{YARDSTICK} bandwidth", "faster"]
    lines = [head]
    for row in result["results"]:
        line = [row["operation"], _size(row["bytes"]) if row["bytes"] else "", *_figures(row)]
        if beside:
            line += [*_figures(row[YARDSTICK]), f"{row['speedup']:.1f} x"]
        lines.append(line)
    for i in range(len(lines) - 1, 0, -1):  # each name once
        if lines[i][0] == lines[i - 1][0]:
            lines[i][0] = ""
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [title, ""]
    for line in lines:
        cells = [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        text.append("  ".join(cells).rstrip())
    text += ["", "The size is the whole tensor, also where each rank has a part of it. send and message are one way."]
    how = {name: value for name, value in result["how"].items() if name.endswith("_bytes")}
    if how:
        sizes = ", ".join(
            f"{name.removesuffix('_bytes').replace('_', ' ')} {value:,} bytes" for name, value in how.items()
        )
        text.append(f"{transport} is {result['how']['transport']}: {sizes}.")
    if "message_limit" in result["how"]:
        limit = result["how"]["message_limit"]
        text.append(f"A message, of at most {limit:,} bytes, goes through a socket of its own, and not behind tensors.")
    for row in result["results"]:
        if "of_copy_speed" in row:
            speed = result["copy_gb_s"][str(row["bytes"])]
            text.append(
                f"all_reduce of {_size(row['bytes'])} reaches {row['of_copy_speed']:.0%} of what copying allows "
                f"({speed:.1f} GB/s a rank)."
            )
    return "\n".join(text)


def _figures(row: dict[str, Any]) -> list[str]:
    return [_time(row["median_us"]), _time(row["p90_us"]), f"{row['gb_s']:.2f} GB/s" if "gb_s" in row else ""]


def _time(microseconds: float) -> str:
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds / 1000:.2f} ms"


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"
